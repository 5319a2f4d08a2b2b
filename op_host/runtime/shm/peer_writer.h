/// \file peer_writer.h
/// \brief Makes copies between ranks in the way that is faster at present, which it finds by timing them.
///
/// An ordinary store has to take each line away from the processor that read it last. If the two share a cache, that
/// costs little and keeps the data near; between caches, sockets, or the processors of a virtual machine that its host
/// moves about, it costs hundreds of nanoseconds per line, and streaming stores are several times faster. The topology
/// alone does not show which is true.
#pragma once

#include <cstddef>
#include <cstring>

#include "op_kernel/cpu/copy.h"
#include "runtime/base/processors.h"

namespace alltoallv {

/// Writes data that a peer reads: with ordinary stores, or past the caches while those have been slow in recent
/// operators. Not thread-safe.
class PeerWriter {
  public:
    /// `enough`: bytes per nanosecond of copies that are not slow, or a part of the speed that `make_own` has found.
    explicit PeerWriter(double enough) : enough_(enough) {}

    /// Call it before every operator: judges the last one.
    void begin() {
        if (timed_.bytes == 0) return;
        if (streamed_left_ > 0) {
            --streamed_left_;
        } else {
            const double usual = compared_.nanoseconds > 0 ? compared_.bytes / compared_.nanoseconds : 1;
            in_a_row_ = timed_.bytes < timed_.nanoseconds * enough_ * usual ? in_a_row_ + 1 : 0;
            if (in_a_row_ == convincing) {
                in_a_row_ = convincing - trial;
                streamed_left_ = streamed;
            }
        }
        timed_ = compared_ = {};
    }

    /// True if this operator's copies go past the caches. Now and then it is false, for another try.
    bool streams() const { return streamed_left_ > 0; }

    void copy(void* to, const void* from, size_t bytes) {
        if (bytes < timed_from) {
            if (bytes > 0) std::memcpy(to, from, bytes);
        } else if (streams()) {
            stream(to, from, bytes);
        } else {
            timed_.add(bytes, [=] { std::memcpy(to, from, bytes); });
        }
    }

    /// Copies past the caches; call it if `streams()`.
    void stream(void* to, const void* from, size_t bytes) {
        kernel::copy_streaming(to, from, bytes);
        timed_.bytes += static_cast<double>(bytes);
    }

    /// `make(at)` computes `bytes`: directly at `to`, or in `bounce`, from where they go past the caches.
    template <class Make>
    void make(void* to, size_t bytes, char* bounce, Make&& make) {
        if (streams()) {
            make(bounce);
            stream(to, bounce, bytes);
        } else {
            timed_.add(bytes, [&] { make(static_cast<char*>(to)); });
        }
    }

    /// Does for this rank alone, in memory that no peer reads, what `make` does for the peers.
    template <class Make>
    void make_own(size_t bytes, Make&& make) {
        compared_.add(bytes, make);
    }

  private:
    static constexpr size_t timed_from = 4096;
    // The first copies into memory that is in no cache are slow, whoever read it last: they prove nothing.
    static constexpr int convincing = 3;  // slow operators in a row
    static constexpr int trial = 2;       // number of them, after others
    static constexpr int streamed = 64;   // operators past the caches until ordinary stores are tried again

    struct Total {
        double bytes = 0, nanoseconds = 0;

        template <class Copy>
        void add(size_t n, Copy&& copy) {
            const auto start = Clock::now();
            copy();
            const std::chrono::duration<double, std::nano> took = Clock::now() - start;
            bytes += static_cast<double>(n);
            nanoseconds += took.count();
        }
    };

    double enough_;
    Total timed_, compared_;  // of this operator
    int in_a_row_ = 0;
    int streamed_left_ = 0;
};

}  // namespace alltoallv
