// 256 ranks, each a process: on 64 hosts, which are process namespaces here and agree over a tree of TCP connections.
#include <sched.h>
#include <unistd.h>

#include <functional>
#include <string>
#include <vector>

#include "errors.h"
#include "exchange_plan.h"
#include "tcp_fixture.h"

using namespace alltoallv;
using namespace testing;

namespace {

constexpr int ranks = 256, per_host = 4, lost = 7;
constexpr double seconds = 120;

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
        std::printf("  NOT RUN: 256 processes would take too long with a sanitizer; tcp_tree_test has 40\n");
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
    ++wrong.recv[201][77];
    on_hosts([&](int rank) {
        const CommunicatorPtr comm = join(rank, port);
        for (int round = 0; round < 3; ++round) call(*comm, right);
        run_learning(*comm, right, false, false);
        fails(ErrorClass::peer_mismatch,
              "rank 77 sends " + std::to_string(right.send[77][201]) + " elements to rank 201, which expects " +
                  std::to_string(wrong.recv[201][77]),
              [&] { call(*comm, wrong); });
        if (rank == 254)
            comm->fail(OpKind::all_to_all_v, invalid_param("sdispls is wrong"));
        else
            fails(ErrorClass::invalid_param, "failed on rank 254: sdispls is wrong", [&] { call(*comm, right); });
        call(*comm, right);
        comm->destroy();
    });
}

TEST(loss) {
    constexpr int victim = 190;
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

/// A rank that is late is named by all, who know nothing of it but what their leaders have asked for.
TEST(late_rank) {
    constexpr int late = 99;
    const int port = free_port();
    const Plan plan = random_plan(ranks, 3, 1);
    on_hosts([&](int rank) {
        const CommunicatorPtr comm = join(rank, port);
        call(*comm, plan);
        if (rank != late) {
            comm->set_timeout(rank == 0 ? 3 : seconds);
            fails(ErrorClass::comm_timeout, "for rank 99 (pid", [&] { call(*comm, plan); });
        } else {
            eventually([&] { return !comm->usable(); });
        }
        comm->destroy();
    });
}

}  // namespace
