#include "python/array_call.h"

#include <nanobind/stl/string.h>

#include "base/error.h"
#include "python/bindings.h"
#include "transport/shm/arena.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

/// A contiguous Python buffer of one element type, held while it is used.
class HeldBuffer {
  public:
    HeldBuffer(nb::handle object, int flags, const std::string& format) {
        held_ = PyObject_GetBuffer(object.ptr(), &view_, flags | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) == 0;
        if (!held_) PyErr_Clear();
        usable_ = held_ && view_.format != nullptr && format == view_.format;
    }
    ~HeldBuffer() {
        if (held_) PyBuffer_Release(&view_);
    }
    HeldBuffer(const HeldBuffer&) = delete;
    HeldBuffer& operator=(const HeldBuffer&) = delete;

    bool holds(size_t bytes) const { return usable_ && static_cast<size_t>(view_.len) >= bytes; }
    uintptr_t begin() const { return reinterpret_cast<uintptr_t>(view_.buf); }
    uintptr_t end() const { return begin() + static_cast<size_t>(view_.len); }

  private:
    Py_buffer view_;
    bool held_, usable_;
};

bool fit(const HeldBuffer& source, const HeldBuffer& target, bool in_place) {
    if (source.begin() >= target.end() || target.begin() >= source.end()) return true;
    return in_place && source.begin() == target.begin() && source.end() == target.end();
}

/// In the arena; None if there is no memory.
nb::object make_output(const Arrays& arrays) {
    if (arrays.shape.is_none()) return nb::none();
    try {
        return arrays.type(arrays.shape, arrays.dtype, Block(Arena::instance().allocate(arrays.output_bytes)));
    } catch (const Error&) {
        return nb::none();
    }
}

}  // namespace

nb::object ArrayCall::run(nb::handle input, nb::object output) const {
    const auto is_one = [type = reinterpret_cast<PyTypeObject*>(arrays.type.ptr())](nb::handle object) {
        return Py_TYPE(object.ptr()) == type;
    };
    if (!is_one(input)) return nb::none();
    const HeldBuffer source(input, PyBUF_SIMPLE, arrays.input_format);
    if (!source.holds(arrays.input_bytes)) return nb::none();
    if (output.is_none()) output = make_output(arrays);
    if (!is_one(output)) return nb::none();
    const HeldBuffer target(output, PyBUF_WRITABLE, arrays.output_format);
    if (!target.holds(arrays.output_bytes) || !fit(source, target, in_place)) return nb::none();
    const nb::gil_scoped_release release;
    call(source.begin(), target.begin());
    return output;
}

void bind_array_call(nb::module_& m) {
    nb::class_<Arrays>(m, "Arrays",
                       "Two arrays of one Python type, contiguous, of these buffer formats and at least so long; shape "
                       "and dtype of an output that is not given, None for who makes it.")
        .def(nb::init<nb::object, std::string, size_t, std::string, size_t, nb::object, nb::object>(), nb::arg("type"),
             nb::arg("input_format"), nb::arg("input_bytes"), nb::arg("output_format"), nb::arg("output_bytes"),
             nb::arg("shape").none(), nb::arg("dtype"));
    nb::class_<ArrayCall>(m, "ArrayCall", "A call on such arrays, ready to run.")
        .def("run", &ArrayCall::run, nb::arg("input"), nb::arg("output").none(),
             nb::sig("def run(self, input: object, output: object | None) -> typing.Any | None"),
             "The output, made here if it is None; None if these are no such arrays, with nothing done.");
    nb::class_<ArrayPlan>(m, "ArrayPlan", "What alltoallv.numpy.Plan is a subclass of.")
        .def(
            "__init__", [](ArrayPlan* self, const ArrayCall& call) { new (self) ArrayPlan{call}; }, nb::arg("call"))
        .def(
            "__call__",
            [](nb::handle_t<ArrayPlan> self, nb::handle input, nb::object out, nb::handle timeout) {
                if (!nb::inst_ready(self)) throw nb::type_error("this plan has not been initialized");
                if (timeout.is_none())
                    if (nb::object result = nb::inst_ptr<ArrayPlan>(self)->call.run(input, out); !result.is_none())
                        return result;
                return self.attr("_checked")(input, out, timeout);
            },
            nb::arg("input"), nb::arg("out") = nb::none(), nb::kw_only(), nb::arg("timeout") = nb::none(),
            nb::sig("def __call__(self, input: numpy.typing.NDArray[typing.Any], "
                    "out: numpy.typing.NDArray[typing.Any] | None = None, *, timeout: float | None = None) "
                    "-> numpy.typing.NDArray[typing.Any]"),
            "What the class says; what `ArrayCall.run` leaves is for its method `_checked(input, out, timeout)`.");
}

}  // namespace alltoallv
