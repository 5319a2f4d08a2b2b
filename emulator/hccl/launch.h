// The common part of all collectives: checks in the call, then agreement of the ranks and the work on the stream.
#pragma once

#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "hccl/comm.h"
#include "hccl/types.h"
#include "runtime/failure.h"
#include "runtime/stream.h"

namespace alltoallv::emulator {

/// A caller's buffer. Must lie within one allocation of device memory; may be null if it has no bytes.
struct Region {
    const char* name;
    const void* address;
    uint64_t bytes;

    char* data() const { return static_cast<char*>(const_cast<void*>(address)); }
};

/// Values that must be equal on all ranks.
struct Agreed {
    char function[32] = {};  ///< set by `launch`
    uint32_t type = 0, op = 0, root = 0;
    uint64_t count = 0;
};

/// What the core needs for an operator.
struct OperatorCall {
    int64_t terms;  ///< a digest of Agreed, as the operator's root: the core compares it among the ranks
    double timeout;
};

/// A message to or from a peer.
struct HcclMessage {
    bool sends;
    Region buffer;
    uint64_t count;
    HcclDataType type;
    int peer;
};

struct Launch {
    HcclComm comm;
    aclrtStream stream;
    Agreed agreed{};
    std::vector<Region> inputs{};   ///< read
    std::vector<Region> outputs{};  ///< written
    /// Runs on the stream, as one operator of the communicator's core.
    std::function<void(Comm& comm, const OperatorCall& call)> run{};
    std::vector<HcclMessage> messages{};  ///< instead of `run`, for a call in which not all ranks take part
    bool at_once = false;                 ///< runs in the calling thread, on host memory, without a stream
};

/// Most elements that HCCL accepts in one call.
inline constexpr uint64_t most_elements = 0x7FFFFFFFF;

/// Throws Failure(HCCL_E_PARA) for larger counts.
void check_count(const char* name, uint64_t count);

/// Throws Failure(HCCL_E_PTR) for null.
void check_given(const char* name, const void* pointer);

/// Throws Failure(HCCL_E_PARA) unless a rank of the communicator has this number.
void check_root(uint32_t root, const Comm& comm);

/// Reads as many entries of a caller's array, each of which is checked.
void read_entries(const char* name, const void* array, std::span<int64_t> into);

/// Returns the elements from a buffer's start to the end of the last region that is not empty.
uint64_t span_of(std::span<const int64_t> counts, std::span<const int64_t> displs);

/// Throws Failure(HCCL_E_PARA) if the buffers overlap.
void check_apart(const Region& input, const Region& output);

/// Calls `make`, which may throw Failure, checks the arguments, then queues the work; between HcclGroupStart and
/// HcclGroupEnd, the end queues it.
HcclResult launch(const char* function, const std::function<Launch()>& make);

/// Runs `call`, an operator of `core` that has `terms` as its root. If the ranks have not given the same values, throws
/// Failure(HCCL_E_PARA) that names two that differ.
void run_agreed(Communicator& core, const Agreed& agreed, double timeout,
                const std::function<void(const OperatorCall&)>& run);

/// Copies the part of a buffer that is both read and written.
class Copied {
  public:
    /// Copies the input only if it shares memory with the output.
    Copied(const Region& input, const Region& output);
    const void* data() const { return data_; }

  private:
    std::vector<char> copy_;
    const void* data_;
};

/// Calls body(0), body(1) ... in a thread each. When all are done, throws what the first of them threw, if any did.
void in_threads(size_t count, const std::function<void(size_t)>& body);

/// point_to_point.cpp: transfers all messages of a call, or of a group of calls, at the same time.
void run_messages(Comm& comm, const std::vector<HcclMessage>& messages, double timeout);

/// For HcclGroupStart and HcclGroupEnd. The messages of a group in one communicator are one batch.
void begin_group();
void end_group();

}  // namespace alltoallv::emulator
