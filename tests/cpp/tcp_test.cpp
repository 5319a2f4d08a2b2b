// Ranks on several hosts agree over TCP: here they are threads, or processes where one is lost.
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "errors.h"
#include "tcp_fixture.h"

using namespace alltoallv;
using namespace testing;

namespace {

using Body = std::function<void(Communicator&)>;

CommunicatorPtr join(const CommunicatorOptions& options, int port, const char* host = "127.0.0.1") {
    return make_tcp_communicator(options, TcpAddress{host, port});
}

/// Runs `body` on every rank; what it throws fails the test, unless it is caught inside.
void on_ranks(int size, const Body& body, double timeout = 20) {
    const int port = free_port();
    all_pass(run_threads(size, [&](int rank) {
        const CommunicatorPtr comm = join(options_of(rank, size, timeout), port, "localhost");
        body(*comm);
        comm->destroy();
    }));
}

/// Compares counts: `sends` and `recvs` by rank; empty `recvs` are learnt, and returned.
std::vector<int64_t> compare(Communicator& comm, std::vector<int64_t> sends, std::vector<int64_t> recvs,
                             OpKind op = OpKind::all_to_all_v, int64_t row = 1) {
    const std::vector<int64_t> places(sends.size(), 0);
    std::vector<int64_t> learnt = recvs;
    Exchange x;
    x.op = op;
    x.row = row;
    x.moves = false;
    x.send_counts = sends;
    x.recv_counts = recvs;
    x.sdispls = x.rdispls = places;
    x.allocate = [&](std::span<const int64_t> counts) -> void* {
        learnt.assign(counts.begin(), counts.end());
        return nullptr;
    };
    comm.exchange(x, -1);
    return learnt;
}

int64_t count_of(int from, int to) {
    return (from * 7 + to * 3) % 5;
}

std::vector<int64_t> sends_of(const Communicator& comm) {
    std::vector<int64_t> counts;
    for (int j = 0; j < comm.size(); ++j) counts.push_back(count_of(comm.rank(), j));
    return counts;
}

std::vector<int64_t> recvs_of(const Communicator& comm) {
    std::vector<int64_t> counts;
    for (int j = 0; j < comm.size(); ++j) counts.push_back(count_of(j, comm.rank()));
    return counts;
}

/// Compares counts on which all ranks agree.
void agree(Communicator& comm) {
    compare(comm, sends_of(comm), recvs_of(comm));
}

/// Rank `victim` is a process that is killed. The first test, before this process has had threads.
TEST(loss) {
    void* const shared = mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int victim = 0; victim < 3; ++victim) {
        auto* const agreed = new (shared) std::atomic<int>{0};  // a loss also ends the call before
        const int port = free_port();
        std::vector<int> expected(3, 0);
        expected[static_cast<size_t>(victim)] = 128 + SIGKILL;
        const std::vector<int> statuses = run_processes(3, [&](int rank) {
            const CommunicatorPtr comm = join(options_of(rank, 3), port);
            agree(*comm);
            ++*agreed;
            eventually([agreed] { return *agreed == 3; });
            if (rank == victim) raise(SIGKILL);
            fails(ErrorClass::peer_lost, "rank " + std::to_string(victim) + " was lost", [&] { agree(*comm); });
            comm->destroy();
        });
        CHECK(statuses == expected);
    }
}

TEST(agreement) {
    on_ranks(4, [](Communicator& comm) {
        for (int n = 0; n < 50; ++n) {
            agree(comm);
            CHECK(compare(comm, sends_of(comm), {}) == recvs_of(comm));
            // Some learn, some know.
            CHECK(compare(comm, sends_of(comm), comm.rank() % 2 == 0 ? std::vector<int64_t>{} : recvs_of(comm)) ==
                  recvs_of(comm));
        }
    });
}

