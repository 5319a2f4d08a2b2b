// The shared-memory transport without Python: exchanges over every data path, learnt counts, reductions,
// several domains at once; 2 and 4 ranks, as processes and as threads.
#include "exchange_plan.h"

using namespace alltoallv;
using namespace testing;

namespace {

/// Where the buffers must lie for a path to serve.
struct PathCase {
    const char* path;
    bool input_shared, output_shared;
    size_t longest;  // elements per pair
    int rounds;
};

// The rings hold 256 KiB, inline payloads 16 KiB; the longest elements have 16 bytes.
constexpr PathCase path_cases[] = {
    {"inline", false, false, 200, 60}, {"inline", true, true, 200, 20}, {"push", false, true, 200, 20},
    {"push", true, true, 30000, 6},    {"pull", true, false, 200, 20},  {"pull", true, false, 30000, 6},
    {"cma", false, false, 200, 20},    {"cma", false, false, 30000, 6}, {"staged", false, false, 200, 20},
    {"staged", true, true, 60000, 6},
};

CommunicatorPtr communicator_of(const Mode& mode, int rank, int size, const std::string& path = "auto") {
    return make_shm_communicator(options_of(mode, rank, size, path));
}

constexpr const char* paths[] = {"inline", "push", "pull", "cma", "staged"};

/// Bytes that came or went over `path` must be the plans' bytes, and no other path may have carried any.
void check_stats(const Communicator& communicator, const std::string& path, size_t bytes) {
    const Stats stats = communicator.stats();
    for (const std::string name : paths) CHECK_EQ(stats.at("bytes_" + name), name == path ? bytes : 0);
}

void one_path(const Mode& mode, int size, const PathCase& c) {
    all_pass(mode.run(size, [&](int rank) {
        const CommunicatorPtr communicator = communicator_of(mode, rank, size, c.path);
        std::string carries = c.path;
        if (carries == "cma" && communicator->stats().at("cma_permitted") == 0) {
            if (rank == 0) std::printf("  process_vm_readv is not available here: staged instead of cma\n");
            carries = "staged";
        }
        size_t bytes = 0;
        for (int round = 0; round < c.rounds; ++round) {
            const Plan plan = random_plan(size, static_cast<uint64_t>(1000 * size + round) + c.longest, c.longest);
            run_plan(*communicator, plan, c.input_shared, c.output_shared);
            run_learning(*communicator, plan, c.input_shared, c.output_shared);
            bytes += 2 * (carries == "push" ? plan.bytes_sent(rank) : plan.bytes_received(rank));
        }
        check_stats(*communicator, carries, bytes);
        communicator->destroy();
    }));
}

TEST(every_path, const Mode& mode, int size) {
    for (const PathCase& c : path_cases) one_path(mode, size, c);
}

/// Each rank has its buffers where it likes; sizes mixed: every path at once, each byte counted exactly once.
TEST(mixed, const Mode& mode, int size) {
    all_pass(mode.run(size, [&](int rank) {
        const CommunicatorPtr communicator = communicator_of(mode, rank, size);
        int64_t moved = 0, counted = 0;
        for (int round = 0; round < 60; ++round) {
            const Plan plan = random_plan(size, static_cast<uint64_t>(round), round % 6 == 0 ? 20000 : 300);
            Random places(static_cast<uint64_t>(round * size + rank));
            run_plan(*communicator, plan, places.chance(50), places.chance(50));
            moved += static_cast<int64_t>(plan.bytes_received(rank));
        }
        const Stats stats = communicator->stats();
        for (const char* name : paths) counted += static_cast<int64_t>(stats.at(std::string("bytes_") + name));
        const int64_t own_values[] = {moved, counted}, parts[4] = {2, 0, 0, 0};
        int64_t all[2] = {};
        Reduction reduction;
        reduction.dtype = DType::int64;
        reduction.input = own_values;
        reduction.output = all;
        reduction.counts = std::span(parts, static_cast<size_t>(size));
        communicator->reduce(reduction, -1);
        CHECK_EQ(all[1], all[0]);
        CHECK_EQ(stats.at("operators"), uint64_t{60});
    }));
}

/// Beyond the caches, where the copies use streaming stores; with threads that help, on however few processors.
TEST(streaming, const Mode& mode) {
    all_pass(mode.run(2, [&](int rank) {
        CommunicatorOptions options = options_of(mode, rank, 2, "push");
        options.copy_threads = 3;
        const CommunicatorPtr communicator = make_shm_communicator(options);
        Plan plan;
        plan.seed = 7;
        plan.send = {{0, 33554432}, {33554445, 3}};
        plan.recv = {{0, 33554445}, {33554432, 3}};
        plan.sdispls = {{0, 0}, {1, 33554446}};
        plan.rdispls = {{5, 5}, {3, 0}};
        plan.input_length = {33554432, 33554449};
        plan.output_length = {33554450, 33554436};
        run_plan(*communicator, plan, false, true);
        check_stats(*communicator, "push", plan.bytes_sent(rank));
    }));
}

/// What rank `sender` contributes at `index`: small, so that sums are exact in every type here.
int element_value(int sender, size_t index) {
    return static_cast<int>(mix(index * 8 + static_cast<uint64_t>(sender)) % 7) + 1;
}

template <class T>
void check_reduction(Communicator& communicator, DType dtype, OpKind op, ReduceOp reduce_op,
                     const std::vector<int64_t>& counts, bool shared) {
    const auto rank = static_cast<size_t>(communicator.rank());
    const auto total = static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0}));
    const bool scatters = op == OpKind::reduce_scatter;
    const auto first = static_cast<size_t>(
        std::accumulate(counts.begin(), counts.begin() + (scatters ? communicator.rank() : 0), int64_t{0}));
    const size_t length = scatters ? static_cast<size_t>(counts[rank]) : total;
    const Buffer input(total * sizeof(T), shared), output(length * sizeof(T), shared);
    for (size_t i = 0; i < total; ++i) input.as<T>()[i] = static_cast<T>(element_value(communicator.rank(), i));
    Reduction reduction;
    reduction.op = op;
    reduction.dtype = dtype;
    reduction.reduce_op = reduce_op;
    reduction.input = input.data();
    reduction.output = output.data();
    reduction.counts = counts;
    reduction.root = op == OpKind::reduce ? communicator.size() - 1 : 0;
    const bool has_result = op != OpKind::reduce || communicator.rank() == reduction.root;
    if (!has_result) reduction.output = nullptr;
    communicator.reduce(reduction, -1);
    for (size_t i = 0; has_result && i < length; ++i) {
        T expected = static_cast<T>(element_value(0, first + i));
        for (int j = 1; j < communicator.size(); ++j) {
            const T next = static_cast<T>(element_value(j, first + i));
            expected = reduce_op == ReduceOp::min    ? std::min(expected, next)
                       : reduce_op == ReduceOp::max  ? std::max(expected, next)
                       : reduce_op == ReduceOp::prod ? static_cast<T>(expected * next)
                                                     : static_cast<T>(expected + next);
        }
        if (reduce_op == ReduceOp::avg) expected = static_cast<T>(expected / static_cast<T>(communicator.size()));
        if (output.as<T>()[i] != expected)
            throw std::runtime_error(std::string(name_of(op)) + " " + std::string(name_of(reduce_op)) + " of " +
                                     std::string(name_of(dtype)) + ": element " + std::to_string(i) + " of " +
                                     std::to_string(length) + " is " + std::to_string(output.as<T>()[i]) +
                                     ", expected " + std::to_string(expected));
    }
}

