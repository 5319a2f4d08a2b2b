/// \file device_op.cc
/// \brief A collective as an operator of MindSpore's runtime, in PyNative and in graphs: it runs where MindSpore runs
/// its kernels, on their stream.
///
/// Built by `device_op.py` with MindSpore's CustomOpBuilder: C++17, MindSpore's flags, no header of alltoallv's own.
/// The collective is reached through a C function, so that the two sides need not share a C++ ABI. On CPU the stream is
/// null.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "ms_extension/all.h"
#include "ops/op_def.h"
#ifndef CUSTOM_ASCEND_OP
#include "mindspore/ops/kernel/cpu/cpu_kernel.h"
#endif

namespace alltoallv_mindspore {

/// Runs or enqueues the collective of `context` with the addresses of its tensors. Returns 0, or another number if it
/// failed and has written the error text.
using Entry = int (*)(void* context, void* const* tensors, void* stream, char* message, uint64_t capacity);
using Tensors = std::vector<ms::Tensor>;

class Collective final : public ms::pynative::PyboostRunner {
  public:
    Collective(uint64_t entry, uint64_t context)
        : PyboostRunner("alltoallv_collective"),
          entry_(reinterpret_cast<Entry>(entry)),
          context_(reinterpret_cast<void*>(context)) {}

    void LaunchKernel() override {
        char message[1024] = "";
        std::vector<void*> addresses;
        for (const ms::Tensor& tensor : inputs()) addresses.push_back(tensor.GetDataPtr());
        if (entry_(context_, addresses.data(), stream(), message, sizeof message) != 0) {
            message[sizeof message - 1] = '\0';
            throw std::runtime_error(message);
        }
    }

  private:
    Entry entry_;
    void* context_;
};

/// Runs a collective on contiguous tensors. `outputs` are those that it writes; elements that it leaves out keep their
/// values.
void write(const Tensors& tensors, const Tensors& outputs, uint64_t entry, uint64_t context) {
    std::make_shared<Collective>(entry, context)->Run(tensors, outputs);
}

py::object call_write(const Tensors& tensors, const Tensors& outputs, uint64_t entry, uint64_t context) {
    return ms::pynative::PyboostRunner::Call<0>(write, tensors, outputs, entry, context);
}

/// A launch of a graph's exchange, as graph_op.py reads it. `call` is the number of the exchange; `send` and `recv` are
/// counts, then displacements.
struct GraphLaunch {
    int64_t call, dtype;
    const void* input;
    const void* second;
    void* output;
    const int64_t *input_shape, *output_shape, *send, *recv;
    int64_t input_rank, output_rank, send_size, recv_size;
    void* stream;
};
using GraphEntry = int (*)(const GraphLaunch* launch, char* message, uint64_t capacity);
using KernelTensors = std::vector<mindspore::kernel::KernelTensor*>;

GraphEntry graph_entry = nullptr;

void set_graph_entry(uint64_t entry) {
    graph_entry = reinterpret_cast<GraphEntry>(entry);
}

/// What an output has of the input `like`.
enum Form : int64_t {
    shape_of_like = 0,
    rows_of_like = 1,           ///< and the input's row
    shape_and_type_of_like = 2  ///< else the type is the input's
};

class GraphInfer final : public mindspore::ops::OpFuncImpl {
  public:
    mindspore::ShapeArray InferShape(const mindspore::PrimitivePtr&,
                                     const mindspore::ops::InferInfoPtrList& inputs) const override {
        const mindspore::ShapeVector like = inputs[3]->GetShape();
        if (inputs[6]->GetScalarValueWithCheck<int64_t>() != rows_of_like) return {like};
        mindspore::ShapeVector rows = inputs[0]->GetShape();
        rows.at(0) = like.at(0);
        return {rows};
    }

    std::vector<mindspore::TypeId> InferType(const mindspore::PrimitivePtr&,
                                             const mindspore::ops::InferInfoPtrList& inputs) const override {
        const bool own = inputs[6]->GetScalarValueWithCheck<int64_t>() != shape_and_type_of_like;
        return {inputs[own ? 0 : 3]->GetType()};
    }