/// Whoever is concerned, all ranks name the same pair; the communicator stays usable.
TEST(counts_that_differ) {
    for (int size : {2, 3, 5})
        for (int wrong = 0; wrong < size; ++wrong)
            for (int of = 0; of < size; ++of)
                on_ranks(size, [wrong, of](Communicator& comm) {
                    agree(comm);
                    std::vector<int64_t> recvs = recvs_of(comm);
                    if (comm.rank() == wrong) recvs[static_cast<size_t>(of)] += 9;
                    const int64_t sent = count_of(of, wrong);
                    fails(ErrorClass::peer_mismatch,
                          "operator #2 all_to_all_v of domain 'hosts': rank " + std::to_string(of) + " sends " +
                              std::to_string(sent) + " elements to rank " + std::to_string(wrong) + ", which expects " +
                              std::to_string(sent + 9),
                          [&] { compare(comm, sends_of(comm), recvs); });
                    agree(comm);
                    CHECK(comm.usable());
                });
}

/// Some learn, so that no sum tells: the pair is found all the same, the first of several.
TEST(counts_that_differ_beside_learners) {
    on_ranks(4, [](Communicator& comm) {
        std::vector<int64_t> recvs = recvs_of(comm);
        if (comm.rank() == 1) recvs.clear();
        if (comm.rank() == 2) recvs[3] += 1;
        if (comm.rank() == 3) recvs[0] += 2;
        fails(ErrorClass::peer_mismatch, "rank 3 sends " + std::to_string(count_of(3, 2)) + " elements to rank 2",
              [&] { compare(comm, sends_of(comm), recvs); });
    });
}

TEST(calls_that_differ) {
    on_ranks(3, [](Communicator& comm) {
        const OpKind op = comm.rank() == 2 ? OpKind::all_to_all : OpKind::all_to_all_v;
        fails(ErrorClass::peer_mismatch, "rank 0 calls all_to_all_v, rank 2 calls all_to_all",
              [&] { compare(comm, sends_of(comm), recvs_of(comm), op); });

        std::vector<int64_t> counts(3, 4);
        Reduction reduction;
        reduction.moves = false;
        reduction.counts = counts;
        comm.reduce(reduction, -1);
        reduction.reduce_op = comm.rank() == 1 ? ReduceOp::max : ReduceOp::sum;
        fails(ErrorClass::peer_mismatch, "rank 0 reduces with sum, rank 1 reduces with max",
              [&] { comm.reduce(reduction, -1); });

        const float scale = comm.rank() == 1 ? 0.5f : 0.25f;
        QuantReduction quant;
        quant.mode = QuantMode::shared_scale;
        quant.dtype = DType::int8;
        quant.moves = false;
        quant.counts = {counts.data(), 1};
        quant.scale = {&scale, 1};
        fails(ErrorClass::peer_mismatch, "rank 0 has scale 0.25, rank 1 has scale 0.5",
              [&] { comm.quant_reduce(quant, -1); });
    });
}

TEST(a_late_rank_is_named) {
    std::atomic<int> timeouts{0};
    on_ranks(
        3,
        [&](Communicator& comm) {
            if (comm.rank() == 1) {
                while (timeouts < 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));
                // It meets the failure at once.
                fails(ErrorClass::comm_timeout, "for rank 1", [&] { agree(comm); });
                return;
            }
            fails(ErrorClass::comm_timeout, "rank 1 (pid ", [&] { agree(comm); });
            CHECK(!comm.usable());
            ++timeouts;
        },
        0.5);
}

TEST(abort_and_departure) {
    std::barrier<> all(3);  // an abort also ends the call before, of a rank that is still in it
    on_ranks(3, [&](Communicator& comm) {
        agree(comm);
        all.arrive_and_wait();
        if (comm.rank() == 2) return comm.abort("enough");
        fails(ErrorClass::peer_lost, "rank 2 aborted: enough", [&] { agree(comm); });
    });
    for (int leaver = 0; leaver < 3; ++leaver)
        on_ranks(3, [leaver](Communicator& comm) {
            if (comm.rank() == leaver) return comm.destroy();
            fails(ErrorClass::peer_lost, "rank " + std::to_string(leaver) + " has left domain 'hosts'",
                  [&] { agree(comm); });
        });
}

