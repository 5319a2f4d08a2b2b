/// \file tcp_tree.h
/// \brief Which leaders of hosts have connections: up to 32 hosts all to the first, which is rank 0; above, a tree.
#pragma once

#include <vector>

#include "runtime/hosts/tcp_join.h"

namespace alltoallv {

/// Hosts are numbered by their leaders, the lowest ranks on them; host 0 is the root.
class TcpTree {
  public:
    explicit TcpTree(const std::vector<TcpPeer>& peers);

    /// True if some leaders have no connection to rank 0.
    bool deep() const { return fan_in_ < leaders_.size() - 1; }
    int hosts() const { return static_cast<int>(leaders_.size()); }
    int host_of(int rank) const { return host_of_[static_cast<size_t>(rank)]; }
    int leader(int host) const { return leaders_[static_cast<size_t>(host)]; }
    /// The host to which this one reports. Not for host 0.
    int parent(int host) const { return (host - 1) / static_cast<int>(fan_in_); }
    /// Hosts with a connection to this one, in order: the parent, then the children.
    std::vector<int> neighbours(int host) const;
    /// The neighbour of `from` through which messages from and to another host go.
    int towards(int from, int to) const;

  private:
    std::vector<int> leaders_, host_of_;
    size_t fan_in_;
};

/// Connects the leaders whose connection to rank 0 is not enough. Collective over all leaders.
void connect_tree(TcpMembership& membership, const TcpJoinOptions& options);

}  // namespace alltoallv
