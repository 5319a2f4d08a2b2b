/// \file trace.h
/// \brief The trace: one file per rank and domain, a record per operator, for `python -m alltoallv trace`.
///
/// A file is a page of JSON (who writes it, and the names that records number) and then the records. They are written
/// through a mapping, so that what a killed process was doing is there too, and a reader may look at any time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/mapping.h"
#include "base/unique_fd.h"
#include "control/flight.h"
#include "core/collective.h"

namespace alltoallv {

/// Followed by an int64 per rank: the elements for it.
struct TraceRecord {
    std::atomic<uint64_t> begin_ns, end_ns;  // 0: not begun, not ended; written after the rest
    uint64_t waited_ns;                      // for peers to come
    uint64_t seq, bytes;
    uint32_t dtype, element;
    uint16_t op;
    uint8_t state, unused;
    int32_t peer;  // of a message

    int64_t* counts() { return reinterpret_cast<int64_t*>(this + 1); }
};
static_assert(sizeof(TraceRecord) == 56);

/// Begins to trace this process into a folder, or ends that with ""; returns the folder until now.
std::string set_trace_folder(const std::string& folder);

/// Where one rank of one domain writes. What `begin` gives is valid as long as the tracer.
class Tracer {
  public:
    Tracer(std::string domain, int rank, int size);
    ~Tracer();

    /// Null while nothing is traced.
    TraceRecord* begin(uint64_t seq, OpKind op, DType dtype, std::chrono::steady_clock::time_point time) {
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

    TraceRecord* claim(uint64_t seq, OpKind op, DType dtype, std::chrono::steady_clock::time_point time);
    void open(const std::string& folder);
    bool grow(File& file, size_t size);
    std::string header() const;

    static std::atomic<uint64_t> generation;  // odd: on

    const std::string domain_;
    const int rank_, size_;
    const size_t stride_;
    std::mutex mutex_;  // guards what follows
    uint64_t opened_ = 0;
    std::vector<std::unique_ptr<File>> files_;  // the last is written; records of the others may be under way
};

}  // namespace alltoallv
