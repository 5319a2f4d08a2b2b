/// \file device_op.cc
/// \brief A collective as an operator of MindSpore's runtime: it runs where MindSpore runs its kernels, on their
/// stream.
///
/// Built by `device_op.py` with MindSpore's CustomOpBuilder: C++17, MindSpore's flags, no header of alltoallv's own.
/// The collective is reached through a C function, so that the two sides need not share a C++ ABI. On CPU the stream is
/// null.
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ms_extension/all.h"

namespace alltoallv_mindspore {

/// Runs or enqueues the collective of `context` with the addresses of its tensors. Returns 0, or another number if it
/// failed and has written the error text.
using Entry = int (*)(void* context, void* const* inputs, void* const* outputs, void* stream, char* message,
                      uint64_t capacity);
using Tensors = std::vector<ms::Tensor>;

class Collective final : public ms::pynative::PyboostRunner {
  public:
    Collective(uint64_t entry, uint64_t context)
        : PyboostRunner("alltoallv_collective"),
          entry_(reinterpret_cast<Entry>(entry)),
          context_(reinterpret_cast<void*>(context)) {}

    void LaunchKernel() override {
        char message[1024] = "";
        const std::vector<void*> read = addresses(inputs()), written = addresses(outputs());
        if (entry_(context_, read.data(), written.data(), stream(), message, sizeof message) != 0) {
            message[sizeof message - 1] = '\0';
            throw std::runtime_error(message);
        }
    }

  private:
    static std::vector<void*> addresses(const Tensors& tensors) {
        std::vector<void*> found;
        for (const ms::Tensor& tensor : tensors) found.push_back(tensor.GetDataPtr());
        return found;
    }

    Entry entry_;
    void* context_;
};

/// Exchanges `input` into a new tensor of that shape, which it returns.
ms::Tensor exchange(const ms::Tensor& input, const std::vector<int64_t>& shape, uint64_t entry, uint64_t context) {
    const ms::Tensor packed = input.is_contiguous() ? input : input.contiguous();  // on CPU the runtime does not
    ms::Tensor output(input.data_type(), shape);
    std::make_shared<Collective>(entry, context)->Run({packed}, {output});
    return output;
}

/// Runs a collective into contiguous tensors, whose other elements keep their values; `inputs` are contiguous, too.
void write(const Tensors& inputs, const Tensors& outputs, uint64_t entry, uint64_t context) {
    std::make_shared<Collective>(entry, context)->Run(inputs, outputs);
}

py::object call_exchange(const ms::Tensor& input, const std::vector<int64_t>& shape, uint64_t entry, uint64_t context) {
    return ms::pynative::PyboostRunner::Call<1>(exchange, input, shape, entry, context);
}

py::object call_write(const Tensors& inputs, const Tensors& outputs, uint64_t entry, uint64_t context) {
    return ms::pynative::PyboostRunner::Call<0>(write, inputs, outputs, entry, context);
}

}  // namespace alltoallv_mindspore

PYBIND11_MODULE(MS_EXTENSION_NAME, m) {
    m.def("exchange", &alltoallv_mindspore::call_exchange, pybind11::arg("input"), pybind11::arg("shape"),
          pybind11::arg("entry"), pybind11::arg("context"));
    m.def("write", &alltoallv_mindspore::call_write, pybind11::arg("inputs"), pybind11::arg("outputs"),
          pybind11::arg("entry"), pybind11::arg("context"));
}
