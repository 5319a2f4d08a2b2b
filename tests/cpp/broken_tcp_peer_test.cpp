// A peer between hosts that says random things over its connections, takes away what others say, or hangs up in
// the middle: they may get errors, but neither crash nor wait for longer than the timeout, nor get wrong bytes from
// one another.
//
// `broken_tcp_peer_test --runs 20000 --seed 1` goes on for longer; `--fork N` makes the runs of one number again. Each
// rank has a namespace of processes of its own, and so counts as a host. What healthy ranks get from one another is
// compared where the broken one is not rank 0, over which the others hear of each other.
#include <sched.h>
#include <sys/socket.h>

#include "random_calls.h"
#include "tcp_fixture.h"

using namespace alltoallv;
using namespace testing;

namespace {

constexpr int runs_per_fork = 5, most_operators = 8;

/// Connected ones of this process: between leaders, for data and for messages.
std::vector<int> tcp_sockets() {
    std::vector<int> sockets;
    for (int fd = 3; fd < 256; ++fd) {
        sockaddr_storage peer{};
        socklen_t length = sizeof peer;
        if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && peer.ss_family != AF_UNIX)
            sockets.push_back(fd);
    }
    return sockets;
}

class Vandal {
  public:
    explicit Vandal(const Run& run)
        : run_(run), random_(run.seed ^ 0xbad), sockets_(tcp_sockets()), thread_([this] { strike_on(); }) {
        CHECK(!sockets_.empty());
    }
    ~Vandal() {
        stop_.store(true);
        thread_.join();
    }

  private:
    void strike_on() {
        const size_t pause_us = std::array<size_t, 3>{200, 2000, 20'000}[random_.below(3)];
        while (!stop_.load()) {
            usleep(static_cast<useconds_t>(random_.below(2 * pause_us)));
            strike(sockets_[random_.below(sockets_.size())]);
            tally->strikes.fetch_add(1);
        }
    }

    uint64_t value() {
        const std::array<uint64_t, 5> values{0, ~uint64_t{0}, random_.next(), uint64_t{1} << random_.below(64),
                                             random_.below(16)};
        return values[random_.below(values.size())];
    }
    template <class T>
    T field() {
        return static_cast<T>(random_.chance(80) ? random_.below(8) : value());
    }

    /// Of a message between leaders.
    uint32_t kind() { return static_cast<uint32_t>(random_.chance(90) ? random_.below(12) : value()); }

    void say(int socket, const void* words, size_t bytes) {
        if (random_.chance(10)) bytes = random_.below(bytes) + 1;  // and nothing behind it
        (void)!send(socket, words, bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    }

    void strike(int socket) {
        std::vector<uint64_t> words(random_.below(200) + 2);  // a row needs two
        for (uint64_t& word : words) word = value();
        const size_t bytes = words.size() * sizeof words[0];
        switch (random_.below(8)) {
            case 0:
                return say(socket, words.data(), bytes);
            case 1:
            case 2: {  // as leaders talk to each other
                struct {
                    uint32_t bytes, tells;
                    int32_t rank;
                    uint32_t kind;
                    uint64_t seq;
                } head{static_cast<uint32_t>(random_.chance(90) ? bytes : value()), kind(),
                       field<int32_t>() % run_.size, field<uint32_t>() & 0xff, field<uint64_t>()};
                words[0] = static_cast<uint64_t>(run_.broken);  // of a row
                words[1] = field<uint64_t>();
                say(socket, &head, sizeof head);
                return say(socket, words.data(), bytes);
            }
            case 3:
            case 4: {  // as a message begins, is taken, refused or done
                struct {
                    uint32_t type;
                    int32_t tag;
                    uint64_t number, bytes;
                    int64_t count;
                    uint64_t dtype;
                } frame{field<uint32_t>(), 0,      field<uint64_t>(), random_.chance(50) ? 0 : field<uint64_t>(),
                        field<int64_t>(),  value()};
                return say(socket, &frame, sizeof frame);
            }
            case 5:
            case 6:
                (void)!recv(socket, words.data(), bytes, MSG_DONTWAIT);
                return;
            default:
                if (random_.chance(5))
                    (void)shutdown(socket, std::array{SHUT_RD, SHUT_WR, SHUT_RDWR}[random_.below(3)]);
        }
    }

    const Run run_;
    Random random_;
    const std::vector<int> sockets_;
    std::atomic<bool> stop_{false};
    std::thread thread_;
};

/// Some communicators in turn, on one rank.
void some_runs(int rank, int size, int port, uint64_t seed) {
    for (uint64_t number = 0; number < runs_per_fork; ++number) {
        Run run;
        run.seed = seed * runs_per_fork + number;
        Random random(run.seed);
        run.size = size;
        run.broken = static_cast<int>(random.below(static_cast<size_t>(size)));
        run.own_only = run.broken != 0;
        run.timeout = 0.5;
        CommunicatorOptions options = options_of(rank, size);
        options.domain = "run" + std::to_string(run.seed);
        options.job = job;
        options.check = random.chance(50);
        const auto communicator = connect_hosts(options, port);
        {
            std::optional<Vandal> vandal;
            try {
                barrier(*communicator);
                if (rank == run.broken) vandal.emplace(run);
            } catch (const Error& error) {
                tally->errors.fetch_add(1);  // the broken rank has gone ahead
            }
            make_calls(run, *communicator, random, most_operators);
        }
        leave(*communicator);
    }
}

/// The exit status of a process in a namespace of its own, which its parent, the first there, cannot leave by a signal.
int status_on_a_host(const std::function<void()>& body) {
    (void)unshare(CLONE_NEWPID);
    return wait_for(spawn("host", [&] { std::_Exit(wait_for(spawn("rank", body))); }));
}

/// Below those that the kernel gives to whoever connects.
int free_port_by(uint64_t seed) {
    for (int port = 20'000 + static_cast<int>(seed % 12'000);; ++port) {
        try {
            const UniqueFd here = listen_tcp(port);
            if (here) return port;
        } catch (const Error&) {  // in use
        }
    }
}

int fork_runs(uint64_t seed) {
    const int size = Random(seed).chance(40) ? 2 : 3;
    const int port = free_port_by(seed);
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < size; ++rank)
        ranks.push_back(spawn(
            "launcher", [&, rank] { std::_Exit(status_on_a_host([&, rank] { some_runs(rank, size, port, seed); })); }));
    int bad = 0;
    for (const pid_t rank : ranks) bad = std::max(bad, wait_for(rank));
    if (bad != 0)
        std::fprintf(stderr, "fork %llu, %d ranks: exit status %d\n", static_cast<unsigned long long>(seed), size, bad);
    return bad;
}

}  // namespace

int main(int argc, char** argv) {
    // The address sanitizer's search for leaks, at exit, would not end in a new namespace.
    if (wait_for(spawn("trial", [] { std::_Exit(unshare(CLONE_NEWPID) == 0 ? 0 : 1); })) != 0)
        std::printf("no namespaces of processes can be made here: all ranks are on one host\n");
    return run_broken(argc, argv, UNDER_SANITIZER ? 10 : 30, runs_per_fork, fork_runs);
}
