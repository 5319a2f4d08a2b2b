// The ATB-shaped AllToAllV operator: infer shape, setup, execute.
#pragma once

#include <optional>
#include <span>

#include "all_to_all_v/checks.h"
#include "all_to_all_v/operation.h"
#include "all_to_all_v/param.h"

namespace alltoallv {

/// Returns the output of the operator for one input: the input's dtype and format, shape [1, sum(recv_counts)]. Does
/// not communicate. Throws `Error` with ATB's codes in ATB's order: 5, 8, 9, 13, 6 (only with `device`), then 1.
TensorDesc infer_shape(const AllToAllVParam& param, std::span<const TensorDesc> inputs,
                       const std::optional<DeviceInfo>& device = {});

class AllToAllVOperation final : public Operation {
  public:
    /// Throws code 1 if `check_create` does.
    AllToAllVOperation(AllToAllVParam param, std::optional<DeviceInfo> device, Connect connect);

    const AllToAllVParam& param() const { return param_; }

  private:
    TensorDesc infer(std::span<const TensorDesc> inputs) const override;
    void check_setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const override;
    void run(const Plan& plan, std::span<const ByteRange> inputs, std::span<const ByteRange> outputs, double timeout,
             void* stream) const override;

    const AllToAllVParam param_;
    const std::optional<DeviceInfo> device_;
};

}  // namespace alltoallv
