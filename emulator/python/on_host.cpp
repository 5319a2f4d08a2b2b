// Calls an operator with CPU tensors over the memory of npu tensors, as host_views.py does, in a third of the time.
//
// It reads and makes tensors by DLPack's functions, since it is built without torch, and knows the arguments that
// nearly all calls have. Python's function does the others.
#include <nanobind/nanobind.h>

#include <cstring>
#include <optional>
#include <vector>

#include "runtime/abi/dlpack.h"
#include "runtime/stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr int32_t npu = 12;  // kDLExtDev, torch's device type "privateuseone"
constexpr auto interned = [](const char* name) { return nb::steal(PyUnicode_InternFromString(name)); };

/// What a call needs of torch and of host_views.py.
struct Torch {
    const DLPackExchangeAPI* api;
    nb::object tensor, dtype, stream, synchronize, to_npu, empty_like, waiting;
    nb::object is_neg = interned("is_neg"), device = interned("device"), with_device = nb::make_tuple(device);
};

Torch* torch_ = nullptr;  // never freed: it would outlive Python

/// Thrown where Python's function must do the call.
struct Unusual {};

/// A CPU tensor over memory of somebody else.
struct View {
    DLManagedTensorVersioned tensor{};
    std::vector<int64_t> sizes;
};

bool is_plain(PyObject* value) {
    const PyTypeObject* type = Py_TYPE(value);
    return type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type || type == &PyUnicode_Type ||
           value == Py_None || reinterpret_cast<const PyObject*>(type) == torch_->dtype.ptr();
}

bool is_tensor(PyObject* value) {
    return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(torch_->tensor.ptr())) != 0;
}

/// Reads a tensor whose values are what its memory holds.
DLTensor read(PyObject* tensor) {
    DLTensor seen{};
    if (torch_->api->dltensor_from_py_object_no_sync(tensor, &seen) != 0) {
        PyErr_Clear();
        throw Unusual{};
    }
    PyObject* const arguments[] = {tensor};
    const nb::object neg = nb::steal(PyObject_VectorcallMethod(torch_->is_neg.ptr(), arguments, 1, nullptr));
    if (seen.dtype.code == kDLComplex || neg.ptr() != Py_False) throw Unusual{};
    return seen;
}

nb::object view_of(const DLTensor& seen) {
    auto* const view = new View;
    const auto dims = static_cast<size_t>(seen.ndim);
    view->sizes.assign(seen.shape, seen.shape + dims);
    view->sizes.insert(view->sizes.end(), seen.strides, seen.strides + dims);
    view->tensor.version = {1, 0};
    view->tensor.manager_ctx = view;
    view->tensor.deleter = [](DLManagedTensorVersioned* tensor) { delete static_cast<View*>(tensor->manager_ctx); };
    view->tensor.dl_tensor = seen;
    view->tensor.dl_tensor.device = {kDLCPU, 0};
    view->tensor.dl_tensor.shape = view->sizes.data();
    view->tensor.dl_tensor.strides = view->sizes.data() + dims;
    void* object = nullptr;
    if (torch_->api->managed_tensor_to_py_object_no_sync(&view->tensor, &object) != 0) throw nb::python_error();
    return nb::steal(static_cast<PyObject*>(object));
}

bool is_contiguous(const DLTensor& tensor) {
    int64_t expected = 1;
    for (int32_t i = tensor.ndim; i-- > 0;) {
        if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
        expected *= tensor.shape[i];
    }
    return true;
}

class Call {
  public:
    /// Throws Unusual before anything has happened.
    nb::tuple host(nb::handle values) {
        const Py_ssize_t size = PyTuple_Size(values.ptr());
        nb::tuple result = nb::steal<nb::tuple>(PyTuple_New(size));
        for (Py_ssize_t i = 0; i < size; ++i)
            PyTuple_SetItem(result.ptr(), i, host_value(PyTuple_GetItem(values.ptr(), i)).release().ptr());
        return result;
    }

    nb::dict host(const nb::kwargs& values) {
        nb::dict result;
        for (const auto& [name, value] : values) result[name] = host_value(value.ptr());
        return result;
    }

    /// Waits for the current stream of the tensors' device. Throws Unusual if a graph's replay holds a stream.
    void wait() {
        if (views_.empty() || PyList_Size(torch_->waiting.ptr()) > 0) throw Unusual{};
        device_ = views_[0].second.attr(torch_->device);
        if (!torch_->stream.is_none()) {
            const nb::object handle = torch_->stream(device_index_);
            if (alltoallv::emulator::is_quiet(PyLong_AsVoidPtr(handle.ptr()))) return;
        }
        torch_->synchronize(device_);
    }

