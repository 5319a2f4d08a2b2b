// A tree of leaders: 40 ranks, each on a host of its own, which is a process namespace here.
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <vector>

#include "errors.h"
#include "exchange_plan.h"
#include "runtime/control/deadlock.h"
#include "runtime/core/hooks.h"
#include "tcp_fixture.h"

using namespace alltoallv;
using namespace testing;

namespace {

constexpr int ranks = 40;
constexpr int lost = 7;  // exit status of a rank that dies

/// Processes that this one starts from now on are in a namespace of their own, where the first of them is number 1.
/// Such processes end by _exit, because what a sanitizer does at exit does not know namespaces.
bool enters_namespace() {
    return unshare(CLONE_NEWPID) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWPID) == 0;
}

/// Ranks 1 to 16 report to rank 0, 17 to 32 to rank 1, the others to rank 2.
void on_hosts(const Body& body, int victim = -1) {
    if (wait_for(spawn("probe", [] { _exit(enters_namespace() ? 0 : 1); })) != 0) {
        std::printf("  NOT RUN: no process namespaces may be made here\n");
        return;
    }
    std::vector<int> expected(ranks, 0);
    if (victim >= 0) expected[static_cast<size_t>(victim)] = lost;
    CHECK(run_processes(ranks, [&](int rank) {
              CHECK(enters_namespace());
              _exit(wait_for(spawn("host " + std::to_string(rank), [&] {
                  body(rank);
                  _exit(0);
              })));
          }) == expected);
}

CommunicatorPtr join(int rank, int port, const std::string& domain = "tree") {
    CommunicatorOptions options = options_of(rank, ranks, 60);
    options.domain = domain;
    return make_tcp_communicator(options, TcpAddress{"localhost", port});
}

void exchange(Communicator& comm, uint64_t seed = 1) {
    run_plan(comm, random_plan(ranks, seed, 5), false, false);
}

/// The terms are added in the order of ranks.
void reduce(Communicator& comm) {
    std::vector<float> data(500), expected(data.size());
    for (int rank = 0; rank < ranks; ++rank)
        for (size_t k = 0; k < data.size(); ++k) {
            const float term = 1.0f / static_cast<float>(rank + 3 * static_cast<int>(k) + 1);
            expected[k] = rank == 0 ? term : expected[k] + term;
            if (rank == comm.rank()) data[k] = term;
        }
    std::vector<int64_t> counts(ranks, 0);
    counts[0] = static_cast<int64_t>(data.size());
    Reduction r;
    r.dtype = DType::float32;
    r.input = r.output = data.data();
    r.counts = counts;
    comm.reduce(r, -1);
    CHECK(std::memcmp(data.data(), expected.data(), data.size() * sizeof(float)) == 0);
}

TEST(calls_and_disagreements) {
    const int port = free_port();
    on_hosts([port](int rank) {
        const CommunicatorPtr comm = join(rank, port);
        for (uint64_t round = 0; round < 5; ++round) {
            exchange(*comm, round);
            run_learning(*comm, random_plan(ranks, round, 5), false, false);
            reduce(*comm);
        }
        Plan plan = random_plan(ranks, 1, 5);
        ++plan.recv[37][20];  // rank 37 expects one more
        fails(ErrorClass::peer_mismatch, "rank 20 sends " + std::to_string(plan.send[20][37]) + " elements to rank 37",
              [&] { run_plan(*comm, plan, false, false); });
        if (rank == 39)
            comm->fail(OpKind::all_to_all_v, invalid_param(1000, "sdispls is wrong"));
        else
            fails(ErrorClass::invalid_param, "failed on rank 39: sdispls is wrong", [&] { exchange(*comm); });
        exchange(*comm);
        comm->destroy();
    });
}

/// A leaf, and a leader that others report to.
TEST(loss) {
    for (const int victim : {39, 2}) {
        const int port = free_port();
        on_hosts(
            [port, victim](int rank) {
                const CommunicatorPtr comm = join(rank, port);
                exchange(*comm);
                if (rank == victim) _exit(lost);
                fails(ErrorClass::peer_lost, "rank " + std::to_string(victim) + " was lost", [&] { exchange(*comm); });
                comm->destroy();
            },
            victim);
    }
}

TEST(departure) {
    const int port = free_port();
    on_hosts([port](int rank) {
        const CommunicatorPtr comm = join(rank, port);
        exchange(*comm);
        if (rank != 1) fails(ErrorClass::peer_lost, "rank 1 has left domain 'tree'", [&] { exchange(*comm); });
        comm->destroy();
    });
}

/// Even ranks wait in one domain, odd ranks in the other. Nobody leaves before all are told.
TEST(deadlock) {
    if (UNDER_SANITIZER) {
        std::printf("not tried with a sanitizer: 40 processes must all look within 3 s\n");
        return;
    }
    void* const shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    auto* const ended = new (shared) std::atomic<int>(0);
    const int port = free_port();
    on_hosts([port, ended](int rank) {
        hooks().poll = [] {
            if (Deadlocks::instance().due()) Deadlocks::instance().look({BlockedThread::this_thread()});
        };
        const CommunicatorPtr one = join(rank, port, "one"), two = join(rank, port, "two");
        exchange(*one);
        exchange(*two);
        fails(ErrorClass::deadlock, "of domain 'two'", [&] { exchange(rank % 2 == 0 ? *one : *two); });
        ++*ended;
        for (int i = 0; i < 5000 && *ended < ranks; ++i) ::usleep(10'000);
        one->destroy();
        two->destroy();
    });
    munmap(shared, 4096);
}

}  // namespace
