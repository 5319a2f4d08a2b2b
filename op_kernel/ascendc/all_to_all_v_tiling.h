// What the host tells the kernel of all_to_all_v with counts in device memory.
#pragma once

#include <cstdint>

#include "window.h"

namespace alltoallv_kernels {

struct AllToAllVTiling {
    WindowTiling window;
    uint64_t row_bytes;
    uint64_t input_rows;
    uint64_t output_rows;  ///< the capacity of the output
    uint64_t has_sdispls;  ///< otherwise blocks follow each other in the order of the ranks
    uint64_t expects;      ///< recv_counts holds what this rank expects, and is not written
};

}  // namespace alltoallv_kernels
