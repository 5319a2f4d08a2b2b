// Reads what the host tells a kernel.
#pragma once

#include "kernel_operator.h"

namespace alltoallv_kernels {

/// Copies a struct of 32-bit words from device memory, where the host has put it before the launch.
template <class T>
__aicore__ inline T TilingOf(GM_ADDR address) {
    static_assert(sizeof(T) % sizeof(uint32_t) == 0, "tiling is made of words");
    T tiling;
    const __gm__ uint32_t* from = reinterpret_cast<const __gm__ uint32_t*>(address);
    uint32_t* to = reinterpret_cast<uint32_t*>(&tiling);
    for (uint32_t i = 0; i < sizeof(T) / sizeof(uint32_t); ++i) to[i] = from[i];
    return tiling;
}

}  // namespace alltoallv_kernels
