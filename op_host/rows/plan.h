// How the kernels that gather and scatter rows divide their work: plain numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "op_kernel/ascendc/rows_tiling.h"

namespace alltoallv {

struct RowsPlan {
    alltoallv_kernels::RowsTiling tiling;
    uint32_t cores;
};

/// Rows are divided among cores; more cores than rows would have nothing to do. At least 1.
constexpr RowsPlan plan_rows(uint64_t rows, uint64_t row_bytes, uint64_t input_rows, uint64_t output_rows,
                             uint32_t cores) {
    return {{rows, row_bytes, input_rows, output_rows},
            static_cast<uint32_t>(std::clamp<uint64_t>(rows, 1, std::max<uint32_t>(cores, 1)))};
}

}  // namespace alltoallv
