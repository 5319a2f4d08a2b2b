/// \file broken_peer_test.cpp
/// \brief A peer that writes random bytes wherever others read: they may get errors, but neither crash nor wait for
/// longer than the timeout, nor get wrong bytes from one another.
///
/// `broken_peer_test --runs 20000 --seed 1` goes on for longer. A run is a communicator of 2 or 3 ranks that make
/// random calls while a thread of one of them strikes at the control segment and, between processes, at the sockets.
/// What only that rank writes is struck in one half of the runs, where what healthy ranks get from one another is
/// compared; everything in the other.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "control/deadlock.h"
#include "control_segment.h"
#include "exchange_plan.h"

using namespace alltoallv;
using namespace testing;

namespace {

constexpr double slack = 10;  // seconds beyond a timeout, on a machine that is busy
constexpr int runs_per_fork = 20, most_operators = 10;

/// Of all processes.
struct Tally {
    std::atomic<uint64_t> runs, operators, errors, strikes, late, wrong;
};
Tally* tally;

struct Run {
    int size = 2, broken = 0;
    bool own_only = false, flips = false;
    double timeout = 0.1;
    uint64_t seed = 0;
};

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
            case 5:
                return hit_in(layout_.payload(layout_.row(base_, writer(), random_.below(2))), 1024);
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

/// Regions from healthy ranks to a healthy one.
void compare(const Run& run, const Plan& plan, int rank, const char* output) {
    const size_t element = plan.element(), r = static_cast<size_t>(rank);
    std::vector<char> sent;
    for (size_t j = 0; j < plan.ranks(); ++j) {
        if (static_cast<int>(j) == run.broken) continue;
        sent.resize(static_cast<size_t>(plan.input_length[j]) * element);
        fill(sent.data(), sent.size(), plan.seed, static_cast<int>(j));
        if (std::memcmp(output + static_cast<size_t>(plan.rdispls[r][j]) * element,
                        sent.data() + static_cast<size_t>(plan.sdispls[j][r]) * element,
                        static_cast<size_t>(plan.recv[r][j]) * element) == 0)
            continue;
        tally->wrong.fetch_add(1);
        std::fprintf(stderr, "run %llu: wrong bytes from rank %zu to rank %d\n",
                     static_cast<unsigned long long>(run.seed), j, rank);
    }
}

void exchange(const Run& run, Communicator& communicator, Random& random) {
    constexpr size_t lengths[] = {3, 200, 200, 3000, 20000};
    Plan plan = random_plan(run.size, random.next(), lengths[random.below(std::size(lengths))]);
    Random own(random.next() + static_cast<uint64_t>(communicator.rank()));
    const bool learns = random.chance(20);
    const int rank = communicator.rank();
    const auto r = static_cast<size_t>(rank);
    const Buffer input(static_cast<size_t>(plan.input_length[r]) * plan.element(), own.chance(50));
    Buffer output(static_cast<size_t>(plan.output_length[r]) * plan.element(), own.chance(50));
    fill(input.data(), input.size(), plan.seed, rank);
    Exchange x = exchange_of(plan, rank, input, output);
    std::vector<char> learnt;
    if (learns) {
        x.recv_counts = x.rdispls = {};
        x.allocate = [&](std::span<const int64_t> counts) -> void* {
            const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
            if (total > 1 << 24) throw invalid_param("more than this rank has");
            learnt.resize(static_cast<size_t>(total) * plan.element());
            return learnt.data();
        };
    }
    try {
        communicator.exchange(x, run.timeout);
    } catch (const Error&) {
        std::memset(input.data(), 0xee, input.size());  // the caller has it again
        throw;
    }
    if (run.own_only && !learns && rank != run.broken) compare(run, plan, rank, output.data());
}

void reduce(const Run& run, Communicator& communicator, Random& random) {
    constexpr int64_t lengths[] = {1, 100, 5000, 60000, 300000};
    constexpr OpKind ops[] = {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::reduce};
    constexpr DType dtypes[] = {DType::float32, DType::int64, DType::bool_, DType::bfloat16};
    const auto ranks = static_cast<size_t>(run.size);
    std::vector<int64_t> counts(ranks);
    Reduction r;
    r.op = ops[random.below(3)];
    r.dtype = dtypes[random.below(4)];
    r.reduce_op = std::array{ReduceOp::sum, ReduceOp::max, ReduceOp::prod}[random.below(3)];
    const int64_t total = lengths[random.below(std::size(lengths))];
    counts[random.below(ranks)] = total;
    r.counts = counts;
    const bool shared = random.chance(50);
    const Buffer input(static_cast<size_t>(total) * size_of(r.dtype), shared);
    const Buffer output(input.size(), shared);
    std::memset(input.data(), 1, input.size());
    r.input = input.data();
    r.output = output.data();
    communicator.reduce(r, run.timeout);
}

void quantized(const Run& run, Communicator& communicator, Random& random) {
    constexpr int64_t lengths[] = {100, 3000, 60000, 500000};
    constexpr CodeFormat formats[] = {CodeFormat::int8, CodeFormat::int4, CodeFormat::fp8_e4m3};
    const int64_t total = lengths[random.below(std::size(lengths))];
    const float scale = 0.5f;
    QuantReduction q;
    q.counts = {&total, 1};
    const bool shared_scale = random.chance(30), shared = random.chance(50);
    const Buffer input(static_cast<size_t>(total) * 4, shared), output(static_cast<size_t>(total) * 4, shared);
    std::memset(input.data(), 1, input.size());
    q.input = input.data();
    q.output = output.data();
    if (shared_scale) {
        q.mode = QuantMode::shared_scale;
        q.dtype = DType::int8;
        q.scale = {&scale, 1};
    } else {
        q.format = formats[random.below(3)];
        q.group_size = random.chance(20) ? 400000 : 128;
        q.requantizes = random.chance(50);
        q.overflow = random.chance(50) ? Overflow::raise : Overflow::saturate;
    }
    communicator.quant_reduce(q, run.timeout);
}

void message(const Run& run, Communicator& communicator, Random& random) {
    constexpr int64_t lengths[] = {0, 10, 3000, 200000};
    const auto ranks = static_cast<size_t>(run.size);
    const size_t from = random.below(ranks), to = (from + 1 + random.below(ranks - 1)) % ranks;
    PeerMessage m;
    m.count = lengths[random.below(4)];
    Buffer data(static_cast<size_t>(m.count), random.chance(50));
    m.data = data.data();
    const auto rank = static_cast<size_t>(communicator.rank());
    if (rank != from && rank != to) return;
    m.op = rank == from ? OpKind::send : OpKind::recv;
    m.peer = static_cast<int>(rank == from ? to : from);
    if (rank == from) fill(data.data(), data.size(), run.seed, m.peer);
    communicator.post(m, run.timeout, true)->wait(-1);
}

void one_operator(const Run& run, Communicator& communicator, uint64_t seed) {
    Random random(seed);
    const size_t kind = random.below(12);
    const auto begun = std::chrono::steady_clock::now();
    try {
        if (kind < 5)
            exchange(run, communicator, random);
        else if (kind < 7)
            reduce(run, communicator, random);
        else if (kind < 9)
            quantized(run, communicator, random);
        else if (kind < 11)
            message(run, communicator, random);
        else if (static_cast<size_t>(communicator.rank()) == random.below(static_cast<size_t>(run.size)))
            communicator.fail(OpKind::barrier, invalid_param("as it should"));
        else
            barrier(communicator);
    } catch (const Error& error) {
        tally->errors.fetch_add(1);
    }
    tally->operators.fetch_add(1);
    if (seconds_since(begun) > run.timeout + slack) tally->late.fetch_add(1);
}

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
        run.flips = run.own_only && random.chance(20);
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
            for (int i = 0; i < most_operators && communicator->usable(); ++i)
                one_operator(run, *communicator, random.next());
            (void)communicator->flight_record();
        }
        const auto begun = std::chrono::steady_clock::now();
        communicator->destroy();
        if (seconds_since(begun) > slack) tally->late.fetch_add(1);
        if (rank == 0) tally->runs.fetch_add(1);
    }
}

