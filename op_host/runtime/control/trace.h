/// \file trace.h
/// \brief The trace: one file per rank and domain, a record per operator, for `python -m alltoallv trace`.
///
/// A file is a page of JSON (its writer, and the names for the numbers in records) and then the records. They are
/// written through a mapping, so that a killed process leaves its last records, too, and a reader may read at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/base/dtype.h"
#include "runtime/base/mapping.h"
#include "runtime/base/unique_fd.h"
#include "runtime/control/flight.h"
#include "runtime/core/collective.h"

namespace alltoallv {

/// An int64 per rank follows: the number of elements for it.
struct TraceRecord {
    std::atomic<uint64_t> begin_ns, end_ns;  // 0: not begun, not ended; written after the rest
    uint64_t waited_ns;                      // until all peers arrived
    uint64_t seq, bytes;
    uint32_t dtype, element;
    uint16_t op;
    uint8_t state, unused;
    int32_t peer;  // of a message, else unused

    int64_t* counts() { return reinterpret_cast<int64_t*>(this + 1); }
};
static_assert(sizeof(TraceRecord) == 56);

/// Starts to trace this process into a folder, or stops with ""; returns the previous folder.
std::string set_trace_folder(const std::string& folder);

/// Writes the trace of one rank of one domain. Records from `begin` are valid as long as the tracer.
class Tracer {
  public:
    Tracer(std::string domain, int rank, int size);
    ~Tracer();

    /// Returns null while tracing is off.
    TraceRecord* begin(uint64_t seq, OpKind op, DType dtype, Clock::time_point time) {
        return generation.load(std::memory_order_acquire) % 2 == 0 ? nullptr : claim(seq, op, dtype, time);
    }
    static void end(TraceRecord& record, bool ok, uint64_t bytes, uint64_t now_ns);

  private:
    friend std::string set_trace_folder(const std::string& folder);
    static void take_environment();
    struct File {
        std::string folder;
        UniqueFd fd;
        Mapping memory;
        size_t used = 0, size = 0;
    };

    TraceRecord* claim(uint64_t seq, OpKind op, DType dtype, Clock::time_point time);
    void open(const std::string& folder);
    bool grow(File& file, size_t size);
    std::string header() const;

    static std::atomic<uint64_t> generation;  // odd: tracing is on

    const std::string domain_;
    const int rank_, size_;
    const size_t stride_;
    std::mutex mutex_;  // guards the members below
    uint64_t opened_ = 0;
    std::vector<std::unique_ptr<File>> files_;  // the last one is written; the others may have unfinished records
};

}  // namespace alltoallv
