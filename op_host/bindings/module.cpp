#include "bindings/bindings.h"

#include <nanobind/stl/string.h>

#include "base/error.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

template <class Names>
size_t index_of(const Names& names, const std::string& name, const char* what) {
    size_t i = 0;
    for (const auto& candidate : names) {
        if (candidate == name) return i;
        ++i;
    }
    throw invalid_param(std::string(what) + " is '" + name + "', which alltoallv does not know");
}

}  // namespace

DType dtype_from_name(const std::string& name) {
    for (size_t i = 0; i < dtype_table.size(); ++i)
        if (dtype_table[i].name == name) return static_cast<DType>(i);
    throw invalid_param("dtype is '" + name + "', which alltoallv does not know");
}

OpKind op_from_name(const std::string& name) {
    return static_cast<OpKind>(index_of(op_names, name, "op"));
}

ReduceOp reduce_op_from_name(const std::string& name) {
    for (size_t i = 0; i < std::size(reduce_op_names); ++i)
        if (reduce_op_names[i] == name) return static_cast<ReduceOp>(i);
    throw invalid_param("op is '" + name + "', expected sum, avg, min, max or prod");
}

}  // namespace alltoallv

NB_MODULE(_core, m) {
    m.doc() = "C++ core of alltoallv. Use the package's Python modules instead: this interface may change.";
    // Threads of thread ranks and pending calls may keep objects alive to the very end of the process.
    nb::set_leak_warnings(false);
    alltoallv::bind_errors(m);
    alltoallv::bind_memory(m);
    alltoallv::bind_numpy_arrays(m);
    alltoallv::bind_torch_tensors(m);
    alltoallv::bind_array_call(m);
    alltoallv::bind_repeats(m);
    alltoallv::bind_communicator(m);
    alltoallv::bind_hccl(m);
    alltoallv::bind_plan(m);
    alltoallv::bind_operation(m);
    alltoallv::bind_kernels(m);
    alltoallv::bind_quant(m);
    nb::dict sizes;
    for (const auto& dtype : alltoallv::dtype_table) sizes[nb::str(dtype.name.data(), dtype.name.size())] = dtype.size;
    m.attr("dtype_sizes") = sizes;
}
