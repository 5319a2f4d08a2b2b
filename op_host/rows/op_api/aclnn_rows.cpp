#include "rows/op_api/aclnn_rows.h"

#include "rows/plan.h"
#include "runtime/aclnn/call.h"
#include "runtime/aclnn/platform.h"

using namespace alltoallv::aclnn;

namespace {

/// Of rows that `kernel` moves by indices, which each row of x has if `scatters`, else each row of out.
aclnnStatus prepare_rows(const char* function, const char* kernel, bool scatters, const aclTensor* given_x,
                         const aclTensor* given_index, const aclTensor* given_out, uint64_t* workspace_size,
                         aclOpExecutor** executor) {
    return prepare(function, workspace_size, executor, [&](Workspace& workspace) -> Run {
        const View x = view("x", given_x, all_types), index = view("index", given_index, {ACL_INT32});
        const View out = view("out", given_out, all_types);
        if (x.shape.empty()) refuse("x has no dimensions, expected rows");
        if (out.dtype != x.dtype) refuse("out has another type than x, expected the same");
        if (!has_rows_of(out, x)) refuse(out.text() + ", expected rows shaped as x's; " + x.text());
        const View& indexed = scatters ? x : out;
        if (index.shape != std::vector<int64_t>{indexed.shape[0]})
            refuse(index.text() + ", expected [" + std::to_string(indexed.shape[0]) + "], an index for each row of " +
                   indexed.name);
        require_apart({x, index}, {out});
        workspace.add(tiling_bytes);
        return [=](char* tiling, aclrtStream stream) {
            const auto rows = [](const View& tensor) { return static_cast<uint64_t>(tensor.shape[0]); };
            const auto [numbers, cores] = alltoallv::plan_rows(rows(index), static_cast<uint64_t>(row_bytes_of(x)),
                                                               rows(x), rows(out), vector_cores());
            if (numbers.rows == 0 || numbers.row_bytes == 0) return;
            launch(kernel, cores, {x.argument(), index.argument(), out.argument()}, numbers, tiling, stream);
        };
    });
}

}  // namespace

aclnnStatus aclnnAlltoallvGatherRowsGetWorkspaceSize(const aclTensor* x, const aclTensor* index, aclTensor* out,
                                                     uint64_t* workspaceSize, aclOpExecutor** executor) {
    return prepare_rows(__func__, "alltoallv_gather_rows", false, x, index, out, workspaceSize, executor);
}

aclnnStatus aclnnAlltoallvGatherRows(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                     aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnAlltoallvScatterRowsGetWorkspaceSize(const aclTensor* x, const aclTensor* index, aclTensor* out,
                                                      uint64_t* workspaceSize, aclOpExecutor** executor) {
    return prepare_rows(__func__, "alltoallv_scatter_rows", true, x, index, out, workspaceSize, executor);
}

aclnnStatus aclnnAlltoallvScatterRows(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                      aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}
