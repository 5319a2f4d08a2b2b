// Several ranks on each of many hosts, which are process namespaces here and agree over a tree of TCP connections. With
// ALLTOALLV_MANY_RANKS=256, as `ctest -C slow` sets it, 256 processes on 64 hosts.
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "errors.h"
#include "exchange_plan.h"
#include "tcp_fixture.h"

using namespace alltoallv;
using namespace testing;

namespace {

constexpr int lost = 7;
constexpr double seconds = 120;
const bool slow = std::getenv("ALLTOALLV_MANY_RANKS") != nullptr;
const int ranks = slow ? std::atoi(std::getenv("ALLTOALLV_MANY_RANKS")) : 66;
const int per_host = slow ? 4 : 2;

/// Processes that this one starts from now on are in a namespace of their own.
bool enters_namespace() {
    return unshare(CLONE_NEWPID) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWPID) == 0;
}

/// The first process of a namespace takes all others with it, so it waits for them.
void run_host(int host, const Body& body, int victim) {
    int bad = 0;
    std::vector<pid_t> processes;
    for (int rank = host * per_host; rank < (host + 1) * per_host; ++rank)
        processes.push_back(spawn("rank " + std::to_string(rank), [&, rank] {
            body(rank);
            _exit(0);
        }));
    for (int k = 0; k < per_host; ++k)
        if (wait_for(processes[static_cast<size_t>(k)]) != (host * per_host + k == victim ? lost : 0)) bad = 1;
    _exit(bad);
}

void on_hosts(const Body& body, int victim = -1) {
    if (UNDER_SANITIZER) {
        std::printf("  NOT RUN: so many processes would take too long with a sanitizer; tcp_tree_test has 40\n");
        return;
    }
    if (wait_for(spawn("probe", [] { _exit(enters_namespace() ? 0 : 1); })) != 0) {
        std::printf("  NOT RUN: no process namespaces may be made here\n");
        return;
    }
    all_pass(run_processes(ranks / per_host, [&](int host) {
        CHECK(enters_namespace());
        _exit(wait_for(spawn("host " + std::to_string(host), [&] { run_host(host, body, victim); })));
    }));
}

CommunicatorPtr join(int rank, int port) {
    return make_tcp_communicator(options_of(rank, ranks, seconds), TcpAddress{"localhost", port});
}

void call(Communicator& comm, const Plan& plan) {
    run_plan(comm, plan, false, false);
}

TEST(calls_and_disagreements) {
    const int port = free_port();
    const Plan right = random_plan(ranks, 1, 1);
    Plan wrong = right;
    const auto from = static_cast<size_t>(ranks / 3), to = static_cast<size_t>(ranks - 5);
    ++wrong.recv[to][from];
    on_hosts([&](int rank) {
        const CommunicatorPtr comm = join(rank, port);
        for (int round = 0; round < 3; ++round) call(*comm, right);
        run_learning(*comm, right, false, false);
        fails(ErrorClass::peer_mismatch,
              "rank " + std::to_string(from) + " sends " + std::to_string(right.send[from][to]) + " elements to rank " +
                  std::to_string(to) + ", which expects " + std::to_string(wrong.recv[to][from]),
              [&] { call(*comm, wrong); });
        if (const int wrong_one = ranks - 2; rank == wrong_one)
            comm->fail(OpKind::all_to_all_v, invalid_param(1000, "sdispls is wrong"));
        else
            fails(ErrorClass::invalid_param, "failed on rank " + std::to_string(wrong_one) + ": sdispls is wrong",
                  [&] { call(*comm, right); });
        call(*comm, right);
        comm->destroy();
    });
}

TEST(loss) {
    const int victim = ranks * 3 / 4;
    const int port = free_port();
    const Plan plan = random_plan(ranks, 2, 1);
    on_hosts(
        [&](int rank) {
            const CommunicatorPtr comm = join(rank, port);
            call(*comm, plan);
            if (rank == victim) _exit(lost);
            fails(ErrorClass::peer_lost, "rank " + std::to_string(victim) + " was lost", [&] { call(*comm, plan); });
            comm->destroy();
        },
        victim);
}

/// A rank that is late is named by all, who know of it only what leaders have sent on while ranks waited.
TEST(late_rank) {
    const int late = ranks / 2 + 1;
    const int port = free_port();
    const Plan plan = random_plan(ranks, 3, 1);
    on_hosts([&](int rank) {
        const CommunicatorPtr comm = join(rank, port);
        call(*comm, plan);
        if (rank != late) {
            comm->set_timeout(rank == 0 ? 2 : seconds);
            fails(ErrorClass::comm_timeout, "for rank " + std::to_string(late) + " (pid", [&] { call(*comm, plan); });
        } else {
            eventually([&] { return !comm->usable(); });
        }
        comm->destroy();
    });
}

}  // namespace
