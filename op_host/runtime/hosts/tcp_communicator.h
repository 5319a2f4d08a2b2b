/// \file tcp_communicator.h
/// \brief Communicator between hosts: compares the ranks' operators over TCP, and lets a `Mover` carry the data.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/control/controlled_communicator.h"
#include "runtime/core/mover.h"
#include "runtime/hosts/tcp_join.h"
#include "runtime/hosts/tcp_leaders.h"
#include "runtime/hosts/tcp_messages.h"

namespace alltoallv {

/// Bytes of a rank that travel with its row.
inline constexpr size_t tcp_payload_bytes = 8192;

/// Engines for data beyond the few bytes that travel with the rows: between hosts and within this one.
struct Carriers {
    std::unique_ptr<Mover> between;
    CommunicatorPtr within;    // of the ranks of this host; null if there is only one, or if `between` serves all ranks
    std::vector<int> on_host;  // their ranks in the whole group, in order, including this one; empty without `within`
    std::shared_ptr<void> memory = nullptr;  // for the outputs; null with `within`, which has its own
};

/// Without carriers, only exchanges and reductions with `moves` false: rows are compared and learnt counts announced.
/// Small data travel with the rows, with and without carriers.
class TcpCommunicator final : public ControlledCommunicator {
  public:
    /// Throws on all ranks if one of them cannot be made.
    TcpCommunicator(const CommunicatorOptions& options, TcpMembership membership, const TcpJoinOptions& meeting);
    ~TcpCommunicator() override;

    std::string backend() const override { return carriers_.between ? carriers_.between->name() : "tcp"; }

    /// A secret that only its members know.
    const std::string& secret() const { return options_.secret; }

    /// True if this rank and that one are on one host.
    bool on_this_host(int rank) const { return on_this_host_[static_cast<size_t>(rank)]; }

    /// A job name for this communicator's ranks on this host.
    const std::string& local_job() const { return local_job_; }

    /// Call it before the first operator that moves much; all ranks give carriers of the same kind. The sockets are for
    /// `TcpMessages`.
    void carry_by(Carriers carriers, std::vector<UniqueFd> for_messages);

    /// Ends the communicator since this rank cannot join; all other ranks also raise this error.
    void give_up(const Error& error) { control_->poison_with(error, "joining domain '" + domain() + "'"); }

    void exchange(const Exchange& exchange, double timeout) override;
    void reduce(const Reduction& reduction, double timeout) override;
    void quant_reduce(const QuantReduction& reduction, double timeout) override;
    MessageWorkPtr post(const PeerMessage& message, double timeout, bool waits) override;

  private:
    void leave() override;
    void begin_operator(double timeout) override { timeout_ = timeout; }

    // tcp_exchange.cpp
    void exchange_packed(const Exchange& exchange, double timeout);
    void fill_row(const Exchange& exchange, OwnRow& own_row);
    void pack(const Exchange& exchange, OwnRow& own_row);
    void deliver(const Exchange& exchange, const OwnRow& own_row, std::vector<int64_t>& recvs);

    // tcp_reduce.cpp
    void reduce_small(const Reduction& reduction);
    void reduce_in_parts(const Reduction& reduction);

    // tcp_quant.cpp
    struct QuantPiece;
    struct QuantRun;
    void quant_reduce_in_pieces(const QuantReduction& reduction);

    /// One contiguous piece to and from every rank, including this one; sizes agree.
    struct Pieces {
        std::vector<std::span<const char>> out;
        std::vector<std::span<char>> in;

        explicit Pieces(int ranks) : out(static_cast<size_t>(ranks)), in(out.size()) {}
    };
    /// Moves the pieces after agreement. `within`: any rank of this host has a piece for one here or for itself.
    void start_moving();
    void move(const Pieces& pieces, bool within);
    /// Does the same if every rank gives one piece to all others: it goes once to every other host, to a rank that
    /// forwards it there.
    void share(const Pieces& pieces);
    void move_within(const Pieces& pieces);
    int takes_for(int host, int from) const;

    std::string local_job_;
    std::shared_ptr<TcpLeaders> leaders_;
    std::vector<bool> on_this_host_;
    std::vector<int> first_on_host_;  // per rank: the first rank on its host
    Carriers carriers_;
    std::shared_ptr<TcpMessages> messages_;
    double timeout_ = -1;  // of the present operator
    std::vector<char> scratch_;
};

/// The ranks meet at rank 0, which listens on that port of that host. Collective.
std::shared_ptr<TcpCommunicator> make_tcp_communicator(const CommunicatorOptions& options, const TcpAddress& rank_0);

/// The ranks learn rank 0's addresses over `gather`, which gives every rank the texts of all ranks, of one length. All
/// get a communicator, or all get null, and `failure` has the reason.
using GatherBytes = std::function<std::vector<std::string>(const std::string&)>;
std::shared_ptr<TcpCommunicator> make_tcp_communicator(const CommunicatorOptions& options, const GatherBytes& gather,
                                                       std::string& failure);

/// Returns the texts of all ranks, which have one length of up to 8 KiB. Collective.
std::vector<std::string> gather_texts(Communicator& communicator, const std::string& own_text);

}  // namespace alltoallv
