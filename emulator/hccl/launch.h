// What all collectives share: checks when called, agreement of the ranks and the work itself on the stream.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "hccl/comm.h"
#include "hccl/types.h"
#include "runtime/failure.h"
#include "runtime/stream.h"

namespace alltoallv::emulator {

/// A caller's buffer. Must lie within one allocation of device memory; may be null when it has no bytes.
struct Region {
    const char* name;
    const void* address;
    uint64_t bytes;

    char* data() const { return static_cast<char*>(const_cast<void*>(address)); }
};

/// What must be equal on all ranks.
struct Agreed {
    char function[32] = {};
    uint32_t type = 0, op = 0, root = 0;
    uint64_t count = 0;
};

/// Something to send to a peer or to receive from it.
struct Message {
    bool sends;
    Region buffer;
    uint64_t count;
    HcclDataType type;
    int peer;
};

struct Launch {
    const char* function;
    HcclComm comm;
    aclrtStream stream;
    HcclDataType type = HCCL_DATA_TYPE_UINT8;
    uint32_t op = 0, root = 0;
    uint64_t count = 0;             ///< where all ranks have the same
    std::vector<Region> inputs{};   ///< read
    std::vector<Region> outputs{};  ///< written
    /// On the stream, after the ranks have agreed.
    std::function<void(Comm& comm, double timeout)> run{};
    std::vector<Message> messages{};  ///< instead of `run`, of a call in which not all ranks take part
};

/// Elements that HCCL accepts in one call.
inline constexpr uint64_t most_elements = 0x7FFFFFFFF;

/// Throws Failure(HCCL_E_PARA) for counts above it.
void check_count(const char* name, uint64_t count);

/// Throws Failure(HCCL_E_PTR) for null.
void check_given(const char* name, const void* pointer);

/// Throws Failure(HCCL_E_PARA) where the buffers share memory.
void check_apart(const Region& input, const Region& output);

/// Checks the arguments, then queues the work. Between HcclGroupStart and HcclGroupEnd it is queued at the end.
HcclResult launch(Launch launch);

/// The same in two steps, for functions that check more: `make` may throw Failure.
HcclResult launch(const char* function, const std::function<Launch()>& make);

/// All ranks of `core` must have given the same; throws Failure(HCCL_E_PARA) that names two that have not.
void agree(Communicator& core, const Agreed& mine, double timeout);

/// A part of a buffer that is both read and written, moved out of the way first.
class Copied {
  public:
    /// Copies the input only if it shares memory with the output.
    Copied(const Region& input, const Region& output);
    const void* data() const { return data_; }

  private:
    std::vector<char> copy_;
    const void* data_;
};

/// point_to_point.cpp: transfers all messages of a call, or of a group of calls, at the same time.
void run_messages(Comm& comm, const std::vector<Message>& messages, double timeout);

/// For HcclGroupStart and HcclGroupEnd. What a group sends and receives in one communicator is one batch.
void begin_group();
void end_group();

}  // namespace alltoallv::emulator
