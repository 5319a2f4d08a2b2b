// Random calls of a communicator of which one rank is broken: what the tests with such peers share.
#pragma once

#include <sys/mman.h>

#include <functional>
#include <string>

#include "exchange_plan.h"

namespace testing {

inline constexpr double slack = 10;  // seconds beyond a timeout, on a machine that is busy

/// Of all processes.
struct Tally {
    std::atomic<uint64_t> runs, operators, errors, strikes, late, wrong;
};
inline Tally* tally;

struct Run {
    int size = 2, broken = 0;
    bool own_only = false, flips = false;
    double timeout = 0.1;
    uint64_t seed = 0;
};

/// Regions from healthy ranks to a healthy one.
inline void compare(const Run& run, const Plan& plan, int rank, const char* output) {
    const auto r = static_cast<size_t>(rank);
    for (size_t j = 0; j < plan.ranks(); ++j) {
        const std::vector<char> sent = sent_bytes(plan, j, r);
        if (static_cast<int>(j) == run.broken ||
            std::equal(sent.begin(), sent.end(), output + static_cast<size_t>(plan.rdispls[r][j]) * plan.element()))
            continue;
        tally->wrong.fetch_add(1);
        std::fprintf(stderr, "run %llu: wrong bytes from rank %zu to rank %d\n",
                     static_cast<unsigned long long>(run.seed), j, rank);
    }
}

inline void exchange(const Run& run, Communicator& communicator, Random& random) {
    constexpr size_t lengths[] = {3, 200, 200, 3000, 20000};
    const Plan plan = random_plan(run.size, random.next(), lengths[random.below(std::size(lengths))]);
    const int rank = communicator.rank();
    Random own(random.next() + static_cast<uint64_t>(rank));
    const bool learns = random.chance(20), input_shared = own.chance(50);
    Attempt attempt(plan, rank, input_shared, own.chance(50));
    std::vector<char> learnt;
    if (learns) {
        attempt.exchange.recv_counts = attempt.exchange.rdispls = {};
        attempt.exchange.allocate = [&](std::span<const int64_t> counts) -> void* {
            const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
            if (total > 1 << 24) throw invalid_param(1000, "more than this rank has");
            learnt.resize(static_cast<size_t>(total) * plan.element());
            return learnt.data();
        };
    }
    try {
        communicator.exchange(attempt.exchange, run.timeout);
    } catch (const Error&) {
        std::memset(attempt.input.data(), 0xee, attempt.input.size());  // the caller has it again
        throw;
    }
    if (run.own_only && !learns && rank != run.broken) compare(run, plan, rank, attempt.output.data());
}

inline void reduce(const Run& run, Communicator& communicator, Random& random) {
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

inline void quantized(const Run& run, Communicator& communicator, Random& random) {
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

inline void message(const Run& run, Communicator& communicator, Random& random) {
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

inline void one_operator(const Run& run, Communicator& communicator, uint64_t seed) {
    Random random(seed);
    const size_t kind = random.below(12);
    const auto begun = Clock::now();
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
            communicator.fail(OpKind::barrier, invalid_param(1000, "as it should"));
        else
            barrier(communicator);
    } catch (const Error& error) {
        tally->errors.fetch_add(1);
    }
    tally->operators.fetch_add(1);
    if (seconds_since(begun) > run.timeout + slack) tally->late.fetch_add(1);
}

/// Random calls as long as the communicator is usable.
inline void make_calls(const Run& run, Communicator& communicator, Random& random, int most) {
    for (int i = 0; i < most && communicator.usable(); ++i) one_operator(run, communicator, random.next());
}

/// Leaves, which must not take long.
inline void leave(Communicator& communicator) {
    const auto begun = Clock::now();
    communicator.destroy();
    if (seconds_since(begun) > slack) tally->late.fetch_add(1);
    if (communicator.rank() == 0) tally->runs.fetch_add(1);
}

/// `runs` runs, by some in processes of their own, so that a crash is counted and the next ones go on: `fork_runs`
/// makes the runs of a number, says its exit status, and is made again with `--fork NUMBER`. For `return` from main.
inline int run_broken(int argc, char** argv, uint64_t runs, uint64_t runs_per_fork,
                      const std::function<int(uint64_t)>& fork_runs) {
    uint64_t seed = 1, number = 0;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string option = argv[i];
        (option == "--runs" ? runs : option == "--fork" ? number : seed) = std::strtoull(argv[i + 1], nullptr, 10);
    }
    tally = new (mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Tally{};
    uint64_t crashes = 0, hangs = 0, other = 0;
    for (uint64_t done = 0; done < runs; done += runs_per_fork) {
        const int status = fork_runs(number > 0 ? number : seed * 1'000'003 + done / runs_per_fork);
        (status == 128 + SIGALRM ? hangs : status > 128 ? crashes : other) += status != 0 ? 1 : 0;
    }
    hangs += tally->late;
    const auto said = [](uint64_t n) { return std::to_string(n); };
    std::printf("%s runs, %s calls, %s errors, %s strikes: %s crashes, %s hangs, %s wrong, %s other\n",
                said(tally->runs).c_str(), said(tally->operators).c_str(), said(tally->errors).c_str(),
                said(tally->strikes).c_str(), said(crashes).c_str(), said(hangs).c_str(), said(tally->wrong).c_str(),
                said(other).c_str());
    return crashes + hangs + tally->wrong + other == 0 ? 0 : 1;
}

}  // namespace testing