TEST(ranks_that_do_not_come) {
    const int port = free_port();
    all_pass(run_threads(2, [port](int i) {
        fails(ErrorClass::comm_timeout, "rank 1, rank 3 to join domain 'hosts'",
              [&] { join(options_of(2 * i, 4, 1.5), port); });
    }));
    fails(ErrorClass::comm_timeout,
          "rank 1 waited 0.30 s for rank 0 of domain 'hosts' at 127.0.0.1:" + std::to_string(port),
          [&] { join(options_of(1, 2, 0.3), port); });
    for (const int rank : {0, 1}) {
        std::vector<std::string> warnings;
        hooks().warn = [&](const std::string& text) { warnings.push_back(text); };
        CommunicatorOptions options = options_of(rank, 2, 0.5);
        options.warn_after = 0.1;
        fails(ErrorClass::comm_timeout, "waited 0.50 s", [&] { join(options, port); });
        hooks().warn = {};
        CHECK(!warnings.empty() && warnings.size() <= 3);
        CHECK(warnings[0].find(" s for rank " + std::to_string(1 - rank)) != std::string::npos);
    }
}

/// HCCL's variables choose among the networks of a host; its loopback comes last.
TEST(networks_of_a_host) {
    using Addresses = std::vector<std::string>;
    const auto chosen = [](const char* variable, const std::string& value) {
        CHECK(setenv(variable, value.c_str(), 1) == 0);
        Addresses addresses = own_addresses();
        CHECK(unsetenv(variable) == 0);
        return addresses;
    };
    const auto outer = [](const Addresses& addresses) {
        return std::count_if(addresses.begin(), addresses.end(),
                             [](const std::string& one) { return !one.starts_with("127.") && one != "::1"; });
    };
    const Addresses all = own_addresses();
    CHECK_EQ(chosen("HCCL_IF_IP", "10.1.2.3").front(), std::string("10.1.2.3"));
    CHECK_EQ(outer(chosen("HCCL_SOCKET_IFNAME", "no-such")), 0);
    CHECK(chosen("HCCL_SOCKET_IFNAME", "^no-such") == all);
    struct if_nameindex* const names = if_nameindex();
    CHECK(names != nullptr);
    for (auto* one = names; one->if_index != 0; ++one) {
        const std::string name = one->if_name;
        const auto with = outer(chosen("HCCL_SOCKET_IFNAME", "=no-such," + name));
        CHECK_EQ(with + outer(chosen("HCCL_SOCKET_IFNAME", "^=" + name)), outer(all));
        CHECK(with <= outer(chosen("HCCL_SOCKET_IFNAME", name.substr(0, 2))));
    }
    if_freenameindex(names);
}

/// A host that loses its power says nothing: 30 s later that is noticed.
TEST(silent_connections_are_asked_for_30_s) {
    const UniqueFd listener = listen_tcp(0);
    const UniqueFd there = connect_tcp({"127.0.0.1", port_of(listener.get())}, 1), here = accept_tcp(listener.get());
    for (const UniqueFd* end : {&there, &here}) {
        const auto option = [end](int level, int name) {
            int value = 0;
            socklen_t length = sizeof value;
            CHECK(getsockopt(end->get(), level, name, &value, &length) == 0);
            return value;
        };
        CHECK_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
        CHECK_EQ(
            option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT),
            30);
    }
}

/// As when two jobs have one address; the first process lives, so it has not tried again.
TEST(two_processes_that_are_one_rank) {
    const int port = free_port();
    const std::string part = "rank 1 came to domain 'hosts' twice, as pid ";
    const auto come = [&](int rank) {
        fails(ErrorClass::invalid_param, part, [&] { join(options_of(rank, 3), port); });
    };
    const pid_t one = spawn("first", [&] { come(1); }), other = spawn("second", [&] { come(1); });
    come(0);
    CHECK_EQ(wait_for(one), 0);
    CHECK_EQ(wait_for(other), 0);
}

