// A peer that writes random bytes wherever others read: they may get errors, but neither crash nor wait for
// longer than the timeout, nor get wrong bytes from one another.
//
// `broken_peer_test --runs 20000 --seed 1` goes on for longer; `--fork N` makes the runs of one number again. A run is
// a communicator of 2 or 3 ranks that make random calls while a thread of one of them strikes at the control segment
// and, between processes, at the sockets. What only that rank writes is struck in one half of the runs, where what
// healthy ranks get from one another is compared; everything in the other.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "control_segment.h"
#include "random_calls.h"
#include "runtime/control/deadlock.h"

using namespace alltoallv;
using namespace testing;

namespace {

constexpr int runs_per_fork = 20, most_operators = 10;

std::vector<int> local_sockets() {
    std::vector<int> sockets;
    for (int fd = 3; fd < 64; ++fd) {
        int type = 0;
        socklen_t length = sizeof type;
        if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) == 0 && type == SOCK_SEQPACKET) sockets.push_back(fd);
    }
    return sockets;
}

class Vandal {
  public:
    Vandal(const Run& run, const CommunicatorOptions& options, bool threads, char* segment)
        : run_(run),
          random_(run.seed ^ 0xbad),
          layout_(options.size, options.mailbox_bytes()),
          base_(segment),
          sockets_(threads ? std::vector<int>{} : local_sockets()),
          pause_us_(static_cast<unsigned>(std::array{0, 20, 100, 1000}[random_.below(4)])),
          thread_([this] { strike_on(); }) {}
    ~Vandal() {
        stop_.store(true);
        thread_.join();
        // Between threads a promise that was overwritten would be waited for until the process ends.
        if (!run_.own_only)
            for (int rank = 0; rank < run_.size; ++rank) layout_.status(base_, rank).acked = 1;
    }

  private:
    void strike_on() {
        while (!stop_.load()) {
            strike();
            tally->strikes.fetch_add(1);
            if (pause_us_ > 0) usleep(static_cast<useconds_t>(random_.below(2 * pause_us_)));
        }
    }

    int writer() { return run_.own_only ? run_.broken : static_cast<int>(random_.below(ranks())); }
    int anybody() { return static_cast<int>(random_.below(ranks())); }
    size_t ranks() const { return static_cast<size_t>(run_.size); }

    uint64_t value(uint64_t old) {
        switch (random_.below(9)) {
            case 0:
                return 0;
            case 1:
                return ~uint64_t{0};
            case 2:
                return random_.next();
            case 3:
                return old ^ uint64_t{1} << random_.below(64);
            case 4:
                return old + random_.below(5) - 2;
            case 5:
                return uint64_t{1} << random_.below(64);
            case 6:
                return random_.below(1 << 20) - (1 << 10);
            case 7:
                return old | uint64_t{random_.below(4)} << 48;
            default:
                return random_.below(256);
        }
    }

    /// Some bytes of a field of 8.
    void hit(void* field) {
        auto* const word = static_cast<volatile uint64_t*>(field);
        if (random_.chance(50)) {
            *word = value(*word);
        } else {
            static_cast<volatile uint8_t*>(field)[random_.below(8)] = static_cast<uint8_t>(random_.next());
        }
    }
    void hit_in(void* begin, size_t bytes) { hit(static_cast<char*>(begin) + random_.below(bytes / 8) * 8); }

    /// So that ranks that compare rows at the same time see different ones.
    void flip() {
        Row& row = layout_.row(base_, run_.broken, random_.below(2));
        auto* const flags = reinterpret_cast<volatile uint8_t*>(&row.flags);
        *flags = *flags ^ row_failed;
    }

    void strike() {
        if (run_.flips) return flip();
        switch (random_.below(run_.own_only ? 12 : 14)) {
            case 0:
            case 1:
            case 2: {
                Row& row = layout_.row(base_, writer(), random_.below(2));
                return hit_in(reinterpret_cast<char*>(&row) + (random_.chance(90) ? 8 : 0), sizeof row - 8);
            }
            case 3:
            case 4:
                return hit_in(layout_.row(base_, writer(), random_.below(2)).pairs(), ranks() * sizeof(Pair));
            case 5: {
                Row& row = layout_.row(base_, writer(), random_.below(2));
                if (random_.chance(30)) return hit_in(layout_.steps(row), ranks() * sizeof(PairSteps));
                return hit_in(layout_.payload(row), 1024);
            }
            case 6:
                return hit_in(&layout_.flags(base_, writer()), sizeof(Flags));
            case 7: {
                RankStatus& status = layout_.status(base_, writer());
                if (random_.chance(90)) return hit_in(&status.host, sizeof status - offsetof(RankStatus, host));
                return hit_in(&status, sizeof status);
            }
            case 8: {
                const int me = writer();
                hit(&layout_.ring(base_, me, anybody()).produced);
                return random_.chance(50) ? hit(&layout_.ring(base_, anybody(), me).consumed) : void();
            }
            case 9: {
                Channel& channel = layout_.channel(base_, writer(), anybody());
                return hit_in(&channel.messages[random_.below(12)], sizeof(MessageSlot));
            }
            case 10: {
                WaitBoard& board = layout_.board(base_, writer());
                if (random_.chance(30)) return hit_in(&board, 16);
                return hit_in(board.words, 4 * sizeof(WaitRecord));
            }
            case 11:
                return random_.chance(70) ? hit_in(layout_.scratch(base_, writer()), 1 << 16) : lie();
            case 12:
                return random_.chance(10) ? hit_in(&layout_.header(base_), sizeof(ControlHeader)) : void();
            default:
                return hit_in(base_, layout_.total());
        }
    }

