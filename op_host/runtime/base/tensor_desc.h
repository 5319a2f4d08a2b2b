// A tensor as ATB describes it: element type, shape, layout.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/base/dtype.h"

namespace alltoallv {

/// Memory layouts that have names in ATB; the operators accept only `nd`.
enum class Format : uint8_t { nd, nchw, nhwc, fractal_nz };

struct TensorDesc {
    DType dtype = DType::float32;
    std::vector<int64_t> shape;
    Format format = Format::nd;
};

}  // namespace alltoallv
