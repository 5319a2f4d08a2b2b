// Data between hosts: the ranks are threads here, each as on a host of its own.
#include "exchange_plan.h"
#include "tcp_fixture.h"

using namespace alltoallv;
using namespace testing;

namespace {

void on_ranks(int size, const std::function<void(Communicator&)>& body) {
    const int port = free_port();
    all_pass(run_threads(size, [&](int rank) {
        const auto made = connect_hosts(options_of(rank, size), port);
        body(*made);
        made->destroy();
    }));
}

void reduce(Communicator& comm, int64_t count) {
    std::vector<int64_t> data(static_cast<size_t>(count)), counts(static_cast<size_t>(comm.size()), 0);
    for (int64_t k = 0; k < count; ++k) data[static_cast<size_t>(k)] = k * (comm.rank() + 1);
    counts[0] = count;
    Reduction r;
    r.dtype = DType::int64;
    r.input = r.output = data.data();
    r.counts = counts;
    comm.reduce(r, -1);
    const int64_t factor = comm.size() * (comm.size() + 1) / 2;
    for (int64_t k = 0; k < count; ++k) CHECK_EQ(data[static_cast<size_t>(k)], k * factor);
}

TEST(exchanges) {
    on_ranks(4, [](Communicator& comm) {
        for (const size_t longest : {1, 20, 1000, 100'000}) {
            const Plan plan = random_plan(comm.size(), longest, longest);
            run_plan(comm, plan, false, false);
            run_learning(comm, plan, false, false);
        }
    });
}

TEST(reductions) {
    on_ranks(3, [](Communicator& comm) {
        for (const int64_t count : {0, 1, 500, 5000, 200'000}) reduce(comm, count);
    });
}

/// Around the ranks, both ways at once, beside collectives; then one that does not fit.
TEST(messages) {
    on_ranks(3, [](Communicator& comm) {
        const int after = (comm.rank() + 1) % 3, before = (comm.rank() + 2) % 3;
        for (const size_t n : {size_t{0}, size_t{9}, size_t{300'000}}) {
            std::vector<int32_t> own(n, comm.rank()), from(n, -1), back(n, -1);
            const auto message = [&](OpKind op, std::vector<int32_t>& data, int peer, int tag) {
                return comm.post({op, DType::int32, data.data(), static_cast<int64_t>(n), peer, tag}, -1, false);
            };
            const std::vector<MessageWorkPtr> works{
                message(OpKind::send, own, after, 1), message(OpKind::recv, back, after, 2),
                message(OpKind::send, own, before, 2), message(OpKind::recv, from, PeerMessage::any_rank, 1)};
            run_plan(comm, random_plan(comm.size(), n, 3000), false, false);
            for (const MessageWorkPtr& work : works) CHECK(work->wait(30));
            CHECK(from == std::vector<int32_t>(n, before) && back == std::vector<int32_t>(n, after));
            CHECK_EQ(works[3]->source(), before);
        }
        std::vector<int32_t> data(6);
        if (comm.rank() == 2) return;
        const auto work = comm.post({comm.rank() == 0 ? OpKind::send : OpKind::recv, DType::int32, data.data(),
                                     comm.rank() == 0 ? 6 : 4, 1 - comm.rank(), 7},
                                    -1, false);
        fails(ErrorClass::peer_mismatch, "rank 0 sends 6 int32 to rank 1, which expects 4 int32",
              [&] { work->wait(30); });
    });
}

}  // namespace
