// What goes wrong between ranks: disagreement, loss, lateness, abort. Everyone hears of it in time, nothing is
// written where it must not be, and the next operator or communicator works; 2 and 4 ranks.
#include <signal.h>

#include "exchange_plan.h"

using namespace alltoallv;
using namespace testing;

namespace {

constexpr double soon = 5;  // seconds; with sanitizers and emulation

CommunicatorPtr communicator_of(const Mode& mode, int rank, int size, double timeout = 100) {
    CommunicatorOptions options = options_of(mode, rank, size);
    options.timeout = timeout;
    return make_shm_communicator(options);
}

/// Every rank sends `length` elements to every rank, packed.
Plan dense(int size, size_t length) {
    const auto n = static_cast<size_t>(size);
    Plan plan;
    plan.dtype = DType::float32;
    plan.send = plan.recv = Matrix(n, std::vector<int64_t>(n, static_cast<int64_t>(length)));
    std::vector<int64_t> packed(n);
    for (size_t j = 0; j < n; ++j) packed[j] = static_cast<int64_t>(j * length);
    plan.sdispls = plan.rdispls = Matrix(n, packed);
    plan.input_length = plan.output_length = std::vector<int64_t>(n, static_cast<int64_t>(n * length));
    return plan;
}

/// Every disagreement that agreement finds: the same error on all ranks, no output byte written, then business as
/// usual.
TEST(disagreements, const Mode& mode, int size) {
    struct Case {
        const char* message;
        void (*spoil)(Attempt&);
    };
    static const Case cases[] = {
        {"sends 101 elements to rank 0, which expects 100",
         [](Attempt& a) { a.plan.send.back().front() = 101, a.exchange.send_counts = a.plan.send.back(); }},
        {"has dtype float32, rank ", [](Attempt& a) { a.exchange.dtype = DType::int32; }},
        {"calls all_to_all_v, rank ", [](Attempt& a) { a.exchange.op = OpKind::all_to_all; }},
        {"moves no tokens, rank ", [](Attempt& a) { a.exchange.root = 1; }},
    };
    all_pass(mode.run(size, [&](int rank) {
        const CommunicatorPtr communicator = communicator_of(mode, rank, size);
        uint64_t number = 0;
        for (const Case& c : cases) {
            for (const bool shared : {false, true}) {
                Attempt attempt(dense(size, 100), rank, shared, shared);
                if (rank == size - 1) c.spoil(attempt);
                ++number;
                fails(ErrorClass::peer_mismatch, c.message, [&] { communicator->exchange(attempt.exchange, -1); });
                CHECK(attempt.output_untouched());
                CHECK(communicator->usable());
            }
        }
        // A rank that fails its own checks: the others raise its error, without waiting for it any longer.
        for (const size_t longest : {size_t{100}, size_t{20000}}) {
            const Attempt attempt(dense(size, longest), rank, longest > 100, longest > 100);
            ++number;
            if (rank == 0) {
                communicator->fail(OpKind::all_to_all_v, invalid_tensor(ErrorType::INVALID_TENSOR_DIM, "x is empty"));
            } else {
                fails(ErrorClass::invalid_tensor,
                      "operator #" + std::to_string(number) +
                          " all_to_all_v of domain 'selftest' failed on rank 0: " + "x is empty",
                      [&] { communicator->exchange(attempt.exchange, -1); });
            }
            CHECK(attempt.output_untouched());
        }
        run_plan(*communicator, random_plan(size, 3, 5000), true, true);
        run_plan(*communicator, random_plan(size, 4, 50), false, false);
    }));
}

/// A rank that comes too late finds the error that the others have had meanwhile.
TEST(lateness, const Mode& mode, int size) {
    all_pass(mode.run(size, [&](int rank) {
        CommunicatorPtr communicator = communicator_of(mode, rank, size, 0.5);
        const Attempt attempt(dense(size, 1000), rank, true, true);
        const auto start = Clock::now();
        const bool late = rank == size - 1;
        if (late) std::this_thread::sleep_for(std::chrono::milliseconds(900));
        fails(ErrorClass::comm_timeout, "rank " + std::to_string(size - 1) + " (pid ",
              [&] { communicator->exchange(attempt.exchange, -1); });
        CHECK(seconds_since(start) < 0.5 + soon);  // the first to have waited so long ends all waits
        CHECK(attempt.output_untouched());
        CHECK(!communicator->usable());
        fails(ErrorClass::comm_timeout, " s in operator #1 ", [&] { barrier(*communicator); });
        communicator->destroy();
        communicator = communicator_of(mode, rank, size);
        run_plan(*communicator, random_plan(size, 5, 5000), true, true);
    }));
}

/// One rank gives up from another thread while the others wait.
TEST(aborts, const Mode& mode, int size) {
    all_pass(mode.run(size, [&](int rank) {
        CommunicatorPtr communicator = communicator_of(mode, rank, size);
        barrier(*communicator);
        const auto start = Clock::now();
        if (rank == 0) {
            std::thread([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(50));
                communicator->abort("enough");
            }).join();
        }
        fails(ErrorClass::peer_lost, "rank 0 aborted: enough", [&] { barrier(*communicator); });
        CHECK(seconds_since(start) < soon);
        communicator.reset();
        communicator = communicator_of(mode, rank, size);
        run_plan(*communicator, random_plan(size, 6, 5000), false, true);
    }));
}

