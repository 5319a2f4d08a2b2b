#include "atb/quant_all_reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "atb/tensor_checks.h"
#include "core/request.h"
#include "op_kernel/cpu/half.h"

namespace alltoallv {
namespace {

constexpr int64_t axis_multiple = 16;
constexpr int64_t max_channels = int64_t{1} << 22;
constexpr std::array<std::string_view, 3> input_names{"input", "scale", "offset"};
constexpr std::array<std::string_view, 3> output_names{"output", "error feedback", "error feedback of the gather"};

constexpr int acl_undefined = -1, acl_float32 = 0, acl_float16 = 1, acl_bfloat16 = 27;

bool is_dynamic(const QuantAllReduceParam& param) {
    return param.quant_type == QuantType::DYNAMIC;
}

DType output_dtype(const QuantAllReduceParam& param, DType input) {
    switch (param.out_data_type) {
        case acl_float32:
            return DType::float32;
        case acl_bfloat16:
            return DType::bfloat16;
        case acl_undefined:
            return is_dynamic(param) ? input : DType::float16;
        default:
            return DType::float16;
    }
}

/// Of the dynamic mode, to which dimensions of 0 are ordinary.
int64_t count_of(std::string_view name, const TensorDesc& desc) {
    const bool empty = std::ranges::find(desc.shape, 0) != desc.shape.end();
    return empty ? 0 : check_shape(name, desc);
}

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
    throw invalid_tensor(ErrorType::INVALID_TENSOR_DIM, "the " + std::string(name) + " has shape " +
                                                            list_text(desc.shape) + ", expected [" +
                                                            std::to_string(size) + "]");
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
    const bool dynamic = is_dynamic(param);
    if (param.all_reduce_type != "sum" && !(dynamic && param.all_reduce_type == "avg"))
        throw invalid_param("all_reduce_type is \"" + param.all_reduce_type + "\", expected \"sum\"" +
                            (dynamic ? " or \"avg\"" : ""));
    if (param.quant_type != QuantType::PER_TENSOR && param.quant_type != QuantType::PER_CHANNEL && !dynamic)
        throw invalid_param("quant_type is " + std::to_string(static_cast<int>(param.quant_type)) +
                            ", expected 1 (PER_TENSOR), 2 (PER_CHANNEL) or 16 (DYNAMIC)");
    const int out = param.out_data_type;
    if (out != acl_undefined && out != acl_float16 && !(dynamic && (out == acl_float32 || out == acl_bfloat16)))
        throw invalid_param("out_data_type is " + std::to_string(out) +
                            (dynamic ? ", expected -1 (that of the input), 0 (float32), 1 (float16) or 27 (bfloat16)"
                                     : ", expected 1 (float16)"));
    if (dynamic) {
        QuantReduction request;
        request.format = param.format;
        request.group_size = param.group_size;
        check(request);
    } else if (const QuantAllReduceParam usual; param.format != usual.format || param.group_size != usual.group_size ||
                                                param.requantizes || param.overflow != usual.overflow) {
        throw invalid_param("bits, group_size, gather and overflow are set, expected them only with quant_type 16");
    }
    check_group(param.group, device);
}

TensorDesc infer_shape(const QuantAllReduceParam& param, std::span<const TensorDesc> inputs) {
    if (is_dynamic(param)) {
        check_tensor_count("inputs", inputs.size(), 1);
        const TensorDesc& x = inputs[0];
        count_of(input_names[0], x);
        check_nd(input_names[0], x);
        if (!info(x.dtype).quantizes)
            throw invalid_tensor(ErrorType::INVALID_TENSOR_INI_MATCH, "the dtype of the input is " +
                                                                          std::string(name_of(x.dtype)) +
                                                                          ", expected float32, float16 or bfloat16");
        return {output_dtype(param, x.dtype), x.shape, x.format};
    }
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

TensorDesc QuantAllReduceOperation::check(std::span<const TensorDesc> inputs,
                                          std::span<const TensorDesc> outputs) const {
    if (!outputs.empty()) check_setup(inputs, outputs);
    return alltoallv::infer_shape(param_, inputs);
}

TensorDesc QuantAllReduceOperation::infer_shape(std::span<const TensorDesc> inputs) {
    return member_.guard([&] { return alltoallv::infer_shape(param_, inputs); });
}

void QuantAllReduceOperation::setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) {
    {
        const std::lock_guard lock(planning_);
        plan_ = {};  // a failed setup leaves nothing to execute
    }
    Plan plan = member_.guard([&] { return check_setup(inputs, outputs); });
    // Outside the guard: without a communicator there is no way to tell anyone.
    plan.communicator = member_.connected();
    member_.guard([&] { member_.check(*plan.communicator); });
    const std::lock_guard lock(planning_);
    plan_ = std::move(plan);
}

QuantAllReduceOperation::Plan QuantAllReduceOperation::check_setup(std::span<const TensorDesc> inputs,
                                                                   std::span<const TensorDesc> outputs) const {
    const TensorDesc expected = alltoallv::infer_shape(param_, inputs);
    Plan plan;
    plan.dtype = inputs[0].dtype;
    plan.out_dtype = expected.dtype;
    const size_t states = param_.requantizes ? 2 : 1;
    if (!dynamic() || outputs.size() != 1 + states) check_tensor_count("outputs", outputs.size(), 1);
    plan.states = outputs.size() - 1;
    if (dynamic()) {
        plan.count = count_of(output_names[0], outputs[0]);
    } else {
        plan.count = check_shape(output_names[0], outputs[0]);
        plan.scales = static_cast<size_t>(inputs[1].shape.back());
    }
    check_dtype(output_names[0], outputs[0], expected.dtype);
    if (outputs[0].shape != expected.shape)
        throw invalid_tensor(ErrorType::INVALID_TENSOR_DIM, "the output has shape " + list_text(outputs[0].shape) +
                                                                ", expected " + list_text(expected.shape));
    plan.gather_state = quant_part(plan.count, param_.group_size, param_.group.rank_size, param_.group.rank).count;
    for (size_t i = 1; i < outputs.size(); ++i) {
        check_dtype(output_names[i], outputs[i], DType::float32);
        const int64_t wanted = i == 1 ? plan.count : plan.gather_state, found = count_of(output_names[i], outputs[i]);
        if (found != wanted)
            throw invalid_tensor(ErrorType::INVALID_TENSOR_DIM, "the " + std::string(output_names[i]) + " has " +
                                                                    std::to_string(found) + " elements, expected " +
                                                                    std::to_string(wanted));
    }
    return plan;
}

QuantAllReduceOperation::Plan QuantAllReduceOperation::check_execute(std::span<const Buffer> inputs,
                                                                     std::span<const Buffer> outputs) {
    Plan plan;
    {
        const std::lock_guard lock(planning_);
        plan = plan_;
    }
    if (plan.communicator == nullptr) throw invalid_param("execute was called before setup had succeeded");
    check_tensor_count("inputs", inputs.size(), dynamic() ? 1 : input_names.size());
    check_tensor_count("outputs", outputs.size(), 1 + plan.states);
    const auto count = static_cast<uint64_t>(plan.count);
    const auto check_place = [](std::string_view name, const Buffer& buffer, uint64_t bytes) {
        if (bytes > 0 || buffer.bytes > 0) check_buffer(name, buffer, bytes);  // what is empty may lie at 0
    };
    check_place(input_names[0], inputs[0], count * size_of(plan.dtype));
    if (!dynamic()) {
        check_buffer(input_names[1], inputs[1], plan.scales * sizeof(uint16_t));
        check_buffer(input_names[2], inputs[2], sizeof(uint16_t));
    }
    check_place(output_names[0], outputs[0], count * size_of(plan.out_dtype));
    if (plan.states > 0) check_place(output_names[1], outputs[1], count * sizeof(float));
    if (plan.states > 1)
        check_place(output_names[2], outputs[2], static_cast<uint64_t>(plan.gather_state) * sizeof(float));
    const bool in_place = plan.dtype == plan.out_dtype && inputs[0].data == outputs[0].data;
    if (overlaps(inputs[0], outputs[0]) && !in_place) throw invalid_param("the input and the output overlap in memory");
    for (size_t i = 1; i < outputs.size(); ++i) {
        if (overlaps(outputs[i], inputs[0]) || overlaps(outputs[i], outputs[0]) ||
            (i == 2 && overlaps(outputs[1], outputs[2])))
            throw invalid_param("the " + std::string(output_names[i]) + " overlaps another tensor in memory");
    }
    return plan;
}

void QuantAllReduceOperation::execute(std::span<const Buffer> inputs, std::span<const Buffer> outputs, double timeout) {
    const Plan plan = member_.guard([&] { return check_execute(inputs, outputs); });
    std::vector<float> scale;
    QuantReduction reduction;
    reduction.dtype = plan.dtype;
    reduction.out_dtype = plan.out_dtype;
    reduction.counts = {&plan.count, 1};
    if (dynamic()) {
        reduction.average = param_.all_reduce_type == "avg";
        reduction.format = param_.format;
        reduction.group_size = param_.group_size;
        reduction.requantizes = param_.requantizes;
        reduction.overflow = param_.overflow;
        reduction.feeds_back = plan.states > 0;
        reduction.gather_feeds_back = plan.states > 1;
        if (plan.states > 0) reduction.error = static_cast<float*>(outputs[1].data);
        if (plan.states > 1) reduction.gather_error = static_cast<float*>(outputs[2].data);
    } else {
        scale = widened(inputs[1]);
        reduction.mode = QuantMode::shared_scale;
        reduction.scale = scale;
        reduction.offset = widened(inputs[2])[0];
    }
    reduction.input = inputs[0].data;
    reduction.output = outputs[0].data;
    plan.communicator->quant_reduce(reduction, timeout);
}

}  // namespace alltoallv
