/// \file quant_all_reduce.h
/// \brief The ATB-shaped quantized AllReduce: int8 with a scale and an offset that all ranks share, float16 out.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/tensor_view.h"
#include "operation/all_to_all_v.h"
#include "operation/checks.h"
#include "operation/member.h"

namespace alltoallv {

/// Whether `scale` has one value, or one per entry of the last axis. ATB's numbers.
enum class QuantType : int { UNQUANT = 0, PER_TENSOR = 1, PER_CHANNEL = 2, MAX = 3 };

/// The fields of ATB's AllReduceParam, as far as its quantized form has them.
struct QuantAllReduceParam {
    AllToAllVParam group;  ///< rank to comm_domain and rsv, without counts; backend "lccl"
    std::string all_reduce_type = "sum";
    QuantType quant_type = QuantType::PER_TENSOR;
    int out_data_type = 1;  ///< ACL's number of float16, the only one

    QuantAllReduceParam() { group.backend = "lccl"; }

    bool operator==(const QuantAllReduceParam&) const = default;
};

/// Throws invalid_param, code 1: "lccl" (on a CPU the same as "auto" and "shm") and the sum alone are quantized.
void check_create(const QuantAllReduceParam& param, const DeviceInfo* device = nullptr);

/// Output for the inputs x, scale, offset: float16 in the shape of x. Throws `Error` with ATB's codes: 5 for the number
/// of inputs, 8 and 9 for the shape of x, 13 for dtypes and formats, 16 for a scale of more than two dimensions, 8 for
/// sizes: the last axis of x a multiple of 16 (and at most 2^22 with PER_CHANNEL), scale [1], or [n] or [1, n] with
/// PER_CHANNEL, offset [1].
TensorDesc infer_shape(const QuantAllReduceParam& param, std::span<const TensorDesc> inputs);

/// A plan, as AllToAllVOperation is: infer_shape and setup are collective where they fail.
class QuantAllReduceOperation {
  public:
    QuantAllReduceOperation(QuantAllReduceParam param, std::optional<DeviceInfo> device, Connect connect);

    const QuantAllReduceParam& param() const { return param_; }
    TensorDesc infer_shape(std::span<const TensorDesc> inputs);
    void setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs);
    uint64_t workspace_size() const { return 0; }

    /// Blocks until the output is complete. Inputs are x, scale, offset.
    void execute(std::span<const Buffer> inputs, std::span<const Buffer> outputs, double timeout = -1);

    void announce(const Error& error) { member_.announce(error); }

  private:
    struct Plan {
        CommunicatorPtr communicator;  ///< null until set up
        int64_t count = 0;
        size_t scales = 0;
    };

    Plan check_execute(std::span<const Buffer> inputs, std::span<const Buffer> outputs);

    const QuantAllReduceParam param_;
    Member member_;
    std::mutex planning_;
    Plan plan_;  ///< under planning_
};

}  // namespace alltoallv
