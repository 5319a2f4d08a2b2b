// A peer that changes its row after one rank has compared it and before another has: the first refuses the
// operator, the other agrees, and neither may read or write what the first has given back to its caller.
#include <signal.h>
#include <sys/mman.h>

#include "control_segment.h"
#include "exchange_plan.h"

using namespace alltoallv;
using namespace testing;

namespace {

constexpr int size = 3, agrees = 0, refuses = 1, broken = 2;
constexpr uint64_t the_operator = 2;  // behind a barrier
constexpr size_t bytes = size_t{1} << 20;
constexpr char given_back = 0x3c;

/// Of all processes.
struct Stage {
    std::atomic<bool> row_is_changed{false}, has_raised{false};
};

/// `agrees` stands still while `refuses` compares the rows.
void change_row(const Layout& layout, char* base, Stage& stage) {
    const auto has_row = [&](int rank) { return layout.row(base, rank, the_operator).seq.load() == the_operator; };
    eventually([&] { return has_row(agrees) && has_row(broken); });
    const auto pid = static_cast<pid_t>(layout.status(base, agrees).pid.load());
    kill(pid, SIGSTOP);
    eventually([&] { return state_of(pid) == 'T'; });
    Row& row = layout.row(base, broken, the_operator);
    row.flags = row_failed;
    stage.row_is_changed = true;
    eventually([&] { return stage.has_raised || layout.flags(base, refuses).refused.value.load() == the_operator; });
    row.flags = 0;
    kill(pid, SIGCONT);
}

/// One of the two healthy ranks gives the other a megabyte.
void exchange(const std::string& path, int from, int to) {
    auto* const stage =
        new (mmap(nullptr, sizeof(Stage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Stage;
    Plan plan;
    plan.send = plan.recv = plan.sdispls = plan.rdispls = Matrix(size, std::vector<int64_t>(size));
    plan.send[static_cast<size_t>(from)][static_cast<size_t>(to)] = bytes;
    plan.recv[static_cast<size_t>(to)][static_cast<size_t>(from)] = bytes;
    plan.input_length = plan.output_length = std::vector<int64_t>(size, bytes);
    all_pass(run_processes(size, [&](int rank) {
        const CommunicatorOptions options = options_of(processes, rank, size, path);
        const CommunicatorPtr communicator = make_shm_communicator(options);
        barrier(*communicator);
        const bool shared = path != "cma";
        const Attempt attempt(plan, rank, shared && rank == from, shared && rank == to);
        if (rank == broken) {
            const Layout layout(size, options.mailbox_bytes());
            std::thread changes([&, base = control_segments().begin()->second] { change_row(layout, base, *stage); });
            try {
                communicator->exchange(attempt.exchange, -1);
            } catch (const Error&) {  // it also reads its own row
            }
            return changes.join();
        }
        if (rank == refuses) eventually([&] { return stage->row_is_changed.load(); });
        fails(ErrorClass::peer_lost, "the ranks disagree on the outcome of operator #2 all_to_all_v", [&] {
            try {
                communicator->exchange(attempt.exchange, -1);
            } catch (const Error&) {
                std::memset(attempt.input.data(), given_back, bytes);
                std::memset(attempt.output.data(), given_back, bytes);
                stage->has_raised = true;
                throw;
            }
        });
        usleep(100'000);  // a late writer would have come by now
        CHECK(
            std::all_of(attempt.output.data(), attempt.output.data() + bytes, [](char c) { return c == given_back; }));
    }));
    munmap(stage, sizeof(Stage));
}

TEST(read_by_a_system_call) {
    exchange("cma", refuses, agrees);
}

TEST(read_in_the_arena) {
    exchange("pull", refuses, agrees);
}

TEST(written_to) {
    exchange("push", agrees, refuses);
}

/// A failure that comes and goes is there when a rank looks for one, and not any more when it looks whose it is.
TEST(changed_without_rest) {
    auto* const through =
        new (mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) std::atomic<int>{0};
    all_pass(run_processes(2, [&](int rank) {
        for (int turn = 0; turn < 100; ++turn) {
            CommunicatorOptions options = options_of(processes, rank, 2, "auto");
            options.domain = "restless" + std::to_string(turn);
            const auto before = control_segments();
            const CommunicatorPtr communicator = make_shm_communicator(options);
            barrier(*communicator);
            if (rank == 0) {
                try {
                    barrier(*communicator);
                } catch (const Error& error) {
                    CHECK(std::string(error.what()).find("rank -1") == std::string::npos);
                }
                ++*through;
            } else {
                auto segments = control_segments();
                std::erase_if(segments, [&](const auto& segment) { return before.contains(segment.first); });
                const Layout layout(2, options.mailbox_bytes());
                char* const base = segments.begin()->second;
                Row& row = layout.row(base, rank, the_operator);
                layout.flags(base, rank).done.value = layout.flags(base, rank).refused.value = the_operator;
                row.seq = the_operator;
                for (auto* const flags = reinterpret_cast<volatile uint8_t*>(&row.flags); *through == turn;)
                    *flags = *flags ^ row_failed;
            }
            communicator->destroy();
        }
    }));
    munmap(through, sizeof *through);
}

}  // namespace