    /// Words over a socket that no healthy peer says, and descriptors that are none of segments.
    void lie() {
        if (sockets_.empty()) return;
        struct {
            uint32_t kind, segment;
            uint64_t bytes;
        } words{static_cast<uint32_t>(random_.below(5)), static_cast<uint32_t>(random_.below(6)),
                random_.chance(50) ? size_t{8} << 20 : value(4096)};
        iovec part{&words, random_.chance(90) ? sizeof words : random_.below(sizeof words) + 1};
        msghdr header{};
        header.msg_iov = &part;
        header.msg_iovlen = 1;
        alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
        int fd = -1;
        if (random_.chance(60)) {
            fd = random_.chance(50) ? memfd_create("lie", MFD_CLOEXEC) : open("/dev/null", O_RDWR | O_CLOEXEC);
            (void)!ftruncate(fd, 4096);
            header.msg_control = space;
            header.msg_controllen = sizeof space;
            cmsghdr* const item = CMSG_FIRSTHDR(&header);
            *item = {CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
            std::memcpy(CMSG_DATA(item), &fd, sizeof fd);
        }
        (void)!sendmsg(sockets_[random_.below(sockets_.size())], &header, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (fd >= 0) close(fd);
    }

    const Run run_;
    Random random_;
    const Layout layout_;
    char* const base_;
    const std::vector<int> sockets_;
    const unsigned pause_us_;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

/// Some communicators in turn, on one rank.
void some_runs(const Mode& mode, int rank, int size, uint64_t seed) {
    for (uint64_t number = 0; number < runs_per_fork; ++number) {
        Random random(seed * runs_per_fork + number);
        Run run;
        run.seed = seed * runs_per_fork + number;
        run.size = size;
        run.broken = static_cast<int>(random.below(static_cast<size_t>(size)));
        run.own_only = random.chance(50);
        run.timeout = random.chance(3) ? 0.7 : 0.1;
        run.flips = run.own_only && Random(run.seed ^ 0xf11b).chance(20);
        constexpr const char* paths[] = {"auto", "auto", "push", "pull", "cma", "staged", "inline"};
        CommunicatorOptions options = options_of(mode, rank, size, paths[random.below(std::size(paths))]);
        options.domain = "run" + std::to_string(run.seed);
        options.timeout = 20;
        options.check = random.chance(50);
        const auto before = control_segments();
        const CommunicatorPtr communicator = make_shm_communicator(options);
        try {
            barrier(*communicator);
        } catch (const Error& error) {
            tally->errors.fetch_add(1);  // the broken rank has gone ahead
        }
        {
            std::optional<Vandal> vandal;
            if (rank == run.broken) {
                auto segments = control_segments();
                std::erase_if(segments, [&](const auto& segment) { return before.contains(segment.first); });
                CHECK_EQ(segments.size(), size_t{1});
                vandal.emplace(run, options, mode.threads, segments.begin()->second);
            }
            make_calls(run, *communicator, random, most_operators);
            (void)communicator->flight_record();
        }
        leave(*communicator);
    }
}

/// In a process of their own, so that a crash is counted and the next ones go on. Returns what is wrong.
int fork_runs(uint64_t seed) {
    Random random(seed);
    const Mode& mode = random.chance(70) ? processes : threads;
    const int size = random.chance(50) ? 2 : 3;
    const auto body = [&](int rank) {
        const uint64_t caller = BlockedThread::this_thread();
        hooks().poll = [caller] {
            if (BlockedThread::this_thread() == caller && Deadlocks::instance().due())
                Deadlocks::instance().look({caller});
        };
        some_runs(mode, rank, size, seed);
    };
    std::vector<int> statuses;
    if (mode.threads)
        statuses = {wait_for(spawn(
            "threads", [&] { all_pass(run_threads(size, [&](int rank) { some_runs(mode, rank, size, seed); })); }))};
    else
        statuses = run_processes(size, body);
    int bad = 0;
    for (const int status : statuses) bad = std::max(bad, status);
    if (bad != 0)
        std::fprintf(stderr, "seed %llu, %d %s: exit status %d\n", static_cast<unsigned long long>(seed), size,
                     mode.name, bad);
    return bad;
}

}  // namespace

int main(int argc, char** argv) {
    return run_broken(argc, argv, UNDER_SANITIZER ? 40 : 100, runs_per_fork, fork_runs);
}
