#include "python/array_call.h"

#include <numpy/ndarraytypes.h>

#include <vector>

#include "base/error.h"
#include "python/bindings.h"
#include "transport/shm/arena.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

nb::handle array_type;  // numpy.ndarray, from the loading of the module on

/// Not one of a subclass, which may mean something else by its elements.
bool is_array(nb::handle object) {
    return Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(array_type.ptr());
}

/// Whether elements of one dtype may be taken for the other's. Numbers of one type may have dtypes of their own: those
/// that were pickled, for one.
bool same(const PyArray_Descr* a, const PyArray_Descr* b) {
    if (a == b) return true;
    return a->type_num == b->type_num && a->byteorder == b->byteorder && PyTypeNum_ISNUMBER(a->type_num);
}

/// An array of one kind. Its fields are read where they lie: to ask for a Python buffer takes as long as an exchange.
class ArrayView {
  public:
    ArrayView(nb::handle object, const ArrayKind& kind, int flags) {
        if (!is_array(object)) return;
        auto* const array = reinterpret_cast<PyArrayObject*>(object.ptr());
        if (!same(PyArray_DESCR(array), reinterpret_cast<PyArray_Descr*>(kind.dtype.ptr()))) return;
        if (!PyArray_CHKFLAGS(array, flags | NPY_ARRAY_C_CONTIGUOUS)) return;
        size_t size = 1;
        for (int i = 0; i < PyArray_NDIM(array); ++i) size *= static_cast<size_t>(PyArray_DIM(array, i));
        fits_ = size >= kind.size;
        begin_ = reinterpret_cast<uintptr_t>(PyArray_DATA(array));
        end_ = begin_ + size * kind.itemsize;
    }

    bool fits() const { return fits_; }
    uintptr_t begin() const { return begin_; }
    uintptr_t end() const { return end_; }

  private:
    bool fits_ = false;
    uintptr_t begin_ = 0, end_ = 0;
};

bool apart(const ArrayView& source, const ArrayView& target) {
    return source.begin() >= target.end() || target.begin() >= source.end();
}

bool equal(const ArrayView& source, const ArrayView& target) {
    return source.begin() == target.begin() && source.end() == target.end();
}

/// In the arena; None if there is no memory.
nb::object make_output(const Arrays& arrays) {
    if (arrays.shape.is_none()) return nb::none();
    try {
        Block block(Arena::instance().allocate(arrays.output.size * arrays.output.itemsize));
        return array_type(arrays.shape, arrays.output.dtype, std::move(block));
    } catch (const Error&) {
        return nb::none();
    }
}

/// What two calls have in common that differ in nothing but where the data lie: (what, dtype, shapes); None where
/// `input` or `output` are no arrays.
nb::object call_key(nb::handle what, nb::handle input, nb::handle output) {
    if (!is_array(input) || !(output.is_none() || is_array(output))) return nb::none();
    auto* const from = reinterpret_cast<PyArrayObject*>(input.ptr());
    std::vector<npy_intp> shapes(PyArray_DIMS(from), PyArray_DIMS(from) + PyArray_NDIM(from));
    shapes.push_back(-1);
    if (!output.is_none()) {
        auto* const to = reinterpret_cast<PyArrayObject*>(output.ptr());
        shapes.insert(shapes.end(), PyArray_DIMS(to), PyArray_DIMS(to) + PyArray_NDIM(to));
        shapes.push_back(-1);
    }
    return nb::make_tuple(what, nb::handle(reinterpret_cast<PyObject*>(PyArray_DESCR(from))),
                          nb::bytes(shapes.data(), shapes.size() * sizeof(npy_intp)));
}

/// Runs the call that was kept under the same key, if there is one.
nb::object run_again(nb::dict calls, nb::handle what, nb::handle input, nb::object output) {
    const nb::object key = call_key(what, input, output);
    // Held, since another thread may drop what was kept while this one waits for its peers.
    const nb::object call = nb::borrow(PyDict_GetItemWithError(calls.ptr(), key.ptr()));
    if (call.is_valid()) return nb::cast<const ArrayCall&>(call).run(input, std::move(output));
    if (PyErr_Occurred() == nullptr) return nb::none();
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();
    PyErr_Clear();  // counts that are no integers: for the checks to refuse
    return nb::none();
}

}  // namespace

nb::object ArrayCall::run(nb::handle input, nb::object output) const {
    const ArrayView source(input, arrays.input, 0);
    if (!source.fits()) return nb::none();
    if (output.is_none()) output = make_output(arrays);
    const ArrayView target(output, arrays.output, NPY_ARRAY_WRITEABLE);
    if (!target.fits() || !(apart(source, target) || (in_place && equal(source, target)))) return nb::none();
    const nb::gil_scoped_release release;
    call(source.begin(), target.begin());
    return output;
}

void bind_array_call(nb::module_& m) {
    array_type = nb::object(nb::module_::import_("numpy").attr("ndarray")).release();
    nb::class_<Arrays>(m, "Arrays", "Two contiguous NumPy arrays of these dtypes and at least so many elements.")
        .def(
            "__init__",
            [](Arrays* self, nb::object input_dtype, size_t input_size, nb::object output_dtype, size_t output_size,
               nb::object shape) {
                new (self) Arrays{
                    {std::move(input_dtype), input_size}, {std::move(output_dtype), output_size}, std::move(shape)};
            },
            nb::arg("input_dtype"), nb::arg("input_size"), nb::arg("output_dtype"), nb::arg("output_size"),
            nb::arg("shape").none(), "shape: of an output that is not given, None for who makes it.");
    nb::class_<ArrayCall>(m, "ArrayCall", "A call on such arrays, ready to run.")
        .def("run", &ArrayCall::run, nb::arg("input"), nb::arg("output").none(),
             nb::sig("def run(self, input: object, output: object | None) -> typing.Any | None"),
             "The output, made here if it is None; None if these are no such arrays, with nothing done.");
    m.def("call_key", call_key, nb::arg("what"), nb::arg("input"), nb::arg("output").none(),
          "Equal for calls that differ in nothing but where the data lie; None where these are no arrays.");
    m.def("run_again", run_again, nb::arg("calls"), nb::arg("what"), nb::arg("input"), nb::arg("output").none(),
          nb::sig("def run_again(calls: dict[typing.Any, typing.Any], what: object, input: object, "
                  "output: object | None) -> typing.Any | None"),
          "`ArrayCall.run` of the call kept under this `call_key`; None if there is none.");
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
