#include "bindings/bindings.h"

#include <nanobind/stl/string.h>

#include "base/error.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

/// The enumerator whose row in a table has this name.
template <class Enum, class Table>
Enum named(const Table& table, const std::string& name, const char* what) {
    for (size_t i = 0; i < std::size(table); ++i)
        if (table[i].name == name) return static_cast<Enum>(i);
    throw invalid_param(std::string(what) + " is '" + name + "', which alltoallv does not know");
}

}  // namespace

DType dtype_from_name(const std::string& name) {
    const std::optional<DType> moving = moving_dtype(name);
    return moving ? *moving : named<DType>(dtype_table, name, "dtype");
}

OpKind op_from_name(const std::string& name) {
    return named<OpKind>(op_table, name, "op");
}

ReduceOp reduce_op_from_name(const std::string& name) {
    for (size_t i = 0; i < std::size(reduce_op_names); ++i)
        if (reduce_op_names[i] == name) return static_cast<ReduceOp>(i);
    throw invalid_param("op is '" + name + "', expected sum, avg, min, max, prod, band, bor or bxor");
}

CodeFormat format_from_name(const FormatName& name) {
    if (const auto* bits = std::get_if<int64_t>(&name)) {
        if (*bits == 8) return CodeFormat::int8;
        if (*bits == 4) return CodeFormat::int4;
        throw invalid_param("bits is " + std::to_string(*bits) + ", expected 4 or 8");
    }
    return named<CodeFormat>(code_format_table, std::get<std::string>(name), "format");
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
    alltoallv::bind_mindspore_tensors(m);
    alltoallv::bind_communicator(m);
    alltoallv::bind_hccl(m);
    alltoallv::bind_hosts(m);
    alltoallv::bind_plan(m);
    alltoallv::bind_request(m);
    alltoallv::bind_array_plan(m);
    alltoallv::bind_array_calls(m);
    alltoallv::bind_operation(m);
    alltoallv::bind_kernels(m);
    alltoallv::bind_quant(m);
    using alltoallv::DTypeInfo;
    nb::class_<DTypeInfo>(m, "DTypeInfo", "What can be done with an element type.")
        .def_ro("size", &DTypeInfo::size, "Bytes.")
        .def_prop_ro(
            "arithmetic",
            [](const DTypeInfo& self) {
                return std::string(alltoallv::arithmetic_names[static_cast<size_t>(self.arithmetic)]);
            },
            "What reductions take it for: 'none', 'logical', 'integer', 'floating' or 'complex'.")
        .def_ro("quantizes", &DTypeInfo::quantizes, "Whether quantized collectives take it.")
        .def_ro("hccl_reduces", &DTypeInfo::hccl_reduces, "Whether HCCL reduces it on every family of devices.")
        .def_ro("atb", &DTypeInfo::atb, "Whether ATB's AllToAllV takes it.");
    nb::dict dtypes;
    for (const DTypeInfo& dtype : alltoallv::dtype_table)
        dtypes[nb::str(dtype.name.data(), dtype.name.size())] = nb::cast(dtype);
    m.attr("dtypes") = dtypes;
}
