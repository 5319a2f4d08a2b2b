/// \file trace.h
/// \brief The trace: one file per rank and domain, a record per operator, for `python -m alltoallv trace`.
///
/// A file is a page of JSON (its writer, and the names for the numbers in records) and then the records. Each is
/// written when its operator begins and again when it ends, so that a killed process also leaves its last records, and
/// a reader may read at any time. Not through a mapping: another program that truncates the file would end this one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/base/dtype.h"
#include "runtime/base/unique_fd.h"
#include "runtime/control/flight.h"
#include "runtime/core/collective.h"

namespace alltoallv {

/// How an operator has ended. `cut_short`: by the loss or the abort of a rank, in the midst of it.
enum class TraceState : uint8_t { running, done, failed, cut_short };

/// An int64 per rank follows: the number of elements for it.
struct TraceRecord {
    uint64_t begin_ns, end_ns;  // 0: not begun, not ended
    uint64_t waited_ns;         // until all peers arrived
    uint64_t seq, bytes;
    uint32_t dtype, element;
    uint16_t op;
    TraceState state;
    uint8_t unused;
    int32_t peer;  // of a message, else unused

    int64_t* counts() { return reinterpret_cast<int64_t*>(this + 1); }
};
static_assert(sizeof(TraceRecord) == 56);

/// Where this process's traces go, and how large each file may become.
struct TraceTarget {
    std::string folder;  // "": nothing is traced
    size_t most_bytes = size_t{1} << 30;
};

/// Traces to there from now on; returns the previous target.
TraceTarget set_trace_target(TraceTarget target);

/// Writes the trace of one rank of one domain.
class Tracer {
  public:
    Tracer(std::string domain, int rank, int size);
    ~Tracer();

    /// Returns the record of an operator, to be filled and given to `end`; null while tracing is off.
    TraceRecord* begin(uint64_t seq, OpKind op, DType dtype, Clock::time_point time, int32_t peer = 0) {
        return generation.load(std::memory_order_acquire) % 2 == 0 ? nullptr : claim(seq, op, dtype, time, peer);
    }
    /// Writes what has been filled since.
    void update(TraceRecord& record);
    void end(TraceRecord& record, TraceState state, uint64_t bytes, uint64_t now_ns);

  private:
    friend TraceTarget set_trace_target(TraceTarget target);
    static void take_environment();
    struct File {
        TraceTarget target;
        UniqueFd fd;
        size_t used = 0, size = 0;
        uint64_t lost = 0;  // records that another program has cut off
    };
    /// A record in memory, before it in the file; the record follows.
    struct alignas(TraceRecord) Slot {
        File* file;
        size_t offset;
        bool busy;
    };
    static constexpr size_t gone = SIZE_MAX;  // offset of a record that has been cut off while its operator ran

    TraceRecord* claim(uint64_t seq, OpKind op, DType dtype, Clock::time_point time, int32_t peer);
    static Slot& slot_of(TraceRecord& record) { return reinterpret_cast<Slot*>(&record)[-1]; }
    std::unique_lock<std::mutex> locked();
    File* file();
    Slot& free_slot();
    bool place(File& file, Slot& slot);
    void write(Slot& slot);
    void open(const TraceTarget& target);
    bool grow(File& file, size_t size);
    size_t whole(const File& file) const;
    bool mend(File& file);
    void write_header(const File& file) const;
    std::string header(const File& file) const;

    static std::atomic<uint64_t> generation;  // odd: tracing is on

    const std::string domain_;
    const int rank_, size_;
    const size_t stride_;
    std::mutex mutex_;  // guards the members below
    uint64_t opened_ = 0;
    std::vector<std::unique_ptr<File>> files_;  // the last one is written; the others may have unfinished records
    std::vector<std::unique_ptr<std::byte[]>> slots_;
};

}  // namespace alltoallv
