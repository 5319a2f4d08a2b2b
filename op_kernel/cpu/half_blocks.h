// Converts arrays of float16 or bfloat16 to float32 and back, as fast as the processor can.
#pragma once

#include <cstddef>

#include "op_kernel/cpu/clones.h"
#include "runtime/base/dtype.h"

namespace alltoallv::kernel {

/// Conversions of `count` elements at any alignment, with the bits of half.h. `in` and `out` must not overlap.
struct HalfBlocks {
    using Convert = void (*)(unsigned char* out, const unsigned char* in, size_t count);
    Convert widen;   // to float32
    Convert narrow;  // from float32
};

/// `dtype` is float16 or bfloat16; `isa` at most best_isa().
HalfBlocks half_blocks(DType dtype, Isa isa);

}  // namespace alltoallv::kernel
