// Reads torch's tensors by the DLPack functions of their type, since this extension is built without torch.

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/abi/dlpack.h"

namespace alltoallv {
namespace {

/// The memory of a tensor that is handed to torch, which frees it on any thread.
struct Managed {
    DLManagedTensorVersioned tensor{};
    Block block;
    std::vector<int64_t> shape, strides;
};

/// The types by DLPack's code and their bytes.
constexpr auto dtypes = [] {
    std::array<std::array<std::optional<DType>, 17>, kDLFloat8_e8m0fnu + 1> table;
    for (size_t i = 0; i < dtype_table.size(); ++i)
        table[dtype_table[i].dlpack][dtype_table[i].size] = static_cast<DType>(i);
    return table;
}();

std::optional<DType> dtype_of(DLDataType dtype) {
    const size_t bytes = dtype.bits / 8;
    const bool is_known = dtype.code < dtypes.size() && bytes < dtypes[0].size() && dtype.bits % 8 == 0;
    return is_known && dtype.lanes == 1 ? dtypes[dtype.code][bytes] : std::nullopt;
}

bool is_contiguous(const DLTensor& tensor, Shape shape) {
    if (tensor.strides == nullptr) return true;
    int64_t expected = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        if (shape[i] != 1 && tensor.strides[i] != expected) return false;
        expected *= shape[i];
    }
    return true;
}

/// True if Python returned a true value; an error counts as false.
bool is_true(PyObject* result) {
    if (result == nullptr) throw nb::python_error();
    return PyObject_IsTrue(nb::steal(result).ptr()) == 1;
}

bool ask(nb::handle function) {
    return is_true(PyObject_CallNoArgs(function.ptr()));
}

bool ask(const nb::object& method, nb::handle tensor) {
    PyObject* const arguments[] = {tensor.ptr()};
    return is_true(PyObject_Vectorcall(method.ptr(), arguments, 1, nullptr));
}

class TorchTensors : public Framework {
  public:
    TorchTensors(const DLPackExchangeAPI& api, nb::handle type, nb::object records, nb::tuple watchers,
                 nb::object forward)
        : api_(api),
          is_neg_(type.attr("is_neg")),
          is_conj_(type.attr("is_conj")),
          contiguous_(type.attr("contiguous")),
          storage_(type.attr("untyped_storage")),
          detach_(nb::steal(PyUnicode_InternFromString("detach"))),
          copy_(nb::steal(PyUnicode_InternFromString("copy_"))),
          data_ptr_(nb::steal(PyUnicode_InternFromString("data_ptr"))),
          nbytes_(nb::steal(PyUnicode_InternFromString("nbytes"))),
          dtype_(nb::steal(PyUnicode_InternFromString("dtype"))),
          requires_grad_(nb::steal(PyUnicode_InternFromString("requires_grad"))),
          records_(std::move(records)),
          forward_(std::move(forward)),
          level_(nb::steal(PyUnicode_InternFromString("_current_level"))),
          bytes_{nb::module_::import_("torch").attr("int8"), nb::module_::import_("torch").attr("uint8")},
          watchers_(std::move(watchers)) {}

    bool view(nb::handle array, ArrayView& seen) const override {
        bool gaps = false;
        return look(array, seen, gaps) && !gaps;
    }

    bool input(nb::handle array, ArrayView& seen, nb::object& copy, bool tracked) const override {
        if (watched() || (!tracked && records(array))) return false;
        bool gaps = false;
        if (!look(array, seen, gaps)) return false;
        if (!gaps) return true;
        PyObject* const arguments[] = {array.ptr()};
        copy = nb::steal(PyObject_Vectorcall(contiguous_.ptr(), arguments, 1, nullptr));
        if (copy.is_valid()) return view(copy, seen);
        PyErr_Clear();
        return false;
    }

    bool output(nb::handle array, ArrayView& seen) const override { return view(array, seen); }

    bool watched() const override {
        for (const nb::handle watcher : watchers_)
            if (ask(watcher)) return true;
        return PyLong_AsLong(nb::getattr(forward_, level_).ptr()) >= 0;
    }

    bool wants_gradient(nb::handle array) const override { return !watched() && records(array); }

    bool gaps(nb::handle array, ArrayView& seen) const override {
        bool is_tensor = false;
        DLTensor tensor;
        if (!look(array, seen, is_tensor) || !read(array, tensor)) return false;
        for (int32_t i = 0; i < tensor.ndim; ++i)
            if (tensor.shape[i] > 1 && tensor.strides[i] == 0) return false;  // elements share memory
        return is_tensor;
    }

    void copy_to(nb::handle array, nb::handle values) const override { array.attr(detach_)().attr(copy_)(values); }

