// What the tests of ranks on several hosts share: a port, options, connections for data.
#pragma once

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/hosts/tcp_communicator.h"
#include "runtime/hosts/tcp_connections.h"
#include "runtime/hosts/tcp_mesh.h"

namespace testing {

using namespace alltoallv;

inline int free_port() {
    const UniqueFd listener = listen_tcp(0);
    return port_of(listener.get());
}

inline CommunicatorOptions options_of(int rank, int size, double timeout = 20) {
    CommunicatorOptions options;
    options.rank = rank;
    options.size = size;
    options.domain = "hosts";
    options.job = "tcp-test";
    options.timeout = timeout;
    return options;
}

/// A communicator that also moves data; all ranks make theirs at the same time.
inline std::shared_ptr<TcpCommunicator> connect_hosts(const CommunicatorOptions& options, int port) {
    auto made = make_tcp_communicator(options, TcpAddress{"localhost", port});
    std::vector<int> others(static_cast<size_t>(options.size));
    std::iota(others.begin(), others.end(), 0);
    std::erase(others, options.rank);
    TcpConnectionsOptions connections;
    connections.rank = options.rank;
    connections.secret = made->secret();
    connections.peers = {others, others};
    connections.timeout = options.timeout;
    connections.gather = [&](const std::string& card) { return gather_texts(*made, card); };
    std::vector<std::vector<UniqueFd>> sockets = connect_ranks(connections);
    made->carry_by({std::make_unique<TcpMesh>(std::move(sockets[1])), nullptr, {}}, std::move(sockets[0]));
    return made;
}

}  // namespace testing
