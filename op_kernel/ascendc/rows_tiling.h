// What the host tells the kernels that gather and scatter rows.
#pragma once

#include <cstdint>

namespace alltoallv_kernels {

struct RowsTiling {
    uint64_t rows;  ///< indices
    uint64_t row_bytes;
    uint64_t input_rows, output_rows;
};

}  // namespace alltoallv_kernels
