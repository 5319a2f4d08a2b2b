// Data between hosts: the ranks are threads here, each as on a host of its own.
#include <unistd.h>

#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "errors.h"
#include "int_exchange.h"
#include "transport/tcp/tcp_communicator.h"
#include "transport/tcp/tcp_connections.h"
#include "transport/tcp/tcp_mesh.h"

using namespace alltoallv;

namespace {

using Body = std::function<void(Communicator&)>;

std::shared_ptr<TcpCommunicator> make(int rank, int size, int port) {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = size;
    options.domain = "moving";
    options.job = "tcp-moving-test";
    options.timeout = 30;
    auto made = make_tcp_communicator(options, TcpAddress{"localhost", port});
    std::vector<int> others(static_cast<size_t>(size));
    std::iota(others.begin(), others.end(), 0);
    std::erase(others, rank);
    TcpConnectionsOptions connections;
    connections.rank = rank;
    connections.secret = made->secret();
    connections.peers = {others, others};
    connections.timeout = 30;
    connections.gather = [&](const std::string& card) { return gather_texts(*made, card); };
    std::vector<std::vector<UniqueFd>> sockets = connect_ranks(connections);
    made->carry_by({std::make_unique<TcpMesh>(std::move(sockets[1])), nullptr, {}}, std::move(sockets[0]));
    return made;
}

void on_ranks(int size, const Body& body) {
    const UniqueFd taken = listen_tcp(0);
    const int port = port_of(taken.get());
    testing::all_pass(testing::run_threads(size, [&](int rank) {
        const auto made = make(rank, size, port + 1);
        body(*made);
        made->destroy();
    }));
}

int32_t value(int from, int to, int64_t at) {
    return static_cast<int32_t>(from * 1'000'003 + to * 1009 + at);
}

/// Rank i sends j * unit + i elements to rank j, gaps between; what is received is learnt where `learns`.
void exchange(Communicator& comm, int64_t unit, bool learns) {
    const int size = comm.size(), me = comm.rank();
    std::vector<int64_t> sends, sdispls, recvs, rdispls;
    int64_t sent = 0, received = 0;
    for (int j = 0; j < size; ++j) {
        sends.push_back(j * unit + me);
        sdispls.push_back(sent);
        sent += sends.back() + 3;
        recvs.push_back(me * unit + j);
        rdispls.push_back(received);
        received += recvs.back() + (learns ? 0 : 2);
    }
    std::vector<int32_t> input(static_cast<size_t>(sent)), output(static_cast<size_t>(received), -7);
    for (int j = 0; j < size; ++j)
        for (int64_t k = 0; k < sends[static_cast<size_t>(j)]; ++k)
            input[static_cast<size_t>(sdispls[static_cast<size_t>(j)] + k)] = value(me, j, k);
    testing::exchange_ints(comm, input, output, {sends, sdispls, recvs, rdispls}, learns);
    for (int j = 0; j < size; ++j) {
        const auto i = static_cast<size_t>(j);
        for (int64_t k = 0; k < recvs[i]; ++k) CHECK_EQ(output[static_cast<size_t>(rdispls[i] + k)], value(j, me, k));
        if (!learns) CHECK_EQ(output[static_cast<size_t>(rdispls[i] + recvs[i])], -7);
    }
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
        for (const int64_t unit : {0, 5, 300, 50'000})
            for (const bool learns : {false, true}) exchange(comm, unit, learns);
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
            std::vector<int32_t> mine(n, comm.rank()), from(n, -1), back(n, -1);
            const auto message = [&](OpKind op, std::vector<int32_t>& data, int peer, int tag) {
                return comm.post({op, DType::int32, data.data(), static_cast<int64_t>(n), peer, tag}, -1, false);
            };
            const std::vector<MessageWorkPtr> works{
                message(OpKind::send, mine, after, 1), message(OpKind::recv, back, after, 2),
                message(OpKind::send, mine, before, 2), message(OpKind::recv, from, PeerMessage::any_rank, 1)};
            exchange(comm, 1000, false);
            for (const MessageWorkPtr& work : works) CHECK(work->wait(30));
            CHECK(from == std::vector<int32_t>(n, before) && back == std::vector<int32_t>(n, after));
            CHECK_EQ(works[3]->source(), before);
        }
        std::vector<int32_t> data(6);
        if (comm.rank() == 2) return;
        const auto work = comm.post({comm.rank() == 0 ? OpKind::send : OpKind::recv, DType::int32, data.data(),
                                     comm.rank() == 0 ? 6 : 4, 1 - comm.rank(), 7},
                                    -1, false);
        testing::fails(ErrorClass::peer_mismatch, "rank 0 sends 6 int32 to rank 1, which expects 4 int32",
                       [&] { work->wait(30); });
    });
}

}  // namespace
