// The parts of the extension module.
#pragma once

// All files include the same casters: two casters for one type would be undefined behaviour.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "bindings/gil.h"
#include "runtime/base/code_format.h"
#include "runtime/base/dtype.h"
#include "runtime/core/collective.h"

namespace alltoallv {

namespace nb = nanobind;
using namespace nanobind::literals;

void bind_errors(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_communicator(nb::module_& m);
void bind_numpy_arrays(nb::module_& m);
void bind_torch_tensors(nb::module_& m);
void bind_mindspore_tensors(nb::module_& m);
void bind_array_plan(nb::module_& m);
void bind_array_calls(nb::module_& m);
void bind_checked_call(nb::module_& m);
void bind_request(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_operation(nb::module_& m);
void bind_hccl(nb::module_& m);
void bind_hosts(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_quant(nb::module_& m);
void bind_moe(nb::module_& m);

using ReleaseGil = nb::call_guard<GilReleased>;

/// Sets the Python error of the current exception, for functions that Python calls without nanobind.
void set_python_error();

/// Throw `Error` for a name that does not exist.
DType dtype_from_name(const std::string& name);
OpKind op_from_name(const std::string& name);
ReduceOp reduce_op_from_name(const std::string& name);
/// Returns nothing for an object that is no operator's name.
std::optional<ReduceOp> reduce_op_of(nb::handle name);
Overflow overflow_from_name(const std::string& name);

/// The name of a format; 8 and 4 mean int8 and int4.
using FormatName = std::variant<int64_t, std::string>;
CodeFormat format_from_name(const FormatName& name);

/// Converts to Python's form of shapes.
inline nb::tuple tuple_of(const std::vector<int64_t>& values) {
    nb::list list;
    for (const int64_t value : values) list.append(value);
    return nb::tuple(list);
}

/// The signature for Python's type checkers: the return type depends on the arguments.
template <class... Args>
auto untyped(nb::object (*function)(Args...)) {
    return [function](Args... args) { return nb::steal<nb::any>(function(std::forward<Args>(args)...).release()); };
}

/// Converts an address, which crosses as an integer: this is the cheapest way from any framework's `data_ptr`.
template <class T = void>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace alltoallv