/// A rank that leaves in good order is missed by name.
TEST(departure, const Mode& mode, int size) {
    all_pass(mode.run(size, [&](int rank) {
        const CommunicatorPtr communicator = communicator_of(mode, rank, size);
        barrier(*communicator);
        if (rank == 0) {
            communicator->destroy();
            return;
        }
        const auto start = Clock::now();
        fails(ErrorClass::peer_lost, "rank 0 ", [&] { barrier(*communicator); });
        CHECK(seconds_since(start) < soon);
    }));
}

/// Runs ranks of which the last kills itself through `body`; the others must end well.
void with_victim(int size, const Body& body) {
    std::vector<int> statuses = run_processes(size, body);
    CHECK_EQ(statuses.back(), 128 + SIGKILL);
    statuses.pop_back();
    all_pass(statuses);
}

/// Memory that a dead peer might have written to comes back, at the latest when the arena is used again.
void quarantine_ends() {
    const auto start = Clock::now();
    do {
        CHECK(seconds_since(start) < soon);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const Block next_use = Arena::instance().allocate(1);
    } while (Arena::instance().stats().quarantined_bytes > 0);
}

/// SIGKILL before an exchange, while the others wait for it, and in the middle of one.
void kill_one(int size, const std::string& path, int delay_us) {
    with_victim(size, [&](int rank) {
        CommunicatorOptions options = options_of(processes, rank, size, path);
        CommunicatorPtr communicator = make_shm_communicator(options);
        const bool shared = path == "push";
        std::optional<Attempt> attempt(std::in_place, dense(size, 300000), rank, shared, shared);
        Clock::time_point start = Clock::now();
        if (rank == size - 1) {
            barrier(*communicator);
            if (delay_us == 0) kill(getpid(), SIGKILL);
            std::thread([&] {
                std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
                kill(getpid(), SIGKILL);
            }).detach();
            for (;;) communicator->exchange(attempt->exchange, -1);
        }
        fails(ErrorClass::peer_lost, "rank " + std::to_string(size - 1), [&] {
            barrier(*communicator);
            for (;;) {
                start = Clock::now();
                communicator->exchange(attempt->exchange, -1);
            }
        });
        CHECK(seconds_since(start) < soon);
        communicator.reset();
        attempt.reset();
        quarantine_ends();
        if (size == 2) return;
        options.size = size - 1;  // those that are left go on
        communicator = make_shm_communicator(options);
        run_plan(*communicator, random_plan(size - 1, 8, 20000), true, true);
    });
}

TEST(killed) {
    for (const int size : {2, 4})
        for (const char* path : {"push", "cma", "staged"})
            for (const int delay_us : {0, 300, 5000}) kill_one(size, path, delay_us);
}

/// A child inherits what it cannot use; the parent goes on.
TEST(forked) {
    for (const int size : {2, 4})
        all_pass(run_processes(size, [&](int rank) {
            CommunicatorPtr communicator = communicator_of(processes, rank, size);
            const auto call = [&] { run_plan(*communicator, random_plan(size, 9, 3000), true, true); };
            const WorkPtr work = communicator->submit(call);  // by a thread that does not exist in the child
            CHECK(work->wait(100));
            const pid_t child = spawn("child", [&] {
                CHECK(!communicator->usable());
                fails(ErrorClass::backend_unavailable, "was made before fork", [&] { barrier(*communicator); });
                communicator->abort("not the child's to say");
                communicator->destroy();
                communicator.reset();
            });
            CHECK_EQ(wait_for(child), 0);
            run_plan(*communicator, random_plan(size, 10, 3000), true, true);
        }));
}

}  // namespace
