// NumPy's arrays. Their fields are read where they lie: to ask for a Python buffer takes as long as an exchange. They
// are made by NumPy's own functions for C: to call the type takes longer than a small exchange.
#include <numpy/arrayobject.h>

#include <memory>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

PyArrayObject* fields(nb::handle array) {
    return reinterpret_cast<PyArrayObject*>(array.ptr());
}

class NumpyArrays : public Framework {
  public:
    /// By the number of its type: equal dtypes may be objects of their own, those that were pickled for one.
    std::optional<DTypeCode> dtype(nb::handle array) const override {
        const PyArray_Descr* const dtype = PyArray_DESCR(fields(array));
        const int number = dtype->type_num;
        if (!PyTypeNum_ISNUMBER(number) && number != NPY_HALF && number < NPY_USERDEF) return std::nullopt;
        return static_cast<DTypeCode>(number) << 8 | static_cast<uint8_t>(dtype->byteorder);
    }

    std::optional<ArrayView> input(nb::handle array) const override { return view(array, NPY_ARRAY_C_CONTIGUOUS); }

    std::optional<ArrayView> output(nb::handle array) const override {
        return view(array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_WRITEABLE);
    }

    ArrayMaker maker(nb::handle like, nb::tuple shape) const override {
        std::vector<npy_intp> lengths;
        for (const nb::handle length : shape) lengths.push_back(nb::cast<npy_intp>(length));
        return [lengths, dtype = nb::object(like.attr("dtype"))](Block&& block) {
            auto owned = std::make_unique<Block>(std::move(block));
            nb::object made = nb::steal(PyArray_NewFromDescr(
                &PyArray_Type, reinterpret_cast<PyArray_Descr*>(nb::object(dtype).release().ptr()),
                static_cast<int>(lengths.size()), lengths.data(), nullptr, owned->data(), NPY_ARRAY_CARRAY, nullptr));
            if (!made.is_valid()) throw nb::python_error();
            const nb::capsule keeper(owned.release(), [](void* kept) noexcept { delete static_cast<Block*>(kept); });
            if (PyArray_SetBaseObject(fields(made), nb::object(keeper).release().ptr()) != 0) throw nb::python_error();
            return made;
        };
    }

  private:
    std::optional<ArrayView> view(nb::handle array, int flags) const {
        PyArrayObject* const it = fields(array);
        const std::optional<DTypeCode> code = dtype(array);
        if (!code || !PyArray_CHKFLAGS(it, flags)) return std::nullopt;
        static_assert(sizeof(npy_intp) == sizeof(int64_t));
        const std::span shape(reinterpret_cast<const int64_t*>(PyArray_DIMS(it)),
                              static_cast<size_t>(PyArray_NDIM(it)));
        size_t size = 1;
        for (const int64_t length : shape) size *= static_cast<size_t>(length);
        return ArrayView{*code, shape, size, reinterpret_cast<uintptr_t>(PyArray_DATA(it))};
    }
};

}  // namespace

void bind_numpy_arrays(nb::module_&) {
    if (_import_array() != 0) throw nb::python_error();
    add_framework(reinterpret_cast<PyObject*>(&PyArray_Type), *new NumpyArrays);
}

}  // namespace alltoallv
