// What the self-tests of the transport share: communicators, buffers in and out of the arena, known contents.
#pragma once

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>

#include "errors.h"
#include "runtime/shm/shm_communicator.h"

namespace testing {

using namespace alltoallv;

/// The same in all ranks: taken before the first fork.
inline const std::string job = "selftest-" + std::to_string(getpid());

inline CommunicatorOptions options_of(const Mode& mode, int rank, int size, const std::string& path = "auto") {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = size;
    options.domain = "selftest";
    options.threads = mode.threads;
    options.job = job;
    options.timeout = 100;
    options.path = path;
    return options;
}

/// splitmix64.
inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/// The same sequence in every rank.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(mix(seed)) {}
    uint64_t next() { return state_ = mix(state_); }
    size_t below(size_t n) { return static_cast<size_t>(next() % n); }
    bool chance(unsigned percent) { return below(100) < percent; }

  private:
    uint64_t state_;
};

/// Memory in the arena, or plain memory of this rank.
class Buffer {
  public:
    Buffer(size_t bytes, bool shared) : bytes_(bytes) {
        if (shared) {
            block_ = Arena::instance().allocate(bytes);
            CHECK(block_.shared());
        } else {
            private_.reset(new char[bytes + 1]);
        }
    }
    char* data() const { return private_ ? private_.get() : block_.data(); }
    size_t size() const { return bytes_; }

    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data());
    }

  private:
    size_t bytes_;
    Block block_;
    std::unique_ptr<char[]> private_;
};

/// What rank `sender` holds: every eight bytes a hash of (seed, sender, position).
inline void fill(char* data, size_t bytes, uint64_t seed, int sender) {
    const uint64_t key = mix(seed * 64 + static_cast<uint64_t>(sender));
    for (size_t at = 0; at < bytes; at += 8) {
        const uint64_t word = mix(key + at);
        std::memcpy(data + at, &word, std::min<size_t>(8, bytes - at));
    }
}

inline void barrier(Communicator& communicator) {
    const std::vector<int64_t> none(static_cast<size_t>(communicator.size()));
    Exchange exchange;
    exchange.op = OpKind::barrier;
    exchange.send_counts = exchange.sdispls = exchange.recv_counts = exchange.rdispls = none;
    communicator.exchange(exchange, -1);
}

}  // namespace testing
