#include "operation/quant_all_reduce.h"

#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "op_kernel/cpu/half.h"
#include "operation/tensor_checks.h"

namespace alltoallv {
namespace {

constexpr int64_t axis_multiple = 16;
constexpr int64_t max_channels = int64_t{1} << 22;
constexpr std::array<std::string_view, 3> input_names{"input", "scale", "offset"};

void check_dtype(std::string_view name, const TensorDesc& desc, DType expected) {
    check_nd(name, desc);
    if (desc.dtype == expected) return;
    throw invalid_tensor(ErrorType::INVALID_TENSOR_INI_MATCH, "the dtype of the " + std::string(name) + " is " +
                                                                  std::string(name_of(desc.dtype)) + ", expected " +
                                                                  std::string(name_of(expected)));
}

void check_vector(std::string_view name, const TensorDesc& desc, int64_t size) {
    const bool row = desc.shape.size() == 2 && desc.shape[0] == 1 && size > 1;
    const bool fits = (desc.shape.size() == 1 || row) && desc.shape.back() == size;
    if (fits) return;
    throw invalid_tensor(
        ErrorType::INVALID_TENSOR_DIM,
        "the " + std::string(name) + " has shape " + text_of(desc.shape) + ", expected [" + std::to_string(size) + "]");
}

std::vector<float> widened(const Buffer& buffer) {
    std::vector<float> values(buffer.bytes / sizeof(uint16_t));
    for (size_t i = 0; i < values.size(); ++i) {
        uint16_t half = 0;
        std::memcpy(&half, static_cast<const char*>(buffer.data) + i * sizeof half, sizeof half);
        values[i] = kernel::float16_to_float(half);
    }
    return values;
}

/// Any of our transports carries it.
AllToAllVParam group_of(const QuantAllReduceParam& param) {
    AllToAllVParam group = param.group;
    group.backend = "auto";
    return group;
}

}  // namespace

void check_create(const QuantAllReduceParam& param, const DeviceInfo* device) {
    const std::string& backend = param.group.backend;
    if (backend != "lccl" && backend != "shm" && backend != "auto")
        throw invalid_param("backend is \"" + backend +
                            "\", expected \"lccl\", \"shm\" or \"auto\": no other reduces " + "quantized tensors");
    if (param.all_reduce_type != "sum")
        throw invalid_param("all_reduce_type is \"" + param.all_reduce_type + "\", expected \"sum\"");
    if (param.quant_type != QuantType::PER_TENSOR && param.quant_type != QuantType::PER_CHANNEL)
        throw invalid_param("quant_type is " + std::to_string(static_cast<int>(param.quant_type)) +
                            ", expected 1 (PER_TENSOR) or 2 (PER_CHANNEL)");
    if (param.out_data_type != 1)
        throw invalid_param("out_data_type is " + std::to_string(param.out_data_type) + ", expected 1 (float16)");
    check_group(param.group, device);
}

TensorDesc infer_shape(const QuantAllReduceParam& param, std::span<const TensorDesc> inputs) {
    check_tensor_count("inputs", inputs.size(), input_names.size());
    const TensorDesc &x = inputs[0], &scale = inputs[1], &offset = inputs[2];
    check_shape(input_names[0], x);
    check_dtype(input_names[0], x, DType::int8);
    check_dtype(input_names[1], scale, DType::float16);
    check_dtype(input_names[2], offset, DType::float16);
    if (scale.shape.size() > 2)
        throw invalid_tensor(ErrorType::INVALID_TENSOR_DIM_NUM,
                             "the scale has " + std::to_string(scale.shape.size()) + " dimensions, expected at most 2");
    const bool per_channel = param.quant_type == QuantType::PER_CHANNEL;
    const int64_t channels = x.shape.back();
    if (channels % axis_multiple != 0 || (per_channel && channels > max_channels))
        throw invalid_tensor(ErrorType::INVALID_TENSOR_DIM,
                             "the last axis of the input has " + std::to_string(channels) +
                                 " entries, expected a multiple of 16" + (per_channel ? " of at most 4194304" : ""));
    check_vector(input_names[1], scale, per_channel ? channels : 1);
    check_vector(input_names[2], offset, 1);
    return {DType::float16, x.shape, x.format};
}

QuantAllReduceOperation::QuantAllReduceOperation(QuantAllReduceParam param, std::optional<DeviceInfo> device,
                                                 Connect connect)
    : param_(std::move(param)), member_(OpKind::quantized_all_reduce, group_of(param_), std::move(connect)) {
    check_create(param_, device ? &*device : nullptr);
}

TensorDesc QuantAllReduceOperation::infer_shape(std::span<const TensorDesc> inputs) {
    return member_.guard([&] { return alltoallv::infer_shape(param_, inputs); });
}

void QuantAllReduceOperation::setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) {
    {
        const std::lock_guard lock(planning_);
        plan_ = {};  // a failed setup leaves nothing to execute
    }
    Plan plan = member_.guard([&] {
        const TensorDesc expected = alltoallv::infer_shape(param_, inputs);
        check_tensor_count("outputs", outputs.size(), 1);
        check_shape("output", outputs[0]);
        check_dtype("output", outputs[0], DType::float16);
        if (outputs[0].shape != expected.shape)
            throw invalid_tensor(ErrorType::INVALID_TENSOR_DIM, "the output has shape " + text_of(outputs[0].shape) +
                                                                    ", expected " + text_of(expected.shape));
        return Plan{nullptr, check_shape(input_names[0], inputs[0]), static_cast<size_t>(inputs[1].shape.back())};
    });
    // Outside the guard: without a communicator there is no way to tell anyone.
    plan.communicator = member_.connected();
    member_.guard([&] { member_.check(*plan.communicator); });
    const std::lock_guard lock(planning_);
    plan_ = std::move(plan);
}

QuantAllReduceOperation::Plan QuantAllReduceOperation::check_execute(std::span<const Buffer> inputs,
                                                                     std::span<const Buffer> outputs) {
    Plan plan;
    {
        const std::lock_guard lock(planning_);
        plan = plan_;
    }
    if (plan.communicator == nullptr) throw invalid_param("execute was called before setup had succeeded");
    check_tensor_count("inputs", inputs.size(), input_names.size());
    check_tensor_count("outputs", outputs.size(), 1);
    const auto count = static_cast<uint64_t>(plan.count);
    check_buffer(input_names[0], inputs[0], count);
    check_buffer(input_names[1], inputs[1], plan.scales * sizeof(uint16_t));
    check_buffer(input_names[2], inputs[2], sizeof(uint16_t));
    check_buffer("output", outputs[0], count * sizeof(uint16_t));
    if (overlaps(inputs[0], outputs[0])) throw invalid_param("the input and the output overlap in memory");
    return plan;
}

void QuantAllReduceOperation::execute(std::span<const Buffer> inputs, std::span<const Buffer> outputs, double timeout) {
    const Plan plan = member_.guard([&] { return check_execute(inputs, outputs); });
    const std::vector<float> scale = widened(inputs[1]), offset = widened(inputs[2]);
    QuantReduction reduction;
    reduction.mode = QuantMode::shared_scale;
    reduction.dtype = DType::int8;
    reduction.out_dtype = DType::float16;
    reduction.counts = {&plan.count, 1};
    reduction.scale = scale;
    reduction.offset = offset[0];
    reduction.input = inputs[0].data;
    reduction.output = outputs[0].data;
    plan.communicator->quant_reduce(reduction, timeout);
}

}  // namespace alltoallv
