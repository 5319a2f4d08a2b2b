// Copies memory: with ordinary stores, or with streaming stores past the cache for data that exceed it.
#pragma once

#include <cstddef>
#include <cstring>

#include "op_kernel/cpu/clones.h"

namespace alltoallv::kernel {

/// Copies with non-temporal stores if the processor has them, else like memcpy. Returns after a store fence, so a
/// release store that follows publishes the data. Any alignment; the two must not overlap.
void copy_streaming(void* to, const void* from, size_t bytes);

/// Copies in the same way without the fence: call fence_streaming() before the data are published.
void copy_streaming_unfenced(void* to, const void* from, size_t bytes);
void fence_streaming();

/// The same of `rows` rows of `bytes`, each `to_step`, or `from_step`, bytes after the one before.
void copy_rows_streaming_unfenced(void* to, size_t to_step, const void* from, size_t from_step, size_t bytes,
                                  size_t rows);

/// Copies like copy_streaming() or like memcpy.
inline void copy(void* to, const void* from, size_t bytes, bool streams) {
    if (streams)
        copy_streaming(to, from, bytes);
    else
        std::memcpy(to, from, bytes);
}

/// Runs copy_streaming() on one instruction set, at most best_isa(), with `streams` pages in turn: for tests.
void copy_streaming_on(Isa isa, size_t streams, void* to, const void* from, size_t bytes);

}  // namespace alltoallv::kernel
