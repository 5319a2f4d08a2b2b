/// \file copy.h
/// \brief Memory copies: ordinary, and streaming past the cache for data that outgrow it.
#pragma once

#include <cstddef>
#include <cstring>

#include "op_kernel/cpu/clones.h"

namespace alltoallv::kernel {

/// Copies with non-temporal stores where the processor has them, else like memcpy. Returns after a store fence, so a
/// release store that follows publishes the data. Any alignment; the two must not overlap.
void copy_streaming(void* to, const void* from, size_t bytes);

/// Bytes from which on data outgrow the cache so far that streaming pays.
constexpr size_t streaming_from = size_t{32} << 20;

/// Copies a piece of data that are `total` bytes: streaming if they are many, else as memcpy does.
inline void copy_piece(void* to, const void* from, size_t bytes, size_t total) {
    if (total >= streaming_from) {
        copy_streaming(to, from, bytes);
    } else {
        std::memcpy(to, from, bytes);
    }
}

/// copy_streaming() on one instruction set, at most best_isa(), writing `streams` pages in turn: for tests.
void copy_streaming_on(Isa isa, size_t streams, void* to, const void* from, size_t bytes);

}  // namespace alltoallv::kernel
