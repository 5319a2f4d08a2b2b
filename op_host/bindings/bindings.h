// The parts of the extension module.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/code_format.h"
#include "base/dtype.h"
#include "core/collective.h"

namespace alltoallv {

void bind_errors(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_communicator(nanobind::module_& m);
void bind_numpy_arrays(nanobind::module_& m);
void bind_torch_tensors(nanobind::module_& m);
void bind_mindspore_tensors(nanobind::module_& m);
void bind_array_plan(nanobind::module_& m);
void bind_array_calls(nanobind::module_& m);
void bind_request(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_operation(nanobind::module_& m);
void bind_hccl(nanobind::module_& m);
void bind_hosts(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_quant(nanobind::module_& m);

/// Of the exception that is being handled: for functions that Python calls past nanobind, which does it for its own.
void set_python_error();

/// Throw `Error` for a name that does not exist.
DType dtype_from_name(const std::string& name);
OpKind op_from_name(const std::string& name);
ReduceOp reduce_op_from_name(const std::string& name);

/// The name of a format, or 8 or 4 for int8 and int4; its parameter includes <nanobind/stl/variant.h>.
using FormatName = std::variant<int64_t, std::string>;
CodeFormat format_from_name(const FormatName& name);

/// As Python has shapes.
inline nanobind::tuple tuple_of(const std::vector<int64_t>& values) {
    nanobind::list list;
    for (const int64_t value : values) list.append(value);
    return nanobind::tuple(list);
}

/// Addresses cross as integers: it is the cheapest way from any framework's `data_ptr`.
template <class T = void>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace alltoallv
