#include "bindings/bindings.h"

#include "runtime/base/error.h"

namespace alltoallv {
DType dtype_from_name(const std::string& name) {
    if (const std::optional<DType> moving = moving_dtype(name)) return *moving;
    if (const std::optional<DType> dtype = table_dtype(name)) return *dtype;
    throw invalid_param(1058, "dtype is '", name, "', which alltoallv does not know");
}

OpKind op_from_name(const std::string& name) {
    for (size_t i = 0; i < std::size(op_table); ++i)
        if (op_table[i].name == name) return static_cast<OpKind>(i);
    throw invalid_param(1059, "op is '", name, "', which alltoallv does not know");
}

ReduceOp reduce_op_from_name(const std::string& name) {
    if (const std::optional<ReduceOp> op = reduce_op(name)) return *op;
    throw invalid_param(1060, "op is '", name, "', expected ", reduce_ops_listed());
}

std::optional<ReduceOp> reduce_op_of(nb::handle name) {
    for (size_t i = 0; PyUnicode_Check(name.ptr()) != 0 && i < std::size(reduce_op_names); ++i)
        if (PyUnicode_CompareWithASCIIString(name.ptr(), reduce_op_names[i].data()) == 0)
            return static_cast<ReduceOp>(i);
    return std::nullopt;
}

Overflow overflow_from_name(const std::string& name) {
    for (size_t i = 0; i < std::size(overflow_names); ++i)
        if (overflow_names[i] == name) return static_cast<Overflow>(i);
    throw invalid_param(1061, "overflow is '", name, "', expected saturate, raise or infinity");
}

CodeFormat format_from_name(const FormatName& name) {
    if (const auto* bits = std::get_if<int64_t>(&name)) {
        if (const std::optional<CodeFormat> format = code_format("int" + std::to_string(*bits))) return *format;
        throw invalid_param(1062, "bits is ", *bits, ", expected 8, 6, 5, 4, 3 or 2");
    }
    const std::string& text = std::get<std::string>(name);
    if (const std::optional<CodeFormat> format = code_format(text)) return *format;
    throw invalid_param(1063, "format is '", text, "', which alltoallv does not know");
}

namespace {

void bind_dtypes(nb::module_& m) {
    nb::class_<DTypeInfo>(m, "DTypeInfo", "What can be done with an element type.")
        .def_ro("size", &DTypeInfo::size, "Bytes.")
        .def_prop_ro(
            "arithmetic", [](const DTypeInfo& self) { return arithmetic_names[static_cast<size_t>(self.arithmetic)]; },
            "What reductions take it for: 'none', 'logical', 'integer', 'floating' or 'complex'.")
        .def_ro("quantizes", &DTypeInfo::quantizes, "Whether quantized collectives take it.")
        .def_ro("hccl_reduces", &DTypeInfo::hccl_reduces, "Whether HCCL reduces it on every family of devices.")
        .def_ro("atb", &DTypeInfo::atb, "Whether ATB's AllToAllV takes it.");
    nb::dict dtypes;
    for (const DTypeInfo& dtype : dtype_table) dtypes[nb::str(dtype.name.data(), dtype.name.size())] = nb::cast(dtype);
    m.attr("dtypes") = dtypes;
    nb::list reduce_ops;
    for (const std::string_view op : reduce_op_names) reduce_ops.append(nb::str(op.data(), op.size()));
    m.attr("reduce_ops") = nb::tuple(reduce_ops);
    m.def(
        "reduces",
        [](const std::string& dtype, const std::string& op) {
            return is_defined(reduce_op_from_name(op), info(dtype_from_name(dtype)).arithmetic);
        },
        "dtype"_a, "op"_a, "Whether a reduction is defined for a dtype.");
}

}  // namespace

void bind_all(nb::module_& m) {
    m.doc() = "C++ core of alltoallv. Use the package's Python modules instead: this interface may change.";
    // Threads of thread ranks and pending calls may keep objects alive to the very end of the process.
    nb::set_leak_warnings(false);
    for (const auto bind :
         {bind_errors, bind_memory, bind_numpy_arrays, bind_torch_tensors, bind_mindspore_tensors, bind_communicator,
          bind_hccl, bind_hosts, bind_plan, bind_request, bind_array_plan, bind_array_calls, bind_checked_call,
          bind_operation, bind_kernels, bind_quant, bind_moe, bind_dtypes})
        bind(m);
}

}  // namespace alltoallv

NB_MODULE(_core, m) {
    alltoallv::bind_all(m);
}
