#include "quant_all_reduce/quant_all_reduce.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>
#include <vector>

#include "all_to_all_v/tensor_checks.h"
#include "op_kernel/cpu/half.h"
#include "runtime/core/regions.h"

namespace alltoallv {
namespace {

constexpr int64_t axis_multiple = 16;
constexpr int64_t max_channels = int64_t{1} << 22;
constexpr int acl_undefined = -1, acl_float32 = 0, acl_float16 = 1, acl_bfloat16 = 27;

/// Counts elements for the dynamic mode, where dimensions of 0 are allowed.
int64_t count_of(std::string_view name, const TensorDesc& desc) {
    const bool empty = std::ranges::find(desc.shape, 0) != desc.shape.end();
    return empty ? 0 : check_shape(name, desc);
}

void check_dtype(std::string_view name, const TensorDesc& desc, DType expected) {
    check_nd(name, desc);
    if (desc.dtype != expected) refuse_dtype(name, desc, name_of(expected));
}

void check_vector(std::string_view name, const TensorDesc& desc, int64_t size) {
    const bool row = desc.shape.size() == 2 && desc.shape[0] == 1 && size > 1;
    const bool fits = (desc.shape.size() == 1 || row) && desc.shape.back() == size;
    if (fits) return;
    throw invalid_tensor(2008, ErrorType::INVALID_TENSOR_DIM, "the ", name, " has shape ", list_text(desc.shape),
                         ", expected [", size, "]");
}

std::vector<float> widened(const ByteRange& buffer) {
    std::vector<float> values(buffer.bytes / sizeof(uint16_t));
    const auto* halves = reinterpret_cast<const void*>(buffer.address);
    for (size_t i = 0; i < values.size(); ++i) values[i] = kernel::float16_to_float(kernel::load<uint16_t>(halves, i));
    return values;
}

/// All of our transports implement the operator, so any of them is chosen.
AllToAllVParam group_of(const QuantAllReduceParam& param) {
    AllToAllVParam group = param.group;
    group.backend = "auto";
    return group;
}

}  // namespace

QuantAllReduceOperation::QuantAllReduceOperation(QuantAllReduceParam param, std::optional<DeviceInfo> device,
                                                 Connect connect)
    : Operation(OpKind::quantized_all_reduce, group_of(param), std::move(connect)), param_(std::move(param)) {
    check_create(device);
}

void QuantAllReduceOperation::check_create(const std::optional<DeviceInfo>& device) const {
    const std::string& backend = param_.group.backend;
    if (backend != "lccl" && backend != "shm" && backend != "auto")
        throw invalid_param(1021, "backend is \"", backend,
                            "\", expected \"lccl\", \"shm\" or \"auto\": no other reduces quantized tensors");
    if (param_.all_reduce_type != "sum" && !(dynamic() && param_.all_reduce_type == "avg"))
        throw invalid_param(1022, "all_reduce_type is \"", param_.all_reduce_type, "\", expected \"sum\"",
                            (dynamic() ? " or \"avg\"" : ""));
    if (param_.quant_type != QuantType::PER_TENSOR && param_.quant_type != QuantType::PER_CHANNEL && !dynamic())
        throw invalid_param(1023, "quant_type is ", static_cast<int>(param_.quant_type),
                            ", expected 1 (PER_TENSOR), 2 (PER_CHANNEL) or 16 (DYNAMIC)");
    const int out = param_.out_data_type;
    if (out != acl_undefined && out != acl_float16 && !(dynamic() && (out == acl_float32 || out == acl_bfloat16)))
        throw invalid_param(1024, "out_data_type is ", out,
                            (dynamic() ? ", expected -1 (the input's), 0 (float32), 1 (float16) or 27 (bfloat16)"
                                       : ", expected 1 (float16)"));
    if (dynamic()) {
        QuantReduction request;
        request.format = param_.format;
        request.group_size = param_.group_size;
        alltoallv::check(request);
    } else if (const QuantAllReduceParam usual; param_.format != usual.format ||
                                                param_.group_size != usual.group_size || param_.requantizes ||
                                                param_.overflow != usual.overflow) {
        throw invalid_param(1025,
                            "bits, group_size, gather and overflow are set, expected them only with quant_type 16");
    }
    check_group(param_.group, device);
    if (param_.group.rank_size <= 0) throw too_small("rank_size", std::to_string(param_.group.rank_size), 1);
}

DType QuantAllReduceOperation::output_dtype(DType input) const {
    switch (param_.out_data_type) {
        case acl_float32:
            return DType::float32;
        case acl_bfloat16:
            return DType::bfloat16;
        case acl_undefined:
            return dynamic() ? input : DType::float16;
        default:
            return DType::float16;
    }
}

TensorDesc QuantAllReduceOperation::infer_dynamic(std::span<const TensorDesc> inputs) const {
    check_tensor_count("inputs", inputs.size(), 1);
    const TensorDesc& x = inputs[0];
    count_of(input_names[0], x);
    check_nd(input_names[0], x);
    if (!info(x.dtype).quantizes) refuse_dtype(input_names[0], x, "float32, float16 or bfloat16");
    return {output_dtype(x.dtype), x.shape, x.format};
}

TensorDesc QuantAllReduceOperation::infer(std::span<const TensorDesc> inputs) const {
    if (dynamic()) return infer_dynamic(inputs);
    check_tensor_count("inputs", inputs.size(), std::size(input_names));
    const TensorDesc &x = inputs[0], &scale = inputs[1], &offset = inputs[2];
    check_shape(input_names[0], x);
    check_dtype(input_names[0], x, DType::int8);
    check_dtype(input_names[1], scale, DType::float16);
    check_dtype(input_names[2], offset, DType::float16);
    if (scale.shape.size() > 2)
        throw invalid_tensor(2009, ErrorType::INVALID_TENSOR_DIM_NUM, "the scale has ", scale.shape.size(),
                             " dimensions, expected at most 2");
    const bool per_channel = param_.quant_type == QuantType::PER_CHANNEL;
    const int64_t channels = x.shape.back();
    if (channels % axis_multiple != 0 || (per_channel && channels > max_channels))
        throw invalid_tensor(2010, ErrorType::INVALID_TENSOR_DIM, "the last axis of the input has ", channels,
                             " entries, expected a multiple of 16", (per_channel ? " of at most 4194304" : ""));
    check_vector(input_names[1], scale, per_channel ? channels : 1);
    check_vector(input_names[2], offset, 1);
    return {DType::float16, x.shape, x.format};
}

void QuantAllReduceOperation::check_setup(std::span<const TensorDesc> inputs,
                                          std::span<const TensorDesc> outputs) const {
    const TensorDesc expected = infer(inputs);
    const size_t states = param_.requantizes ? 2 : 1;
    if (!dynamic() || outputs.size() != 1 + states) check_tensor_count("outputs", outputs.size(), 1);
    const int64_t count = dynamic() ? count_of(output_names[0], outputs[0]) : check_shape(output_names[0], outputs[0]);
    check_dtype(output_names[0], outputs[0], expected.dtype);
    check_same_shape(outputs[0], expected);
    const QuantPart part = quant_part(count, param_.group_size, param_.group.rank_size, param_.group.rank);
    for (size_t i = 1; i < outputs.size(); ++i) {
        check_dtype(output_names[i], outputs[i], DType::float32);
        const int64_t wanted = i == 1 ? count : part.count, actual = count_of(output_names[i], outputs[i]);
        if (actual != wanted)
            throw invalid_tensor(2011, ErrorType::INVALID_TENSOR_DIM, "the ", output_names[i], " has ", actual,
                                 " elements, expected ", wanted);
    }
}

void QuantAllReduceOperation::run(const Plan& plan, std::span<const ByteRange> inputs,
                                  std::span<const ByteRange> outputs, double timeout, void*) const {
    const int64_t count = element_count(plan.outputs[0].shape);
    const auto floats = [&](size_t i) {
        return i < outputs.size() ? reinterpret_cast<float*>(outputs[i].address) : nullptr;
    };
    std::vector<float> scale;
    QuantReduction reduction;
    reduction.dtype = plan.inputs[0].dtype;
    reduction.out_dtype = plan.outputs[0].dtype;
    reduction.counts = {&count, 1};
    reduction.shape = ShapeWords(plan.inputs[0].shape);
    if (dynamic()) {
        reduction.average = param_.all_reduce_type == "avg";
        reduction.format = param_.format;
        reduction.group_size = param_.group_size;
        reduction.requantizes = param_.requantizes;
        reduction.overflow = param_.overflow;
        reduction.feeds_back = outputs.size() > 1;
        reduction.gather_feeds_back = outputs.size() > 2;
        reduction.error = floats(1);
        reduction.gather_error = floats(2);
    } else {
        scale = widened(inputs[1]);
        reduction.mode = QuantMode::shared_scale;
        reduction.scale = scale;
        reduction.offset = widened(inputs[2])[0];
    }
    reduction.input = reinterpret_cast<const void*>(inputs[0].address);
    reduction.output = reinterpret_cast<void*>(outputs[0].address);
    plan.communicator->quant_reduce(reduction, timeout);
}

}  // namespace alltoallv
