// Torch's tensors, by the table of DLPack functions that their type carries: this extension is not built against torch.
#include <bit>
#include <memory>
#include <vector>

#include "abi/dlpack.h"
#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

/// A tensor's memory on its way to torch, which frees it from any thread.
struct Managed {
    DLManagedTensorVersioned tensor{};
    Block block;
    std::vector<int64_t> shape, strides;
};

bool is_contiguous(const DLTensor& tensor, std::span<const int64_t> shape) {
    if (tensor.strides == nullptr) return true;
    int64_t expected = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        if (shape[i] != 1 && tensor.strides[i] != expected) return false;
        expected *= shape[i];
    }
    return true;
}

/// Whether what Python has returned is true; an error is none of it.
bool is_true(PyObject* result) {
    if (result == nullptr) throw nb::python_error();
    return PyObject_IsTrue(nb::steal(result).ptr()) == 1;
}

bool ask(nb::handle function) {
    return is_true(PyObject_CallNoArgs(function.ptr()));
}

bool ask(const nb::object& method, nb::handle tensor) {
    return is_true(PyObject_CallOneArg(method.ptr(), tensor.ptr()));
}

class TorchTensors : public Framework {
  public:
    TorchTensors(const DLPackExchangeAPI& api, nb::handle type, nb::object records, nb::tuple watchers,
                 nb::object forward)
        : api_(api),
          is_neg_(type.attr("is_neg")),
          is_conj_(type.attr("is_conj")),
          requires_grad_(nb::steal(PyUnicode_InternFromString("requires_grad"))),
          records_(std::move(records)),
          forward_(std::move(forward)),
          level_(nb::steal(PyUnicode_InternFromString("_current_level"))),
          watchers_(std::move(watchers)) {}

    std::optional<DTypeCode> dtype(nb::handle array) const override {
        DLTensor tensor;
        if (!read(array, tensor)) return std::nullopt;
        return code(tensor.dtype);
    }

    std::optional<ArrayView> input(nb::handle array) const override {
        for (const nb::handle watcher : watchers_)
            if (ask(watcher)) return std::nullopt;
        if (PyLong_AsLong(nb::getattr(forward_, level_).ptr()) >= 0) return std::nullopt;
        if (is_true(PyObject_GetAttr(array.ptr(), requires_grad_.ptr())) && ask(records_)) return std::nullopt;
        return output(array);
    }

    std::optional<ArrayView> output(nb::handle array) const override {
        DLTensor tensor;
        if (!read(array, tensor) || tensor.device.device_type != kDLCPU) return std::nullopt;
        const std::span<const int64_t> shape(tensor.shape, static_cast<size_t>(tensor.ndim));
        size_t size = 1;
        for (const int64_t length : shape) size *= static_cast<size_t>(length);
        if (size != 0 && (tensor.data == nullptr || !is_contiguous(tensor, shape))) return std::nullopt;
        if (ask(is_neg_, array) || (tensor.dtype.code == kDLComplex && ask(is_conj_, array))) return std::nullopt;
        return ArrayView{code(tensor.dtype), shape, size,
                         reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset};
    }

    ArrayMaker maker(nb::handle like, nb::tuple shape) const override {
        const auto dtype = std::bit_cast<DLDataType>(static_cast<uint32_t>(*this->dtype(like)));
        std::vector<int64_t> lengths, strides(shape.size());
        for (const nb::handle length : shape) lengths.push_back(nb::cast<int64_t>(length));
        int64_t stride = 1;
        for (size_t i = lengths.size(); i-- > 0; stride *= lengths[i]) strides[i] = stride;
        return [this, dtype, lengths, strides](Block&& block) {
            auto owned = std::make_unique<Managed>(Managed{{}, std::move(block), lengths, strides});
            Managed& made = *owned;
            made.tensor = {
                .version = {1, 0},
                .manager_ctx = owned.release(),
                .deleter = [](DLManagedTensorVersioned* tensor) { delete static_cast<Managed*>(tensor->manager_ctx); },
                .flags = 0,
                .dl_tensor = {.data = made.block.data(),
                              .device = {kDLCPU, 0},
                              .ndim = static_cast<int32_t>(made.shape.size()),
                              .dtype = dtype,
                              .shape = made.shape.data(),
                              .strides = made.strides.data(),
                              .byte_offset = 0}};
            void* object = nullptr;
            if (api_.managed_tensor_to_py_object_no_sync(&made.tensor, &object) != 0) PyErr_Clear();
            return nb::steal(static_cast<PyObject*>(object));
        };
    }

  private:
    static DTypeCode code(DLDataType dtype) { return std::bit_cast<uint32_t>(dtype); }

    /// False, among others, for a tensor without storage.
    bool read(nb::handle array, DLTensor& tensor) const {
        if (api_.dltensor_from_py_object_no_sync(array.ptr(), &tensor) == 0) return true;
        PyErr_Clear();
        return false;
    }

    const DLPackExchangeAPI& api_;
    nb::object is_neg_, is_conj_, requires_grad_, records_, forward_, level_;
    nb::tuple watchers_;
};

/// The table of the major version that abi/dlpack.h declares, or null.
const DLPackExchangeAPI* table_of(nb::handle type) {
    const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    void* const given = PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api");
    if (given == nullptr) PyErr_Clear();
    auto* header = static_cast<const DLPackExchangeAPIHeader*>(given);
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
        nb::arg("type"), nb::arg("records"), nb::arg("watchers"), nb::arg("forward"),
        "Makes calls on torch.Tensor repeatable; `records` says whether autograd does, each of `watchers` whether "
        "somebody is to see more of a call than its result, `forward` is the module of forward-mode gradients. "
        "Does nothing where that type has no DLPack functions: all its calls are looked at in full then.");
}

}  // namespace alltoallv
