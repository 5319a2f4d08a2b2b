#include "rows/op_api/aclnn_rows.h"

#include "rows/plan.h"
#include "runtime/aclnn/call.h"
#include "runtime/aclnn/platform.h"

using namespace alltoallv::aclnn;

namespace {

/// Checks rows that `kernel` moves by indices; the tensor that `indexed` names has one for each of its rows.
Run move(const char* kernel, const View& x, const View& index, const View& out, const View& indexed,
         Workspace& workspace) {
    if (x.shape.empty()) refuse("x has no dimensions, expected rows");
    if (out.dtype != x.dtype) refuse("out has another type than x, expected the same");
    if (!has_rows_of(out, x)) refuse(out.text() + ", expected rows like those of x; " + x.text());
    if (index.shape != std::vector<int64_t>{indexed.shape[0]})
        refuse(index.text() + ", expected [" + std::to_string(indexed.shape[0]) + "], an index for each row of " +
               indexed.name);
    require_apart({x, index}, {out});
    workspace.add(tiling_bytes);
    return [=](char* tiling, aclrtStream stream) {
        const auto rows = [](const View& tensor) { return static_cast<uint64_t>(tensor.shape[0]); };
        const auto [numbers, cores] = alltoallv::plan_rows(rows(index), static_cast<uint64_t>(row_bytes_of(x)), rows(x),
                                                           rows(out), vector_cores());
        if (numbers.rows == 0 || numbers.row_bytes == 0) return;
        launch(kernel, cores, {x.argument(), index.argument(), out.argument()}, numbers, tiling, stream);
    };
}

}  // namespace

aclnnStatus aclnnAlltoallvGatherRowsGetWorkspaceSize(const aclTensor* x, const aclTensor* index, aclTensor* out,
                                                     uint64_t* workspaceSize, aclOpExecutor** executor) {
    return prepare(__func__, workspaceSize, executor, [&](Workspace& workspace) {
        const View in = view("x", x, all_types), at = view("index", index, {ACL_INT32});
        const View to = view("out", out, all_types);
        return move("alltoallv_gather_rows", in, at, to, to, workspace);
    });
}

aclnnStatus aclnnAlltoallvGatherRows(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                     aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnAlltoallvScatterRowsGetWorkspaceSize(const aclTensor* x, const aclTensor* index, aclTensor* out,
                                                      uint64_t* workspaceSize, aclOpExecutor** executor) {
    return prepare(__func__, workspaceSize, executor, [&](Workspace& workspace) {
        const View in = view("x", x, all_types), at = view("index", index, {ACL_INT32});
        const View to = view("out", out, all_types);
        return move("alltoallv_scatter_rows", in, at, to, in, workspace);
    });
}

aclnnStatus aclnnAlltoallvScatterRows(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                      aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}