    /// MindSpore brings the counts to host memory before the launch.
    std::set<int64_t> GetValueDependArgIndices() const override { return {1, 2}; }
    bool GeneralInferRegistered() const override { return true; }
};

void launch_in_graph(const KernelTensors& inputs, const KernelTensors& outputs, void* stream) {
    const auto size = [](const auto& values) { return static_cast<int64_t>(values.size()); };
    const auto &read = inputs[0]->GetShapeVector(), &written = outputs[0]->GetShapeVector();
    const auto send = inputs[1]->GetValueWithCheck<std::vector<int64_t>>();
    const auto recv = inputs[2]->GetValueWithCheck<std::vector<int64_t>>();
    const GraphLaunch launch{inputs[5]->GetValueWithCheck<int64_t>(),
                             inputs[0]->dtype_id(),
                             inputs[0]->device_ptr(),
                             inputs[4]->device_ptr(),
                             outputs[0]->device_ptr(),
                             read.data(),
                             written.data(),
                             send.data(),
                             recv.data(),
                             size(read),
                             size(written),
                             size(send),
                             size(recv),
                             stream};
    char message[1024] = "";
    if (graph_entry(&launch, message, sizeof message) == 0) return;
    message[sizeof message - 1] = '\0';
    throw std::runtime_error(message);
}

#ifdef CUSTOM_ASCEND_OP
using Kernel = mindspore::kernel::KernelMod;
#else
using Kernel = mindspore::kernel::NativeCpuKernelMod;
#endif

class GraphKernel final : public Kernel {
  public:
    bool Init(const KernelTensors&, const KernelTensors&) override { return true; }
    bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs,
                void* stream) override {
        launch_in_graph(inputs, outputs, stream);
        return true;
    }
    std::vector<mindspore::kernel::KernelAttr> GetOpSupport() override {
        return {mindspore::kernel::KernelAttr().AddSkipCheckAttr(true)};
    }
};

#ifndef CUSTOM_ASCEND_OP

/// A tensor of one of MindSpore's communication primitives, and a launch of such, as primitives/kernels.py reads them.
struct Place {
    void* data;
    int64_t dtype, rank;
    const int64_t* shape;
};
struct PrimitiveLaunch {
    const char *primitive, *attributes;  ///< of the attributes, a line with "name=value" each
    const Place *inputs, *outputs;
    int64_t input_count, output_count;
};
using PrimitiveEntry = int (*)(const PrimitiveLaunch* launch, char* message, uint64_t capacity);

PrimitiveEntry primitive_entry = nullptr;

class PrimitiveKernel : public Kernel {
  public:
    bool Init(const KernelTensors&, const KernelTensors&) override {
        for (const auto& [name, value] : primitive_->attrs())
            if (value != nullptr) attributes_ += name + "=" + text_of(value) + "\n";
        return true;
    }
    bool Launch(const KernelTensors& inputs, const KernelTensors&, const KernelTensors& outputs) override {
        std::vector<Place> places;
        for (const auto& tensors : {inputs, outputs})
            for (auto* tensor : tensors) {
                const auto& shape = tensor->GetShapeVector();
                places.push_back(
                    {tensor->device_ptr(), tensor->dtype_id(), static_cast<int64_t>(shape.size()), shape.data()});
            }
        const PrimitiveLaunch launch{kernel_name_.c_str(),
                                     attributes_.c_str(),
                                     places.data(),
                                     places.data() + inputs.size(),
                                     static_cast<int64_t>(inputs.size()),
                                     static_cast<int64_t>(outputs.size())};
        char message[1024] = "";
        if (primitive_entry(&launch, message, sizeof message) == 0) return true;
        message[sizeof message - 1] = '\0';
        throw std::runtime_error(message);
    }
    std::vector<mindspore::kernel::KernelAttr> GetOpSupport() override {
        return {mindspore::kernel::KernelAttr().AddSkipCheckAttr(true)};
    }