/// In a process of their own, so that a crash is counted and the next ones go on. Returns what is wrong.
int fork_runs(uint64_t seed) {
    Random random(seed);
    const Mode& mode = random.chance(70) ? processes : threads;
    const int size = random.chance(50) ? 2 : 3;
    const auto body = [&](int rank) {
        const uint64_t caller = Waiting::this_thread();
        hooks().poll = [caller] {
            if (Waiting::this_thread() == caller && Deadlocks::instance().due()) Deadlocks::instance().look({caller});
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
    uint64_t runs = UNDER_SANITIZER ? 40 : 100, seed = 1;
    for (int i = 1; i + 1 < argc; i += 2)
        (std::string(argv[i]) == "--runs" ? runs : seed) = std::strtoull(argv[i + 1], nullptr, 10);
    tally = new (mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Tally{};
    uint64_t crashes = 0, hangs = 0, other = 0;
    for (uint64_t done = 0; done < runs; done += runs_per_fork) {
        const int status = fork_runs(seed * 1'000'003 + done / runs_per_fork);
        if (status == 128 + SIGALRM)
            ++hangs;
        else if (status > 128)
            ++crashes;
        else if (status != 0)
            ++other;
    }
    std::printf("%llu runs, %llu calls, %llu errors, %llu strikes: ", static_cast<unsigned long long>(tally->runs),
                static_cast<unsigned long long>(tally->operators), static_cast<unsigned long long>(tally->errors),
                static_cast<unsigned long long>(tally->strikes));
    hangs += tally->late;
    std::printf("%llu crashes, %llu hangs, %llu wrong, %llu other\n", static_cast<unsigned long long>(crashes),
                static_cast<unsigned long long>(hangs), static_cast<unsigned long long>(tally->wrong),
                static_cast<unsigned long long>(other));
    return crashes + hangs + tally->wrong + other == 0 ? 0 : 1;
}
