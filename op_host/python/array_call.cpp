#include "python/array_call.h"

#include "python/bindings.h"

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

}  // namespace

bool ArrayCall::run(nb::handle input, nb::handle output) const {
    auto* const type = reinterpret_cast<PyTypeObject*>(arrays.type.ptr());
    if (Py_TYPE(input.ptr()) != type || Py_TYPE(output.ptr()) != type) return false;
    const HeldBuffer source(input, PyBUF_SIMPLE, arrays.input_format);
    const HeldBuffer target(output, PyBUF_WRITABLE, arrays.output_format);
    if (!source.holds(arrays.input_bytes) || !target.holds(arrays.output_bytes)) return false;
    if (!fit(source, target, arrays.in_place)) return false;
    const nb::gil_scoped_release release;
    call(source.begin(), target.begin());
    return true;
}

void bind_array_call(nb::module_& m) {
    nb::class_<ArrayCall>(m, "ArrayCall", "A call on arrays of one Python type and known buffer formats.")
        .def("run", &ArrayCall::run, nb::arg("input"), nb::arg("output"),
             "Runs if both are such arrays, contiguous and long enough; false if not, with nothing done.");
}

}  // namespace alltoallv
