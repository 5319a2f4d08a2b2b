// An emulated HCCL communicator: one of ours over shared memory, and the state that HCCL adds to it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "hccl/hccl_api.h"
#include "hccl/windows.h"
#include "runtime/core/communicator.h"
#include "runtime/memory.h"

namespace alltoallv::emulator {

/// The options of a communicator. `job` is equal on all ranks and different between communicators.
struct CommSpec {
    std::string job;
    std::string name;
    int rank = 0;
    int size = 1;
    int device = 0;            ///< the device of its buffers
    uint32_t buffer_mb = 0;    ///< size of each of its two buffers; 0: HCCL_BUFFSIZE
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

    /// Returns the one-way connection of two ranks. Its first use makes it and blocks until the peer does the same.
    Communicator& channel(int from, int to);

    /// Returns this rank's buffer, made at the first call, and its peers' once `connect_windows` has been called.
    Windows& windows();

    /// Maps the peers' buffers; all ranks call it, and the first call blocks until they do. Returns this rank's buffer.
    void* connect_windows();

    /// Returns the time limit of one collective, in seconds.
    double exec_timeout() const;

    /// Records the first failure of a task, for HcclGetCommAsyncError.
    void fail(HcclResult result);
    HcclResult async_error() const { return static_cast<HcclResult>(failed_.load()); }

    /// Number of tasks that are queued or running.
    std::atomic<int> pending{0};

    /// Numbers of collectives that were called, and that are done: HCCL needs them in order, on any streams.
    std::atomic<uint64_t> called{0}, finished{0};

    /// Wakes all waits and leaves the group.
    void destroy();

  private:
    CommSpec spec_;
    std::optional<Reserved> buffers_;
    uint64_t buffer_bytes_ = 0;
    std::optional<Windows> windows_;
    CommunicatorPtr core_;
    std::mutex mutex_;
    std::map<std::pair<int, int>, CommunicatorPtr> channels_;
    std::atomic<int> failed_{HCCL_SUCCESS};
};

using CommPtr = std::shared_ptr<Comm>;

/// Handles as HCCL returns them. Throws Failure: HCCL_E_PTR for null, HCCL_E_PARA for a destroyed one.
HcclComm add_comm(CommPtr comm);
CommPtr comm_of(HcclComm handle);
void remove_comm(HcclComm handle);

/// Returns the handle of this name's communicator, of the current device where several have it. Throws Failure.
HcclComm comm_named(const std::string& name);

/// Returns the HcclResult for a failure of the core.
HcclResult result_of(const Error& error);

/// Returns the HcclResult and the text of the exception that is being handled.
std::pair<HcclResult, std::string> caught();

/// The body of an HCCL function without a stream: applies faults, then runs `body`, which throws Failure or Error.
HcclResult guarded_hccl(const char* function, const std::function<void()>& body);

}  // namespace alltoallv::emulator
