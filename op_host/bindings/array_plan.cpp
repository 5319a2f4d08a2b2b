// The base class of NumPy's and torch's plans: a call runs no Python function, which would take as long as everything
// else where ranks outnumber processors.
#include <algorithm>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/guarded.h"
#include "bindings/lock.h"
#include "bindings/plan.h"

namespace alltoallv {
namespace {

struct ArrayPlan {
    std::optional<Plan> plan;
    size_t input_size = 0, output_size = 0;  // elements, at least
    bool covers = false;                     // inputs have no more: the counts are packed
};

/// Runs the plan; makes the output if it is None. Returns None and does nothing for arrays of a rare kind.
nb::object run(const ArrayPlan& self, nb::handle input, nb::object output) {
    if (!self.plan) return nb::none();
    const ReadyExchange& exchange = *self.plan->data;
    const ArrayPair arrays(input, output);
    if (!arrays || arrays.copy.is_valid() || arrays.input.dtype != exchange.dtype() ||
        arrays.input.size < self.input_size || (self.covers && arrays.input.size > self.input_size))
        return nb::none();
    if (arrays.has_output &&
        (arrays.output.size < self.output_size || overlaps(arrays.output.bytes(), arrays.input.bytes())))
        return nb::none();
    Communicator& communicator = *self.plan->communicator;
    Target target = guarded(communicator, exchange.request().op,
                            [&] { return target_of(arrays, input, std::move(output), exchange.request()); });
    {
        const size_t size = std::max(arrays.input.size, self.output_size);
        const LockReleased released(communicator, size * size_of(exchange.dtype()));
        exchange.run(communicator, arrays.input.address, target.address, -1.0);
    }
    return std::move(target.array);
}

nb::object call_plan(nb::handle_t<ArrayPlan> self, nb::handle input, nb::object out, nb::handle timeout) {
    if (!nb::inst_ready(self)) throw nb::type_error("this plan has not been initialized");
    if (timeout.is_none())
        if (nb::object result = run(*nb::inst_ptr<ArrayPlan>(self), input, out); !result.is_none()) return result;
    return self.attr("_checked")(input, out, timeout);
}

/// The plans' slot for calls, which Python finds without a method lookup; calls with keywords use the ordinary way.
PyObject* plan_slot(PyObject* self, PyObject* args, PyObject* others) {
    try {
        const nb::handle_t<ArrayPlan> plan(self);
        const Py_ssize_t count = NB_TUPLE_GET_SIZE(args);
        if (others != nullptr || count < 1 || count > 2)
            return PyObject_Call(nb::object(plan.attr("_call")).ptr(), args, others);
        PyObject* const out = count == 2 ? NB_TUPLE_GET_ITEM(args, 1) : Py_None;
        return call_plan(plan, NB_TUPLE_GET_ITEM(args, 0), nb::borrow(out), nb::none()).release().ptr();
    } catch (...) {
        set_python_error();
        return nullptr;
    }
}

}  // namespace

void bind_array_plan(nb::module_& m) {
    PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(plan_slot)}, {0, nullptr}};
    nb::class_<ArrayPlan>(m, "ArrayPlan", nb::type_slots(slots), "Base class of the plans of NumPy and torch.")
        .def(
            "__init__",
            [](ArrayPlan* self, const Plan* plan, size_t input_size, size_t output_size, bool covers) {
                new (self)
                    ArrayPlan{plan == nullptr ? std::nullopt : std::optional(*plan), input_size, output_size, covers};
            },
            "plan"_a.none(), "input_size"_a, "output_size"_a, "covers"_a,
            "covers: inputs have no more than input_size elements. Without a plan of shared memory everything is left "
            "to `_checked`.")
        .def("_call", call_plan, "input"_a, "out"_a = nb::none(), nb::kw_only(), "timeout"_a = nb::none(),
             "What a call does; uncommon cases are left to the class's method `_checked(input, out, timeout)`.");
}

}  // namespace alltoallv