  private:
    static std::string text_of(const mindspore::ValuePtr& value) {
        const auto sequence = value->cast<mindspore::ValueSequencePtr>();
        if (sequence == nullptr) return value->ToString();
        std::string text = "(";
        for (const auto& each : sequence->value()) {
            const bool quoted = each->isa<mindspore::StringImm>();
            text += (quoted ? "'" : "") + text_of(each) + (quoted ? "'," : ",");
        }
        return text + ")";
    }
    std::string attributes_;
};

/// MindSpore's kernel of a primitive, which then takes bfloat16 too. Such tensors are left to our kernel if it
/// `computes`; else the primitive only moves values or tells zeros from others, and MindSpore's kernel runs on them as
/// on tensors of `stand_in`, another type of two bytes.
class WidenedKernel final : public PrimitiveKernel {
  public:
    WidenedKernel(std::shared_ptr<Kernel> own, mindspore::TypeId stand_in, bool computes)
        : own_(std::move(own)), stand_in_(stand_in), computes_(computes) {}

    bool Init(const KernelTensors& inputs, const KernelTensors& outputs) override {
        const auto known = [](const auto* tensor) { return tensor->dtype_id() != mindspore::kNumberTypeBFloat16; };
        computes_ = computes_ && !std::all_of(inputs.begin(), inputs.end(), known);
        if (computes_) return PrimitiveKernel::Init(inputs, outputs);
        own_->SetThreadPool(pool_);
        return own_->Init(primitive_, Disguised(inputs, stand_in_).tensors, Disguised(outputs, stand_in_).tensors);
    }
    int Resize(const KernelTensors& inputs, const KernelTensors& outputs) override {
        if (computes_) return PrimitiveKernel::Resize(inputs, outputs);
        const int result = own_->Resize(Disguised(inputs, stand_in_).tensors, Disguised(outputs, stand_in_).tensors);
        SetOutputSizeList(own_->GetOutputSizeList());
        SetWorkspaceSizeList(own_->GetWorkspaceSizeList());
        return result;
    }
    bool Launch(const KernelTensors& inputs, const KernelTensors& workspace, const KernelTensors& outputs) override {
        if (computes_) return PrimitiveKernel::Launch(inputs, workspace, outputs);
        return static_cast<mindspore::kernel::KernelMod&>(*own_).Launch(inputs, workspace, outputs, nullptr);
    }
    bool IsNeedUpdateOutputShapeAndSize() override { return !computes_ && own_->IsNeedUpdateOutputShapeAndSize(); }
    void UpdateOutputShapeAndSize(const KernelTensors& inputs, const KernelTensors& outputs) override {
        own_->UpdateOutputShapeAndSize(inputs, outputs);
    }
    std::vector<size_t> GetLaunchIgnoredInputAddressIdx() const override {
        return computes_ ? std::vector<size_t>() : own_->GetLaunchIgnoredInputAddressIdx();
    }
    std::vector<mindspore::kernel::KernelAttr> GetOpSupport() override {
        auto supported = own_->GetOpSupport();
        for (size_t k = 0, n = supported.size(); k < n; ++k) {
            auto types = supported[k];
            auto read = types.input_type(), written = types.output_type();
            bool differs = false;
            for (auto* list : {&read, &written})
                for (auto& type : *list)
                    if (type.dtype == stand_in_) {
                        type.dtype = mindspore::kNumberTypeBFloat16;
                        differs = true;
                    }
            types.SetInputAttrList(read);
            types.SetOutputAttrList(written);
            if (differs) supported.push_back(types);
        }
        return supported;
    }

  private:
    /// The same tensors, bfloat16 ones as copies of another type.
    struct Disguised {
        Disguised(KernelTensors given, mindspore::TypeId type) : tensors(std::move(given)) {
            for (auto*& tensor : tensors) {
                if (tensor->dtype_id() != mindspore::kNumberTypeBFloat16) continue;
                copies.push_back(std::make_unique<mindspore::kernel::KernelTensor>(*tensor));
                tensor = copies.back().get();
                tensor->set_dtype_id(type);
            }
        }
        KernelTensors tensors;
        std::vector<std::unique_ptr<mindspore::kernel::KernelTensor>> copies;
    };