/// The second waits for the port, and looks who has it.
TEST(two_processes_that_are_rank_0) {
    const int port = free_port();
    const std::string part = "rank 0 came to domain 'hosts' twice, as pid ";
    const auto come = [&](int rank) {
        fails(ErrorClass::invalid_param, part, [&] { join(options_of(rank, 3), port); });
    };
    const pid_t one = spawn("first", [&] { come(0); }), other = spawn("second", [&] { come(0); });
    come(1);
    CHECK_EQ(wait_for(one), 0);
    CHECK_EQ(wait_for(other), 0);
}

/// Two domains at one port, in opposite order of arrival: each meets its own.
TEST(domains_share_a_port) {
    const int port = free_port();
    all_pass(run_threads(4, [port](int thread) {
        CommunicatorOptions options = options_of(thread / 2, 2);
        options.domain = thread % 2 == 0 ? "one" : "two";
        const CommunicatorPtr comm = join(options, port);
        agree(*comm);
        comm->destroy();
    }));
}

/// Silent, talkative and lying strangers at rank 0's port, all the time: the ranks meet, or the timeout holds.
TEST(strangers) {
    const int port = free_port();
    const pid_t strangers = spawn("strangers", [port] {
        const std::string texts[] = {"", "GET / HTTP/1.1\r\n\r\n", std::string(4096, '\xff')};
        std::vector<UniqueFd> held(600);
        for (size_t i = 0;; i = (i + 1) % held.size()) {
            held[i] = connect_tcp({"127.0.0.1", port}, 1);
            const std::string& text = texts[i % 3];
            if (held[i] && !text.empty()) send_all(held[i].get(), text.data(), text.size());
            ::usleep(300);
        }
    });
    const double most = 15;  // seconds
    auto start = Clock::now();
    fails(ErrorClass::comm_timeout, "", [port] { join(options_of(0, 2, 0.5), port); });
    CHECK(seconds_since(start) < most);
    start = Clock::now();
    all_pass(run_threads(3, [port](int rank) {
        CommunicatorOptions options = options_of(rank, 3);
        options.secret = "of the job";
        const CommunicatorPtr comm = join(options, port);
        agree(*comm);
        comm->destroy();
    }));
    CHECK(seconds_since(start) < most);
    kill(strangers, SIGKILL);
    wait_for(strangers);
}

/// Who knows all names and not the secret is not let in; both sides are told.
TEST(another_secret) {
    const int port = free_port();
    all_pass(run_threads(2, [port](int rank) {
        CommunicatorOptions options = options_of(rank, 2, 1.0);
        options.secret = "secret of rank " + std::to_string(rank);
        const std::string text =
            fails(ErrorClass::comm_timeout,
                  "not know the domain's secret: are job, domain and ALLTOALLV_JOB_SECRET equal on all",
                  [&] { join(options, port); });
        CHECK(text.find("secret of rank") == std::string::npos);
    }));
}

/// Rank 0's addresses travel by other means, such as HcclAllGather. All ranks get a communicator, or none does.
TEST(addresses_from_elsewhere) {
    for (const bool spoilt : {false, true}) {
        std::vector<std::string> parts(3);
        std::barrier barrier(3);
        all_pass(run_threads(3, [&](int rank) {
            const GatherBytes gather = [&](const std::string& own_part) {
                parts[static_cast<size_t>(rank)] = own_part;
                barrier.arrive_and_wait();
                std::vector<std::string> all = parts;
                barrier.arrive_and_wait();
                if (spoilt && rank == 1 && all[0].size() > 1)
                    all[0] = std::string("1 token 127.0.0.1\0", 18);  // nobody listens there
                return all;
            };
            std::string failure;
            const CommunicatorPtr comm = make_tcp_communicator(options_of(rank, 3, spoilt ? 0.5 : 20), gather, failure);
            CHECK((comm == nullptr) == spoilt);
            if (spoilt) {
                check_contains(failure, rank == 1 ? "for rank 0 of domain 'hosts' at 127.0.0.1:1" : "for rank 1 to");
                return;
            }
            agree(*comm);
            comm->destroy();
        }));
    }
}

}  // namespace
