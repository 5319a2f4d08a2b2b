#include "runtime/base/reduce_op.h"

#include <vector>

namespace alltoallv {
namespace {

std::string listed(const std::vector<std::string_view>& names) {
    std::string text;
    for (size_t i = 0; i < names.size(); ++i) {
        if (i > 0) text += i + 1 < names.size() ? ", " : " or ";
        text += names[i];
    }
    return text;
}

}  // namespace

std::string reduce_ops_listed() {
    return listed({std::begin(reduce_op_names), std::end(reduce_op_names)});
}

std::string dtypes_listed(ReduceOp op) {
    std::vector<std::string_view> names;
    if (is_defined(op, Arithmetic::logical)) names.emplace_back("bool");
    if (is_defined(op, Arithmetic::integer)) names.emplace_back("an integer");
    for (const DTypeInfo& dtype : dtype_table)
        if (dtype.arithmetic >= Arithmetic::floating && is_defined(op, dtype.arithmetic)) names.push_back(dtype.name);
    return listed(names);
}

}  // namespace alltoallv