TEST(reductions, const Mode& mode, int size) {
    all_pass(mode.run(size, [&](int rank) {
        const CommunicatorPtr communicator = communicator_of(mode, rank, size);
        const auto n = static_cast<size_t>(size);
        // Nothing, little enough for the mailboxes, and parts of several pieces of scratch; one rank without a part.
        for (const int64_t length : {0, 1, 501, 60001}) {
            std::vector<int64_t> counts(n, length);
            counts[1] = length == 501 ? 0 : length + 3;
            for (const bool shared : {false, true})
                for (const OpKind op : {OpKind::all_reduce, OpKind::reduce_scatter, OpKind::reduce}) {
                    check_reduction<float>(*communicator, DType::float32, op, ReduceOp::sum, counts, shared);
                    check_reduction<double>(*communicator, DType::float64, op, ReduceOp::avg, counts, shared);
                    check_reduction<int32_t>(*communicator, DType::int32, op, ReduceOp::prod, counts, shared);
                    check_reduction<uint8_t>(*communicator, DType::uint8, op, ReduceOp::min, counts, shared);
                    check_reduction<int64_t>(*communicator, DType::int64, op, ReduceOp::max, counts, shared);
                }
        }
        const Stats stats = communicator->stats();
        CHECK(stats.at("bytes_inline") > 0 && stats.at("bytes_staged") > 0 && stats.at("bytes_pull") > 0);
        Reduction undefined;
        undefined.dtype = DType::int32;
        undefined.reduce_op = ReduceOp::avg;
        fails(ErrorClass::invalid_param, "'avg' is not defined for dtype int32",
              [&] { communicator->reduce(undefined, -1); });
        check_reduction<float>(*communicator, DType::float32, OpKind::all_reduce, ReduceOp::sum,
                               std::vector<int64_t>(n, 5), false);
    }));
}

/// Two domains whose calls the ranks issue in opposite orders, queued, with calls of this thread in between.
TEST(two_domains, const Mode& mode, int size) {
    all_pass(mode.run(size, [&](int rank) {
        CommunicatorOptions options = options_of(mode, rank, size);
        const CommunicatorPtr a = make_shm_communicator(options);
        options.domain = "another";
        const CommunicatorPtr b = make_shm_communicator(options);
        for (int round = 0; round < 10; ++round) {
            const auto seed = static_cast<uint64_t>(round);
            const auto call = [&](const CommunicatorPtr& communicator, uint64_t salt) {
                return communicator->submit([&communicator, seed, salt, size] {
                    run_plan(*communicator, random_plan(size, seed * 2 + salt, 3000), salt == 0, salt == 1);
                });
            };
            std::vector<WorkPtr> works;
            if ((rank + round) % 2 == 0) {
                works = {call(a, 0), call(b, 1)};
            } else {
                works = {call(b, 1), call(a, 0)};
            }
            run_plan(*a, random_plan(size, seed + 500, 300), false, false);
            for (const WorkPtr& work : works) CHECK(work->wait(100));
        }
        CHECK(!a->busy() && !b->busy());
    }));
}

}  // namespace
