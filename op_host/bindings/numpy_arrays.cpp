// Reads NumPy's arrays by their fields, because asking for a Python buffer takes as long as an exchange, and makes them
// by NumPy's C functions, because calling the type takes longer than a small exchange.
#include <numpy/arrayobject.h>

#include <cstring>
#include <string_view>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace alltoallv {
namespace {

PyArrayObject* fields(nb::handle array) {
    return reinterpret_cast<PyArrayObject*>(array.ptr());
}

class NumpyArrays : public Framework {
  public:
    bool view(nb::handle array, ArrayView& seen) const override { return read(array, NPY_ARRAY_C_CONTIGUOUS, seen); }

    bool input(nb::handle array, ArrayView& seen, nb::object& copy, bool /*tracked*/) const override {
        if (PyArray_CHKFLAGS(fields(array), NPY_ARRAY_C_CONTIGUOUS)) return view(array, seen);
        if (!dtype_of(PyArray_DESCR(fields(array)))) return false;
        copy = nb::steal(PyArray_NewCopy(fields(array), NPY_CORDER));
        if (copy.is_valid()) return view(copy, seen);
        PyErr_Clear();
        return false;
    }

    bool output(nb::handle array, ArrayView& seen) const override {
        return read(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_WRITEABLE, seen);
    }

    nb::object make(nb::handle like, Shape shape, Block&& block) const override {
        auto owned = std::make_unique<Block>(std::move(block));
        PyArray_Descr* const dtype = PyArray_DESCR(fields(like));
        Py_INCREF(reinterpret_cast<PyObject*>(dtype));
        nb::object result = nb::steal(PyArray_NewFromDescr(&PyArray_Type, dtype, static_cast<int>(shape.size()),
                                                           const_cast<npy_intp*>(shape.data()), nullptr, owned->data(),
                                                           NPY_ARRAY_CARRAY, nullptr));
        if (!result.is_valid()) throw nb::python_error();
        const nb::capsule keeper(owned.release(), [](void* kept) noexcept { delete static_cast<Block*>(kept); });
        if (PyArray_SetBaseObject(fields(result), nb::object(keeper).release().ptr()) != 0) throw nb::python_error();
        return result;
    }

  private:
    bool read(nb::handle array, int flags, ArrayView& seen) const {
        PyArrayObject* const it = fields(array);
        const std::optional<DType> dtype = dtype_of(PyArray_DESCR(it));
        if (!dtype || !PyArray_CHKFLAGS(it, flags)) return false;
        static_assert(sizeof(npy_intp) == sizeof(int64_t));
        seen.dtype = *dtype;
        seen.shape = {PyArray_DIMS(it), static_cast<size_t>(PyArray_NDIM(it))};
        seen.size = static_cast<size_t>(element_count(seen.shape));
        seen.address = reinterpret_cast<uintptr_t>(PyArray_DATA(it));
        return true;
    }

    /// Compares the type's number: equal dtypes may be different objects, for instance after pickling.
    std::optional<DType> dtype_of(PyArray_Descr* dtype) const {
        if (!PyArray_ISNBO(dtype->byteorder)) return std::nullopt;
        const int number = dtype->type_num;
        for (const Known& each : known_)
            if (each.number == number) return each.dtype;
        if (!PyTypeNum_ISNUMBER(number) && number != NPY_BOOL && number < NPY_USERDEF) return std::nullopt;
        const auto name = nb::cast<std::string>(nb::handle(reinterpret_cast<PyObject*>(dtype)).attr("name"));
        known_.push_back({number, table_dtype(name)});
        return known_.back().dtype;
    }

    struct Known {
        int number;
        std::optional<DType> dtype;
    };
    mutable std::vector<Known> known_;  // changed under the GIL
};

nb::object copied(int type, std::span<const std::byte> bytes, const std::vector<int64_t>& shape) {
    nb::object result =
        nb::steal(PyArray_SimpleNew(static_cast<int>(shape.size()), const_cast<npy_intp*>(shape.data()), type));
    if (!result.is_valid()) throw nb::python_error();
    if (!bytes.empty()) std::memcpy(PyArray_DATA(fields(result)), bytes.data(), bytes.size());
    return result;
}

}  // namespace

nb::object numpy_array(std::span<const int64_t> numbers, const std::vector<int64_t>& shape) {
    return copied(NPY_INT64, std::as_bytes(numbers), shape);
}

nb::object numpy_array(std::span<const std::byte> bytes, const std::vector<int64_t>& shape) {
    return copied(NPY_UINT8, bytes, shape);
}

void bind_numpy_arrays(nb::module_&) {
    if (_import_array() != 0) throw nb::python_error();
    add_framework(reinterpret_cast<PyObject*>(&PyArray_Type), *new NumpyArrays);
}

}  // namespace alltoallv
