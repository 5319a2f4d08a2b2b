#include "all_to_all_v/all_to_all_v.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "all_to_all_v/tensor_checks.h"
#include "runtime/core/regions.h"

namespace alltoallv {
namespace {

void check_dtype_and_format(std::string_view name, const TensorDesc& desc) {
    check_nd(name, desc);
    if (!info(desc.dtype).atb) refuse_dtype(name, desc, "float16, float32, int8, int32, int16, int64 or bfloat16");
}

/// Device families before A2 cannot compute with bfloat16; `check_create` refuses them already.
void check_bfloat16(const TensorDesc& desc, const std::optional<DeviceInfo>& device) {
    if (!device || desc.dtype != DType::bfloat16) return;
    constexpr std::array<std::string_view, 5> without{"Ascend310P", "Ascend310B", "Ascend910A", "Ascend910Pro",
                                                      "Ascend910Premium"};
    const std::string& soc = device->soc_name;
    const bool is_old = soc == "Ascend910" || std::ranges::any_of(without, [&](std::string_view family) {
                            return soc.find(family) != std::string::npos;
                        });
    if (is_old) {
        throw invalid_tensor(2001, ErrorType::INVALID_TENSOR_DTYPE, "the dtype of the input is bfloat16, which ", soc,
                             " does not support");
    }
}

void check_region_end(std::string_view counts_name, std::string_view displs_name, size_t j, int64_t count,
                      int64_t displ, int64_t limit, std::string_view limit_name) {
    if (count <= int64_max - displ && count + displ <= limit) return;
    const std::string index = "[" + std::to_string(j) + "]";
    throw invalid_param(1001, displs_name, index, " + ", counts_name, index, " is ", displ, " + ", count,
                        ", expected at most ", limit, ", ", limit_name);
}

/// Checks ATB's rules (a) to (d), which also apply to empty regions, and our rule that receive regions must not
/// overlap. Returns sum(recv_counts).
int64_t check_counts(const AllToAllVParam& param, int64_t numel) {
    for (size_t j = 0; j < param.send_counts.size(); ++j) {
        check_region_end("send_counts", "sdispls", j, param.send_counts[j], param.sdispls[j], numel,
                         "the elements of the input");
    }
    int64_t total = 0;
    for (size_t j = 0; j < param.recv_counts.size(); ++j) {
        if (param.recv_counts[j] > int64_max - total) {
            throw invalid_param(1002, "sum(recv_counts) exceeds 64 bits at recv_counts[", j, "], which is ",
                                param.recv_counts[j]);
        }
        total += param.recv_counts[j];
    }
    if (total <= 0)
        throw invalid_param(1003, "sum(recv_counts) is 0, expected at least 1; all_to_all_v has no such limit");
    for (size_t j = 0; j < param.recv_counts.size(); ++j) {
        check_region_end("recv_counts", "rdispls", j, param.recv_counts[j], param.rdispls[j], total,
                         "sum(recv_counts)");
    }
    check_no_overlap(param.recv_counts, param.rdispls);
    return total;
}

}  // namespace

TensorDesc infer_shape(const AllToAllVParam& param, std::span<const TensorDesc> inputs,
                       const std::optional<DeviceInfo>& device) {
    check_arrays(param);  // the loops below rely on equal lengths and signs
    check_tensor_count("inputs", inputs.size(), 1);
    const TensorDesc& input = inputs[0];
    const int64_t numel = check_shape("input", input);
    check_dtype_and_format("input", input);
    check_bfloat16(input, device);
    return {input.dtype, {1, check_counts(param, numel)}, input.format};
}

AllToAllVOperation::AllToAllVOperation(AllToAllVParam param, std::optional<DeviceInfo> device, Connect connect)
    : Operation(OpKind::all_to_all_v, param, std::move(connect)), param_(std::move(param)), device_(std::move(device)) {
    check_create(param_, device_);
}

TensorDesc AllToAllVOperation::infer(std::span<const TensorDesc> inputs) const {
    return alltoallv::infer_shape(param_, inputs, device_);
}

void AllToAllVOperation::check_setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const {
    check_tensor_count("inputs", inputs.size(), 1);
    check_tensor_count("outputs", outputs.size(), 1);
    const TensorDesc &input = inputs[0], &output = outputs[0];
    check_shape("input", input);
    check_shape("output", output);
    check_dtype_and_format("input", input);
    check_dtype_and_format("output", output);
    if (input.dtype != output.dtype)
        refuse_dtype("output", output, std::string(name_of(input.dtype)) + ", the input's");
    check_same_shape(output, infer(inputs));
}

void AllToAllVOperation::run(const Plan& plan, std::span<const ByteRange> inputs, std::span<const ByteRange> outputs,
                             double timeout, void* stream) const {
    Exchange exchange;
    exchange.op = OpKind::all_to_all_v;
    exchange.dtype = plan.inputs[0].dtype;
    exchange.input = reinterpret_cast<const void*>(inputs[0].address);
    exchange.output = reinterpret_cast<void*>(outputs[0].address);
    exchange.send_counts = param_.send_counts;
    exchange.sdispls = param_.sdispls;
    exchange.recv_counts = param_.recv_counts;
    exchange.rdispls = param_.rdispls;
    exchange.stream = stream;
    plan.communicator->exchange(exchange, timeout);
}

}  // namespace alltoallv
