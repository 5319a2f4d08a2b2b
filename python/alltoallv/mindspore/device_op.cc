/// \file device_op.cc
/// \brief An exchange as an operator of MindSpore's runtime: it runs where MindSpore runs its kernels, on their stream.
///
/// Built by `device_op.py` with MindSpore's CustomOpBuilder: C++17, MindSpore's flags, no header of alltoallv's own.
/// The exchange is reached through a C function, so that the two sides need not share a C++ ABI. On CPU the stream is
/// null.
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ms_extension/all.h"

namespace alltoallv_mindspore {

/// Runs or enqueues the exchange that `context` stands for. Not 0: it failed, and wrote why.
using Entry = int (*)(void* context, const void* input, void* output, void* stream, char* message, uint64_t capacity);

class Exchange final : public ms::pynative::PyboostRunner {
  public:
    Exchange(Entry entry, void* context) : PyboostRunner("alltoallv_exchange"), entry_(entry), context_(context) {}

    void LaunchKernel() override {
        char message[1024] = "";
        const void* input = inputs()[0].GetDataPtr();
        void* output = outputs()[0].GetDataPtr();
        if (entry_(context_, input, output, stream(), message, sizeof message) != 0) {
            message[sizeof message - 1] = '\0';
            throw std::runtime_error(message);
        }
    }

  private:
    Entry entry_;
    void* context_;
};

/// The tensor of that shape that the exchange makes of `input`.
ms::Tensor exchange(const ms::Tensor& input, const std::vector<int64_t>& shape, uint64_t entry, uint64_t context) {
    const ms::Tensor packed = input.is_contiguous() ? input : input.contiguous();  // on CPU the runtime does not
    ms::Tensor output(input.data_type(), shape);
    const auto run = std::make_shared<Exchange>(reinterpret_cast<Entry>(entry), reinterpret_cast<void*>(context));
    run->Run({packed}, {output});
    return output;
}

/// The same into a contiguous tensor, which keeps the values that no region covers.
ms::Tensor exchange_into(const ms::Tensor& input, const ms::Tensor& output, uint64_t entry, uint64_t context) {
    const ms::Tensor packed = input.is_contiguous() ? input : input.contiguous();
    const auto run = std::make_shared<Exchange>(reinterpret_cast<Entry>(entry), reinterpret_cast<void*>(context));
    run->Run({packed}, {output});
    return output;
}

py::object call(const ms::Tensor& input, const std::vector<int64_t>& shape, uint64_t entry, uint64_t context) {
    return ms::pynative::PyboostRunner::Call<1>(exchange, input, shape, entry, context);
}

py::object call_into(const ms::Tensor& input, const ms::Tensor& output, uint64_t entry, uint64_t context) {
    return ms::pynative::PyboostRunner::Call<1>(exchange_into, input, output, entry, context);
}

}  // namespace alltoallv_mindspore

PYBIND11_MODULE(MS_EXTENSION_NAME, m) {
    m.def("exchange", &alltoallv_mindspore::call, pybind11::arg("input"), pybind11::arg("shape"),
          pybind11::arg("entry"), pybind11::arg("context"));
    m.def("exchange_into", &alltoallv_mindspore::call_into, pybind11::arg("input"), pybind11::arg("output"),
          pybind11::arg("entry"), pybind11::arg("context"));
}
