// The ATB-shaped AllToAllV operator: infer shape, setup, execute.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>

#include "atb/all_to_all_v_param.h"
#include "atb/checks.h"
#include "atb/member.h"
#include "atb/tensor_checks.h"
#include "base/tensor_view.h"
#include "core/regions.h"

namespace alltoallv {

/// Output of the operator for one input: the input's dtype and format, shape [1, sum(recv_counts)]. Pure: talks to no
/// peer. Throws `Error` with ATB's codes in ATB's order: 5, 8, 9, 13, 6 (only with `device`), then 1.
TensorDesc infer_shape(const AllToAllVParam& param, std::span<const TensorDesc> inputs,
                       const DeviceInfo* device = nullptr);

/// A plan: made once, set up once per input shape, executed often. A failure of this rank's own checks is announced to
/// the peers, which then fail too instead of waiting; for that, infer_shape and setup are collective where they fail.
class AllToAllVOperation {
  public:
    /// Throws code 1 where `check_create` does. Does not connect.
    AllToAllVOperation(AllToAllVParam param, std::optional<DeviceInfo> device, Connect connect);

    AllToAllVOperation(const AllToAllVOperation&) = delete;
    AllToAllVOperation& operator=(const AllToAllVOperation&) = delete;

    const AllToAllVParam& param() const { return param_; }

    TensorDesc infer_shape(std::span<const TensorDesc> inputs);

    /// Checks both tensors against the param, and connects at the first call.
    void setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs);

    /// Bytes of scratch that `execute` needs: none.
    uint64_t workspace_size() const { return 0; }

    /// Blocks until this rank's output is complete; given a device's `stream`, enqueues there and returns.
    /// `timeout` in seconds; negative: the communicator's own. Allocates nothing.
    void execute(std::span<const Buffer> inputs, std::span<const Buffer> outputs, double timeout = -1,
                 void* stream = nullptr);

    /// Tells the peers that this rank fails its next call, for checks that only a front end can make.
    void announce(const Error& error) { member_.announce(error); }

  private:
    struct Plan {
        CommunicatorPtr communicator;  ///< null until set up
        DType dtype{};
        uint64_t input_bytes = 0;
        uint64_t output_bytes = 0;
    };

    Plan check_execute(std::span<const Buffer> inputs, std::span<const Buffer> outputs);

    const AllToAllVParam param_;
    const std::optional<DeviceInfo> device_;
    Member member_;
    std::mutex planning_;
    Plan plan_;  ///< under planning_
};

}  // namespace alltoallv
