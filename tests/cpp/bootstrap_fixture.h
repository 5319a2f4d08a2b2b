// What the tests of the bootstrap share: options, expected failures, a full check of a membership.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <new>
#include <optional>

#include "errors.h"
#include "runtime/base/processors.h"
#include "runtime/bootstrap/bootstrap.h"
#include "runtime/bootstrap/bootstrap_protocol.h"
#include "runtime/bootstrap/bootstrap_rendezvous.h"
#include "runtime/bootstrap/unix_socket.h"

namespace testing {

using namespace alltoallv;

inline Membership bootstrap(const Mode& mode, const BootstrapOptions& options) {
    return mode.threads ? bootstrap_threads(options) : bootstrap_processes(options);
}

inline BootstrapOptions options_of(int rank, int size, double timeout = 60) {
    BootstrapOptions options;
    // The tests that ctest runs at once share a process group; the processes of one test share the program.
    options.job = std::string("test-") + program_invocation_short_name + "-" + std::to_string(getpgrp());
    options.domain = "d";
    options.rank = rank;
    options.size = size;
    options.timeout = timeout;
    options.settings = "check=always;pool=1";
    options.control_bytes = 4096;
    return options;
}

/// Counts how often the ranks, processes or threads, have polled in their bootstrap.
class Polls {
  public:
    explicit Polls(int ranks)
        : counts_(new (mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                      std::array<std::atomic<int>, 8>{}),
          ranks_(static_cast<size_t>(ranks)) {}
    ~Polls() { munmap(counts_, 4096); }
    Polls(const Polls&) = delete;
    Polls& operator=(const Polls&) = delete;

    /// For options.poll of a rank. Returns true once all have polled four times: they have met.
    bool all_wait(int rank) const {
        ++(*counts_)[static_cast<size_t>(rank)];
        return std::all_of(counts_->begin(), counts_->begin() + static_cast<std::ptrdiff_t>(ranks_),
                           [](const std::atomic<int>& count) { return count >= 4; });
    }

  private:
    std::array<std::atomic<int>, 8>* counts_;
    size_t ranks_;
};

inline constexpr double soon = 30;  // seconds: milliseconds on an idle machine, and less than the usual timeout

inline void wait_readable(int fd) {
    pollfd item{fd, POLLIN, 0};
    CHECK_EQ(::poll(&item, 1, 20000), 1);
}

/// The bootstrap must fail with this class, its message containing `part`, `least` seconds after `start`, and
/// long before the next limit.
inline void fails(const Mode& mode, const BootstrapOptions& options, ErrorClass kind, const std::string& part,
                  double least = 0, Clock::time_point start = Clock::now()) {
    fails(kind, part, [&] { bootstrap(mode, options); });
    const double seconds = seconds_since(start);
    CHECK(seconds >= least && seconds < least + soon);
}

/// Sends an open file over every socket and reads what the peers have sent.
inline void check_sockets(const Membership& membership, int rank) {
    for (const Peer& peer : membership.peers) {
        if (!peer.socket) continue;
        const int shared = memfd_create("shared", MFD_CLOEXEC);
        CHECK(write(shared, &rank, sizeof(rank)) == sizeof(rank));
        CHECK(try_send(peer.socket.get(), "from " + std::to_string(rank), {&shared, 1}) == IoStatus::done);
        close(shared);
    }
    for (size_t other = 0; other < membership.peers.size(); ++other) {
        const UniqueFd& socket = membership.peers[other].socket;
        CHECK_EQ(static_cast<bool>(socket), static_cast<int>(other) != rank);
        if (!socket) continue;
        wait_readable(socket.get());
        Message message;
        CHECK(try_receive(socket.get(), message) == IoStatus::done);
        CHECK_EQ(message.data, "from " + std::to_string(other));
        CHECK_EQ(message.fds.size(), size_t{1});
        CHECK((fcntl(message.fds[0].get(), F_GETFD) & FD_CLOEXEC) != 0);
        int read_back = -1;
        CHECK(pread(message.fds[0].get(), &read_back, sizeof(int), 0) == sizeof(int));
        CHECK_EQ(read_back, static_cast<int>(other));
        CHECK(try_receive(socket.get(), message) == IoStatus::again);  // nothing left over from the bootstrap
    }
}

/// Everybody counts itself in the control segment, which is fresh, shared and cannot be resized.
inline void check_control(const Membership& membership) {
    const UniqueFd control = make_control_segment(4096);
    CHECK(ftruncate(control.get(), 0) != 0 && ftruncate(control.get(), 8192) != 0);
    CHECK((fcntl(control.get(), F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_EQ(membership.memory->size(), size_t{4096});
    auto* counter = reinterpret_cast<std::atomic<size_t>*>(membership.memory->data());
    counter->fetch_add(1, std::memory_order_acq_rel);
    const auto start = Clock::now();
    while (counter->load(std::memory_order_acquire) < membership.peers.size()) {
        CHECK(seconds_since(start) < 20);
        std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK_EQ(counter->load(std::memory_order_acquire), membership.peers.size());
}

inline void check_membership(const Mode& mode, const BootstrapOptions& options) {
    const Membership membership = bootstrap(mode, options);
    CHECK_EQ(membership.peers.size(), static_cast<size_t>(options.size));
    CHECK_EQ(membership.peers[static_cast<size_t>(options.rank)].pid, getpid());
    const bool pidfds = static_cast<bool>(open_pidfd(getpid()));
    for (int rank = 0; rank < options.size; ++rank) {
        const Peer& peer = membership.peers[static_cast<size_t>(rank)];
        CHECK(kill(peer.pid, 0) == 0);
        CHECK_EQ(static_cast<bool>(peer.pidfd), pidfds && !mode.threads && rank != options.rank);
        CHECK(!mode.threads || !peer.socket);
        CHECK_EQ(peer.pid == getpid(), mode.threads || rank == options.rank);
    }
    if (!mode.threads) check_sockets(membership, options.rank);
    check_control(membership);
}

}  // namespace testing
