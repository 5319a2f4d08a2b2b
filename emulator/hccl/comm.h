// An emulated HCCL communicator: ours over shared memory, and what HCCL keeps beside it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/communicator.h"
#include "hccl/hccl_api.h"
#include "runtime/memory.h"

namespace alltoallv::emulator {

/// How to make one. `job` is equal on all ranks and different between communicators.
struct CommSpec {
    std::string job;
    std::string name;
    int rank = 0;
    int size = 1;
    int device = 0;            ///< whose memory its buffers take
    uint32_t buffer_mb = 0;    ///< of each of its two buffers; 0: HCCL_BUFFSIZE
    bool threads = false;      ///< the ranks are devices of this process
    double exec_timeout = -1;  ///< seconds; negative: HCCL_EXEC_TIMEOUT
};

class Comm {
  public:
    /// Blocks until all ranks have arrived, at most for the connect timeout. Throws Failure.
    explicit Comm(const CommSpec& spec);
    ~Comm();

    int rank() const { return spec_.rank; }
    int size() const { return spec_.size; }
    const CommSpec& spec() const { return spec_; }
    Communicator& core() const { return *core_; }

    /// The one-way connection of two ranks, made when it is first used; blocks until the peer does so, too.
    Communicator& channel(int from, int to);

    /// Of one collective, in seconds.
    double exec_timeout() const;

    /// The first failure of a task, for HcclGetCommAsyncError.
    void fail(HcclResult result);
    HcclResult async_error() const { return static_cast<HcclResult>(failed_.load()); }

    /// Tasks that are queued or run.
    std::atomic<int> pending{0};

    /// Collectives that have been called, and those that are done: HCCL needs them in order, on whichever streams.
    std::atomic<uint64_t> called{0}, finished{0};

    /// Wakes whatever waits and leaves the group.
    void destroy();

  private:
    CommSpec spec_;
    std::optional<Reserved> buffers_;
    CommunicatorPtr core_;
    std::mutex mutex_;
    std::map<std::pair<int, int>, CommunicatorPtr> channels_;
    std::atomic<int> failed_{HCCL_SUCCESS};
};

using CommPtr = std::shared_ptr<Comm>;

/// Handles as HCCL gives them out. Throws Failure: HCCL_E_PTR for null, HCCL_E_PARA for one that was destroyed.
HcclComm add_comm(CommPtr comm);
CommPtr comm_of(HcclComm handle);
void remove_comm(HcclComm handle);

/// The HcclResult that a failure of the core stands for.
HcclResult result_of(const Error& error);

/// The body of an HCCL function that has no stream: faults first, then `body`, which throws Failure or Error.
HcclResult guarded_hccl(const char* function, const std::function<void()>& body);

}  // namespace alltoallv::emulator
