#include "bindings/array_call.h"

#include <nanobind/stl/optional.h>

#include "base/error.h"
#include "bindings/bindings.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

bool fits(const ArrayView& view, const ArrayKind& kind) {
    return view.dtype == kind.dtype && view.size >= kind.size;
}

ArrayKind kind_of(const Framework* framework, nb::handle like, size_t size) {
    const std::optional<DTypeCode> dtype = framework == nullptr ? std::nullopt : framework->dtype(like);
    return {dtype, size, nb::cast<size_t>(like.attr("dtype").attr("itemsize"))};
}

void init_arrays(Arrays* self, nb::handle input, size_t input_size, nb::handle output, size_t output_size,
                 std::optional<nb::tuple> shape) {
    const Framework* framework = framework_of(input);
    if (framework_of(output) != framework) framework = nullptr;
    const ArrayKind target = kind_of(framework, output, output_size);
    ArrayMaker make = shape && target.dtype ? framework->maker(output, *shape) : ArrayMaker();
    new (self) Arrays{framework, kind_of(framework, input, input_size), target, std::move(make)};
}

nb::object call_plan(nb::handle_t<ArrayPlan> self, nb::handle input, nb::object out, nb::handle timeout) {
    if (!nb::inst_ready(self)) throw nb::type_error("this plan has not been initialized");
    if (timeout.is_none())
        if (const std::optional<ArrayPair> given = arrays_given(input, out))
            if (nb::object result = nb::inst_ptr<ArrayPlan>(self)->call.run(*given, out); !result.is_none())
                return result;
    return self.attr("_checked")(input, out, timeout);
}

/// The plans' slot for calls, which Python finds without looking for a method; calls with keywords go the usual way.
PyObject* plan_slot(PyObject* self, PyObject* args, PyObject* others) {
    try {
        const nb::handle_t<ArrayPlan> plan(self);
        const Py_ssize_t given = PyTuple_GET_SIZE(args);
        if (others != nullptr || given < 1 || given > 2)
            return PyObject_Call(nb::object(plan.attr("_call")).ptr(), args, others);
        PyObject* const out = given == 2 ? PyTuple_GET_ITEM(args, 1) : Py_None;
        return call_plan(plan, PyTuple_GET_ITEM(args, 0), nb::borrow(out), nb::none()).release().ptr();
    } catch (...) {
        set_python_error();
        return nullptr;
    }
}

}  // namespace

std::optional<ArrayPair> arrays_given(nb::handle input, nb::handle output) {
    const Framework* const framework = framework_of(input);
    if (framework == nullptr || !(output.is_none() || framework_of(output) == framework)) return std::nullopt;
    std::optional<ArrayView> source = framework->input(input), target;
    if (!source) return std::nullopt;
    if (!output.is_none() && !(target = framework->output(output))) return std::nullopt;
    return ArrayPair{framework, *source, target};
}

nb::object ArrayCall::run(const ArrayPair& given, nb::object output, double timeout) const {
    const ArrayView& source = given.input;
    if (given.framework != arrays.framework || !fits(source, arrays.input)) return nb::none();
    uintptr_t target = 0;
    if (given.output) {
        if (!fits(*given.output, arrays.output)) return nb::none();
        target = given.output->address;
        const uintptr_t end = target + given.output->size * arrays.output.itemsize;
        const uintptr_t source_end = source.address + source.size * arrays.input.itemsize;
        const bool apart = source.address >= end || target >= source_end;
        const bool equal = source.address == target && source_end == end;
        if (!apart && !(in_place && equal)) return nb::none();
    } else {
        if (!arrays.make) return nb::none();
        try {
            Block block(Arena::instance().allocate(arrays.output.size * arrays.output.itemsize));
            target = reinterpret_cast<uintptr_t>(block.data());
            output = arrays.make(std::move(block));
        } catch (const Error&) {
            return nb::none();
        }
        if (!output.is_valid()) return nb::none();
    }
    {
        const nb::gil_scoped_release release;
        call(source.address, target, timeout);
    }
    return output;
}

void bind_array_call(nb::module_& m) {
    nb::class_<Arrays>(m, "Arrays", "Two contiguous arrays of the dtypes of these and at least so many elements.")
        .def("__init__", init_arrays, nb::arg("input"), nb::arg("input_size"), nb::arg("output"),
             nb::arg("output_size"), nb::arg("shape").none(),
             "shape: of an output that is not given, None for who makes it.");
    nb::class_<ArrayCall>(m, "ArrayCall", "A call on such arrays, ready to run.");
    PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(plan_slot)}, {0, nullptr}};
    nb::class_<ArrayPlan>(m, "ArrayPlan", nb::type_slots(slots), "What the plans of NumPy and torch are subclasses of.")
        .def(
            "__init__",
            [](ArrayPlan* self, std::optional<ArrayCall> call) {
                new (self) ArrayPlan{call ? std::move(*call) : ArrayCall{}};
            },
            nb::arg("call").none(), "Without a call everything is left to `_checked`.")
        .def("_call", call_plan, nb::arg("input"), nb::arg("out") = nb::none(), nb::kw_only(),
             nb::arg("timeout") = nb::none(),
             "What a call does; what is no common case is for the class's method `_checked(input, out, timeout)`.");
}

}  // namespace alltoallv
