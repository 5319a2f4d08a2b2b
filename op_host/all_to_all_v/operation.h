// The base of every ATB-shaped operation: a plan that is made once, set up once per shape, and executed
// often.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "all_to_all_v/param.h"
#include "all_to_all_v/tensor_checks.h"
#include "runtime/base/error.h"
#include "runtime/core/communicator.h"
#include "runtime/core/request.h"

namespace alltoallv {

/// Makes the communicator that the parameters describe, or finds an existing one. Called once per operation, when it is
/// first needed; throws `Error`.
using Connect = std::function<CommunicatorPtr(const AllToAllVParam&)>;

/// A failure of this rank's own checks is announced to the peers, which then also fail, instead of waiting. So
/// infer_shape and setup are collective if they fail.
class Operation {
  public:
    /// `group` gives the rank and its peers; `op` is the operator whose failures are announced. Does not connect.
    Operation(OpKind op, AllToAllVParam group, Connect connect);
    virtual ~Operation() = default;
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    TensorDesc infer_shape(std::span<const TensorDesc> inputs);

    /// Checks the tensors against the param, and connects at the first call.
    void setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs);

    /// Returns the output for these inputs, after the checks of infer_shape, and with outputs also the checks of setup.
    /// Does not connect or communicate, for callers that move the data themselves.
    TensorDesc check(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const;

    /// Returns the bytes of scratch that `execute` needs: 0.
    uint64_t workspace_size() const { return 0; }

    /// Blocks until this rank's output is complete; given a device's `stream`, enqueues there and returns.
    /// `timeout` in seconds; negative: the communicator's own.
    void execute(std::span<const ByteRange> inputs, std::span<const ByteRange> outputs, double timeout = -1,
                 void* stream = nullptr);

    /// The shape-dependent result of setup.
    struct Plan {
        CommunicatorPtr communicator;
        std::vector<TensorDesc> inputs, outputs;
    };

    /// Returns what the last setup made if it was for one input of this dtype and shape, else null.
    std::shared_ptr<const Plan> plan_for(DType dtype, Shape shape) const;

    /// Announces to the peers that this rank's next call fails, for checks that only a front end can make.
    void announce(const Error& error);

  protected:
    virtual TensorDesc infer(std::span<const TensorDesc> inputs) const = 0;
    virtual void check_setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const = 0;
    /// True if the output may be the input, provided that their dtypes are equal.
    virtual bool works_in_place() const { return false; }
    virtual void run(const Plan& plan, std::span<const ByteRange> inputs, std::span<const ByteRange> outputs,
                     double timeout, void* stream) const = 0;

  private:
    template <class Checks>
    auto guard(Checks&& checks);
    CommunicatorPtr connected();
    void check_member(const Communicator& communicator) const;
    std::shared_ptr<const Plan> check_execute(std::span<const ByteRange> inputs,
                                              std::span<const ByteRange> outputs) const;

    const OpKind op_;
    const AllToAllVParam group_;
    const Connect connect_;
    std::mutex connecting_;
    CommunicatorPtr communicator_;  ///< guarded by connecting_
    mutable std::mutex planning_;
    std::shared_ptr<const Plan> plan_;  ///< guarded by planning_; null until set up
};

/// Throws invalid_param unless a param's rank and rank size are those in the communicator called `domain`.
void check_ranks(int rank, int rank_size, int own_rank, int size, std::string_view domain);

}  // namespace alltoallv