    std::shared_ptr<Kernel> own_;
    mindspore::TypeId stand_in_;
    bool computes_;
};

using Kernels = mindspore::kernel::Factory<Kernel>;
using Makers = std::map<std::string, std::function<std::shared_ptr<Kernel>()>>;
using Supported = mindspore::HashMap<std::string, std::vector<mindspore::kernel::KernelAttr>>;

// MindSpore keeps to itself how it makes its kernels, and the dtypes that it has once asked each for. An explicit
// instantiation may name private members.
Makers& makers(Kernels& kernels);
Supported& supported();
template <auto Own, auto Dtypes>
struct Private {
    friend Makers& makers(Kernels& kernels) { return kernels.*Own; }
    friend Supported& supported() { return *Dtypes; }
};
template struct Private<&Kernels::kernel_mod_creators_, &Kernel::support_map_>;

/// Makes the kernels of these primitives ours, of `missing` where MindSpore has none. Its own of `widened` take
/// bfloat16 too, by ours if `missing` has them, else as the type that is named there.
void serve_primitives(const std::vector<std::string>& names, const std::set<std::string>& missing,
                      const std::map<std::string, int64_t>& widened, uint64_t entry) {
    primitive_entry = reinterpret_cast<PrimitiveEntry>(entry);
    auto& kernels = makers(Kernels::Instance());
    const auto make = [] { return std::make_shared<PrimitiveKernel>(); };
    for (const auto& [name, type] : widened) {
        const auto own = kernels.find(name);
        if (own == kernels.end()) continue;
        own->second = [make = own->second, type = static_cast<mindspore::TypeId>(type),
                       ours = missing.count(name) > 0] { return std::make_shared<WidenedKernel>(make(), type, ours); };
        supported().erase(name);
    }
    for (const std::string& name : names) kernels[name] = make;
    for (const std::string& name : missing) kernels.emplace(name, make);
}
#endif

}  // namespace alltoallv_mindspore

namespace mindspore::ops {
alltoallv_mindspore::GraphInfer infer;
OpDef exchange_definition = {
    "Custom_alltoallv_exchange",
    {{"x", DT_TENSOR, 0, "", {}, false},
     {"send", DT_TENSOR, 0, "", {}, false},
     {"recv", DT_TENSOR, 0, "", {}, false},
     {"like", DT_TENSOR, 0, "", {}, false},
     {"second", DT_TENSOR, 0, "", {}, false},
     {"call", DT_INT, 0, "", {}, false},
     {"form", DT_INT, 0, "", {}, false}},
    {{"output", DT_TENSOR, -1}},
    {},
    {{"x", 0}, {"send", 1}, {"recv", 2}, {"like", 3}, {"second", 4}, {"call", 5}, {"form", 6}},
    infer,
    false,
    false,
    false,
};
REGISTER_PRIMITIVE_OP_DEF(Custom_alltoallv_exchange, &exchange_definition);
}  // namespace mindspore::ops

namespace mindspore::kernel {
#ifdef CUSTOM_ASCEND_OP
MS_CUSTOM_KERNEL_FACTORY_REG("Custom_alltoallv_exchange", alltoallv_mindspore::GraphKernel);
#else
MS_KERNEL_FACTORY_REG(NativeCpuKernelMod, Custom_alltoallv_exchange, alltoallv_mindspore::GraphKernel);
#endif
}  // namespace mindspore::kernel

PYBIND11_MODULE(MS_EXTENSION_NAME, m) {
#ifndef CUSTOM_ASCEND_OP
    m.def("serve_primitives", &alltoallv_mindspore::serve_primitives, pybind11::arg("names"), pybind11::arg("missing"),
          pybind11::arg("widened"), pybind11::arg("entry"));
#endif
    m.def("set_graph_entry", &alltoallv_mindspore::set_graph_entry, pybind11::arg("entry"));
    m.def("write", &alltoallv_mindspore::call_write, pybind11::arg("tensors"), pybind11::arg("outputs"),
          pybind11::arg("entry"), pybind11::arg("context"));
}
