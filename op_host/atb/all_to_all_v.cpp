// Tensor checks in ATB's order, and the plan that hands an exchange to the communicator.
#include "atb/all_to_all_v.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "atb/tensor_checks.h"
#include "core/request.h"

namespace alltoallv {
namespace {

constexpr int64_t int64_max = std::numeric_limits<int64_t>::max();

void check_dtype_and_format(std::string_view name, const TensorDesc& desc) {
    check_nd(name, desc);
    if (!info(desc.dtype).atb) {
        throw invalid_tensor(ErrorType::INVALID_TENSOR_INI_MATCH,
                             "the dtype of the " + std::string(name) + " is " + std::string(name_of(desc.dtype)) +
                                 ", expected float16, float32, int8, int32, int16, int64 or bfloat16");
    }
}

/// The families before A2 cannot compute with bfloat16; `check_create` refuses them already.
void check_bfloat16(const TensorDesc& desc, const DeviceInfo* device) {
    if (device == nullptr || desc.dtype != DType::bfloat16) return;
    constexpr std::array<std::string_view, 5> without{"Ascend310P", "Ascend310B", "Ascend910A", "Ascend910Pro",
                                                      "Ascend910Premium"};
    const std::string& soc = device->soc_name;
    const bool is_old = soc == "Ascend910" || std::ranges::any_of(without, [&](std::string_view family) {
                            return soc.find(family) != std::string::npos;
                        });
    if (is_old) {
        throw invalid_tensor(ErrorType::INVALID_TENSOR_DTYPE,
                             "the dtype of the input is bfloat16, which " + soc + " does not support");
    }
}

void check_region_end(std::string_view counts_name, std::string_view displs_name, size_t j, int64_t count,
                      int64_t displ, int64_t limit, std::string_view limit_name) {
    if (count <= int64_max - displ && count + displ <= limit) return;
    const std::string index = "[" + std::to_string(j) + "]";
    throw invalid_param(std::string(displs_name) + index + " + " + std::string(counts_name) + index + " is " +
                        std::to_string(displ) + " + " + std::to_string(count) + ", expected at most " +
                        std::to_string(limit) + ", " + std::string(limit_name));
}

/// ATB's rules (a) to (d), which bound empty regions too, and ours that receive regions do not overlap.
/// Returns sum(recv_counts).
int64_t check_counts(const AllToAllVParam& param, int64_t numel) {
    for (size_t j = 0; j < param.send_counts.size(); ++j) {
        check_region_end("send_counts", "sdispls", j, param.send_counts[j], param.sdispls[j], numel,
                         "the elements of the input");
    }
    int64_t total = 0;
    for (size_t j = 0; j < param.recv_counts.size(); ++j) {
        if (param.recv_counts[j] > int64_max - total) {
            throw invalid_param("sum(recv_counts) exceeds 64 bits at recv_counts[" + std::to_string(j) +
                                "], which is " + std::to_string(param.recv_counts[j]));
        }
        total += param.recv_counts[j];
    }
    if (total <= 0) {
        throw invalid_param("sum(recv_counts) is 0, expected at least 1; all_to_all_v has no such limit");
    }
    for (size_t j = 0; j < param.recv_counts.size(); ++j) {
        check_region_end("recv_counts", "rdispls", j, param.recv_counts[j], param.rdispls[j], total,
                         "sum(recv_counts)");
    }
    check_no_overlap(param.recv_counts, param.rdispls);
    return total;
}

}  // namespace

TensorDesc infer_shape(const AllToAllVParam& param, std::span<const TensorDesc> inputs, const DeviceInfo* device) {
    check_arrays(param);  // the loops below rely on equal lengths and signs
    check_tensor_count("inputs", inputs.size(), 1);
    const TensorDesc& input = inputs[0];
    const int64_t numel = check_shape("input", input);
    check_dtype_and_format("input", input);
    check_bfloat16(input, device);
    return {input.dtype, {1, check_counts(param, numel)}, input.format};
}

AllToAllVOperation::AllToAllVOperation(AllToAllVParam param, std::optional<DeviceInfo> device, Connect connect)
    : param_(std::move(param)), device_(std::move(device)), member_(OpKind::all_to_all_v, param_, std::move(connect)) {
    check_create(param_, device_ ? &*device_ : nullptr);
}

TensorDesc AllToAllVOperation::infer_shape(std::span<const TensorDesc> inputs) {
    return member_.guard([&] { return alltoallv::infer_shape(param_, inputs, device_ ? &*device_ : nullptr); });
}

void AllToAllVOperation::setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) {
    {
        const std::lock_guard lock(planning_);
        plan_ = {};  // a failed setup leaves nothing to execute
    }
    Plan plan = member_.guard([&] {
        check_tensor_count("inputs", inputs.size(), 1);
        check_tensor_count("outputs", outputs.size(), 1);
        const TensorDesc &input = inputs[0], &output = outputs[0];
        const auto numel_in = static_cast<uint64_t>(check_shape("input", input));
        const auto numel_out = static_cast<uint64_t>(check_shape("output", output));
        check_dtype_and_format("input", input);
        check_dtype_and_format("output", output);
        if (input.dtype != output.dtype) {
            throw invalid_tensor(ErrorType::INVALID_TENSOR_INI_MATCH,
                                 "the dtype of the output is " + std::string(name_of(output.dtype)) + ", expected " +
                                     std::string(name_of(input.dtype)) + ", the input's");
        }
        const TensorDesc expected = alltoallv::infer_shape(param_, inputs, device_ ? &*device_ : nullptr);
        if (output.shape != expected.shape) {
            throw invalid_tensor(ErrorType::INVALID_TENSOR_DIM, "the output has shape " + list_text(output.shape) +
                                                                    ", expected " + list_text(expected.shape));
        }
        return Plan{nullptr, input.dtype, numel_in * size_of(input.dtype), numel_out * size_of(input.dtype)};
    });
    // Outside the guard: without a communicator there is no way to tell anyone.
    plan.communicator = member_.connected();
    member_.guard([&] { member_.check(*plan.communicator); });
    const std::lock_guard lock(planning_);
    plan_ = std::move(plan);
}

void AllToAllVOperation::execute(std::span<const Buffer> inputs, std::span<const Buffer> outputs, double timeout,
                                 void* stream) {
    const Plan plan = member_.guard([&] { return check_execute(inputs, outputs); });
    Exchange exchange;
    exchange.op = OpKind::all_to_all_v;
    exchange.dtype = plan.dtype;
    exchange.input = inputs[0].data;
    exchange.output = outputs[0].data;
    exchange.send_counts = param_.send_counts;
    exchange.sdispls = param_.sdispls;
    exchange.recv_counts = param_.recv_counts;
    exchange.rdispls = param_.rdispls;
    exchange.stream = stream;
    plan.communicator->exchange(exchange, timeout);
}

AllToAllVOperation::Plan AllToAllVOperation::check_execute(std::span<const Buffer> inputs,
                                                           std::span<const Buffer> outputs) {
    Plan plan;
    {
        const std::lock_guard lock(planning_);
        plan = plan_;
    }
    if (plan.communicator == nullptr) throw invalid_param("execute was called before setup had succeeded");
    check_tensor_count("inputs", inputs.size(), 1);
    check_tensor_count("outputs", outputs.size(), 1);
    check_buffer("input", inputs[0], plan.input_bytes);
    check_buffer("output", outputs[0], plan.output_bytes);
    if (overlaps(inputs[0], outputs[0])) throw invalid_param("the input and the output overlap in memory");
    return plan;
}

}  // namespace alltoallv
