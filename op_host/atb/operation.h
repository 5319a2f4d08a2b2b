// What every ATB-shaped operation does as one rank of several: a plan, made once, set up once per shape, executed
// often.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "atb/all_to_all_v_param.h"
#include "atb/tensor_checks.h"
#include "base/error.h"
#include "core/communicator.h"
#include "core/request.h"

namespace alltoallv {

/// Makes the communicator that the parameters describe, or finds one that exists. Called once per operation, at its
/// first need; throws `Error`.
using Connect = std::function<CommunicatorPtr(const AllToAllVParam&)>;

/// A failure of this rank's own checks is announced to the peers, which then fail too instead of waiting; for that,
/// infer_shape and setup are collective where they fail.
class Operation {
  public:
    /// `group` names the rank and its peers; `op` is the operator whose failures are announced. Does not connect.
    Operation(OpKind op, AllToAllVParam group, Connect connect);
    virtual ~Operation() = default;
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    TensorDesc infer_shape(std::span<const TensorDesc> inputs);

    /// Checks the tensors against the param, and connects at the first call.
    void setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs);

    /// The output of these inputs, after the checks of infer_shape, with outputs also those of setup. Connects to
    /// nobody and tells nobody: for callers that move the data themselves.
    TensorDesc check(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const;

    /// Bytes of scratch that `execute` needs: none.
    uint64_t workspace_size() const { return 0; }

    /// Blocks until this rank's output is complete; given a device's `stream`, enqueues there and returns.
    /// `timeout` in seconds; negative: the communicator's own.
    void execute(std::span<const ByteRange> inputs, std::span<const ByteRange> outputs, double timeout = -1,
                 void* stream = nullptr);

    /// Tells the peers that this rank fails its next call, for checks that only a front end can make.
    void announce(const Error& error);

  protected:
    /// What the operation is set up for.
    struct Plan {
        CommunicatorPtr communicator;
        std::vector<TensorDesc> inputs, outputs;
    };

    virtual TensorDesc infer(std::span<const TensorDesc> inputs) const = 0;
    virtual void check_setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const = 0;
    /// Whether the output may be the input, where their dtypes are equal.
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
    CommunicatorPtr communicator_;  ///< under connecting_
    mutable std::mutex planning_;
    std::shared_ptr<const Plan> plan_;  ///< under planning_; null until set up
};

}  // namespace alltoallv