    nb::object from_host(nb::object value) {
        if (is_tensor(value.ptr())) return npu_tensor(std::move(value));
        const bool tuple = PyTuple_Check(value.ptr());
        if (!tuple && !PyList_Check(value.ptr())) return value;
        const Py_ssize_t size = PySequence_Size(value.ptr());
        nb::object result = nb::steal(tuple ? PyTuple_New(size) : PyList_New(size));
        for (Py_ssize_t i = 0; i < size; ++i) {
            PyObject* const one = from_host(nb::steal(PySequence_GetItem(value.ptr(), i))).release().ptr();
            tuple ? PyTuple_SetItem(result.ptr(), i, one) : PyList_SetItem(result.ptr(), i, one);
        }
        return result;
    }

  private:
    nb::object host_value(PyObject* value) {
        if (is_plain(value)) return nb::borrow(value);
        if (is_tensor(value)) {
            const DLTensor seen = read(value);
            if (seen.device.device_type == kDLCPU && seen.ndim == 0) return nb::borrow(value);
            const bool first = views_.empty();
            if (seen.device.device_type != npu || (!first && seen.device.device_id != device_index_)) throw Unusual{};
            device_index_ = seen.device.device_id;
            views_.emplace_back(view_of(seen), value);
            return views_.back().first;
        }
        if (PyTuple_CheckExact(value)) return host(value);
        if (!PyList_CheckExact(value)) throw Unusual{};
        nb::list result;
        for (Py_ssize_t i = 0; i < PyList_Size(value); ++i) result.append(host_value(PyList_GetItem(value, i)));
        return result;
    }

    /// Returns the npu tensor of a view, or copies a fresh tensor to the device.
    nb::object npu_tensor(nb::object value) const {
        for (const auto& [view, tensor] : views_)
            if (view.is(value)) return nb::borrow(tensor);
        std::optional<DLTensor> source;
        try {
            source = read(value.ptr());
        } catch (const Unusual&) {
        }
        if (!source || source->device.device_type != kDLCPU || !is_contiguous(*source))
            return torch_->to_npu(value, device_);
        PyObject* const arguments[] = {value.ptr(), device_.ptr()};
        nb::object made =
            nb::steal(PyObject_Vectorcall(torch_->empty_like.ptr(), arguments, 1, torch_->with_device.ptr()));
        if (!made.is_valid()) throw nb::python_error();
        size_t bytes = (source->dtype.bits * source->dtype.lanes + 7) / 8;
        for (int32_t i = 0; i < source->ndim; ++i) bytes *= static_cast<size_t>(source->shape[i]);
        if (bytes > 0) std::memcpy(read(made.ptr()).data, source->data, bytes);
        return made;
    }

    std::vector<std::pair<nb::object, nb::handle>> views_;
    nb::object device_;
    int32_t device_index_ = -1;
};

/// Is called like the operator.
struct OnHost {
    nb::object function, otherwise;

    nb::object call(const nb::args& args, const nb::kwargs& kwargs) const {
        Call call;
        nb::object result;
        try {
            const nb::tuple host_args = call.host(args);
            const nb::dict host_kwargs = call.host(kwargs);
            call.wait();
            result = nb::steal(PyObject_Call(function.ptr(), host_args.ptr(), host_kwargs.ptr()));
        } catch (const Unusual&) {
            return otherwise(*args, **kwargs);
        }
        if (!result.is_valid()) throw nb::python_error();
        return call.from_host(std::move(result));
    }
};

}  // namespace

NB_MODULE(_host, m) {
    nb::set_leak_warnings(false);  // operators keep their functions to the end of the process
    m.def(
        "install",
        [](nb::object tensor, nb::object dtype, nb::object stream, nb::object synchronize, nb::object to_npu,
           nb::object empty_like, nb::object waiting) {
            const nb::object table = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
            void* const api = PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api");
            if (api == nullptr) throw nb::python_error();
            torch_ = new Torch{static_cast<const DLPackExchangeAPI*>(api),
                               tensor,
                               dtype,
                               stream,
                               synchronize,
                               to_npu,
                               empty_like,
                               waiting};
        },
        "tensor"_a, "dtype"_a, "stream"_a.none(), "synchronize"_a, "to_npu"_a, "empty_like"_a, "waiting"_a);
    nb::class_<OnHost>(m, "OnHost")
        .def(nb::init<nb::object, nb::object>(), "function"_a, "otherwise"_a)
        .def("__call__", &OnHost::call);
}
