// How kernels start on a device: one function per kernel, in the ASC language (launch.asc), called from C++.
#pragma once

#include <cstdint>

#include "runtime/abi/acl.h"

extern "C" {

/// Arguments are addresses of device memory; `tiling` is that of the kernel's struct (op_kernel/ascendc/*_tiling.h).
void alltoallv_launch_quantize(uint32_t cores, aclrtStream stream, const void* x, void* codes, void* scales,
                               void* tiling);
void alltoallv_launch_dequantize_sum(uint32_t cores, aclrtStream stream, const void* codes, const void* scales,
                                     void* out, void* tiling);
void alltoallv_launch_all_to_all_v(uint32_t cores, aclrtStream stream, const void* x, const void* send_counts,
                                   const void* sdispls, void* out, void* recv_counts, void* status, void* tiling);
void alltoallv_launch_quant_all_reduce(uint32_t cores, aclrtStream stream, const void* x, const void* scale,
                                       const void* offset, void* out, void* status, void* tiling);

}  // extern "C"