    nb::object make(nb::handle like, Shape shape, Block&& block) const override {
        DLTensor seen;
        if (!read(like, seen)) throw nb::type_error("this is no tensor");
        auto owned = std::make_unique<Managed>(Managed{{}, std::move(block), {shape.begin(), shape.end()}, {}});
        Managed& managed = *owned;
        managed.strides.resize(shape.size());
        int64_t stride = 1;
        for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) managed.strides[i] = stride;
        managed.tensor = {
            .version = {1, 0},
            .manager_ctx = owned.release(),
            .deleter = [](DLManagedTensorVersioned* tensor) { delete static_cast<Managed*>(tensor->manager_ctx); },
            .flags = 0,
            .dl_tensor = {.data = managed.block.data(),
                          .device = {kDLCPU, 0},
                          .ndim = static_cast<int32_t>(managed.shape.size()),
                          .dtype = seen.dtype,
                          .shape = managed.shape.data(),
                          .strides = managed.strides.data(),
                          .byte_offset = 0}};
        void* object = nullptr;
        if (api_.managed_tensor_to_py_object_no_sync(&managed.tensor, &object) != 0) throw nb::python_error();
        return nb::steal(static_cast<PyObject*>(object));
    }

  private:
    bool records(nb::handle array) const {
        return is_true(PyObject_GetAttr(array.ptr(), requires_grad_.ptr())) && ask(records_);
    }

    /// Reads a tensor whose elements lie in host memory; `gaps`: they do not follow each other there.
    bool look(nb::handle array, ArrayView& seen, bool& gaps) const {
        DLTensor tensor;
        if (!read(array, tensor) || tensor.device.device_type != kDLCPU) return false;
        const std::optional<DType> dtype = dtype_of(tensor.dtype);
        const Shape shape(tensor.shape, static_cast<size_t>(tensor.ndim));
        const auto size = static_cast<size_t>(element_count(shape));
        if (!dtype || (size != 0 && tensor.data == nullptr)) return false;
        if ((*dtype == DType::int8 || *dtype == DType::uint8) && !is_of_bytes(array)) return false;
        if (ask(is_neg_, array) || (tensor.dtype.code == kDLComplex && ask(is_conj_, array))) return false;
        seen = {*dtype, shape, size, reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset};
        gaps = size != 0 && !is_contiguous(tensor, shape);
        size_t extent = gaps ? 1 : size;
        for (size_t i = 0; gaps && i < shape.size(); ++i)
            extent += static_cast<size_t>((shape[i] - 1) * tensor.strides[i]);
        return size == 0 || has_memory(array, seen.address + extent * size_of(*dtype));
    }

    /// False for integers of fewer bits, which DLPack shows as bytes.
    bool is_of_bytes(nb::handle array) const {
        const nb::object dtype = nb::steal(PyObject_GetAttr(array.ptr(), dtype_.ptr()));
        if (!dtype.is_valid()) throw nb::python_error();
        return dtype.is(bytes_[0]) || dtype.is(bytes_[1]);
    }

    /// False if the tensor's storage ends before `end`, where its last element ends, as after resize_() of the storage.
    bool has_memory(nb::handle array, uintptr_t end) const {
        PyObject* const tensor[] = {array.ptr()};
        const nb::object storage = nb::steal(PyObject_Vectorcall(storage_.ptr(), tensor, 1, nullptr));
        if (!storage.is_valid()) throw nb::python_error();
        PyObject* const arguments[] = {storage.ptr()};
        const auto asked = [&](const nb::object& name) {
            const nb::object number = nb::steal(PyObject_VectorcallMethod(name.ptr(), arguments, 1, nullptr));
            if (!number.is_valid()) throw nb::python_error();
            return static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(number.ptr()));
        };
        return asked(data_ptr_) + asked(nbytes_) >= end;
    }

    /// Returns false, among other cases, for a tensor without storage.
    bool read(nb::handle array, DLTensor& tensor) const {
        if (api_.dltensor_from_py_object_no_sync(array.ptr(), &tensor) == 0) return true;
        PyErr_Clear();
        return false;
    }

    const DLPackExchangeAPI& api_;
    nb::object is_neg_, is_conj_, contiguous_, storage_, detach_, copy_, data_ptr_, nbytes_, dtype_, requires_grad_,
        records_, forward_, level_;
    nb::object bytes_[2];
    nb::tuple watchers_;
};

/// Returns the table of the major version that abi/dlpack.h declares, or null.
const DLPackExchangeAPI* table_of(nb::handle type) {
    const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    void* const pointer = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (pointer == nullptr) PyErr_Clear();
    auto* header = static_cast<const DLPackExchangeAPIHeader*>(pointer);
    while (header != nullptr && header->version.major != 1) header = header->prev_api;
    const auto* const api = reinterpret_cast<const DLPackExchangeAPI*>(header);
    return api != nullptr && api->dltensor_from_py_object_no_sync != nullptr ? api : nullptr;
}

}  // namespace

void bind_torch_tensors(nb::module_& m) {
    m.def(
        "add_torch",
        [](nb::object type, nb::object records, nb::tuple watchers, nb::object forward) {
            const DLPackExchangeAPI* const api = table_of(type);
            if (api == nullptr) return;
            const auto* const tensors =
                new TorchTensors(*api, type, std::move(records), std::move(watchers), std::move(forward));
            add_framework(type.release(), *tensors);
        },
        "type"_a, "records"_a, "watchers"_a, "forward"_a,
        "Makes calls on torch.Tensor repeatable; `records` shows whether autograd does, each of `watchers` whether "
        "somebody is to see more of a call than its result, `forward` is the module of forward-mode gradients. "
        "Does nothing where that type has no DLPack functions: all its calls are looked at in full then.");
}

}  // namespace alltoallv
