/// \file tcp_communicator.h
/// \brief Communicator between hosts: compares over TCP what ranks are about to do, and lets a `Mover` carry the data.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "control/controlled_communicator.h"
#include "core/mover.h"
#include "transport/tcp/tcp_leaders.h"
#include "transport/tcp/tcp_meeting.h"
#include "transport/tcp/tcp_messages.h"

namespace alltoallv {

/// Of a rank, that travels with its row.
inline constexpr size_t tcp_payload_bytes = 8192;

/// What carries data beyond the few that travel with the rows: between hosts and within this one.
struct Carriers {
    std::unique_ptr<Mover> between;
    CommunicatorPtr within;    // of the ranks of this host; empty if it has one alone, or on all hosts
    std::vector<int> on_host;  // their ranks in the whole, in order, this one among them; empty without `within`
};

/// Without carriers: exchanges and reductions with `moves` false, whose rows are compared and learnt counts told. Data
/// that are small enough travel with the rows, with and without carriers.
class TcpCommunicator final : public ControlledCommunicator {
  public:
    TcpCommunicator(const CommunicatorOptions& options, TcpMembership membership);
    ~TcpCommunicator() override;

    std::string backend() const override { return carriers_.between ? carriers_.between->name() : "tcp"; }

    /// What its members know, and nobody else.
    const std::string& secret() const { return options_.secret; }

    /// Whether this rank and that one are on one host.
    bool on_this_host(int rank) const { return on_this_host_[static_cast<size_t>(rank)]; }

    /// Names, in a job's stead, this communicator's ranks on this host.
    const std::string& local_job() const { return local_job_; }

    /// Before the first operator that moves much; what it is given is of the same kind on all ranks. The sockets are
    /// those of `TcpMessages`.
    void carry_by(Carriers carriers, std::vector<UniqueFd> for_messages);

    void exchange(const Exchange& exchange, double timeout) override;
    void reduce(const Reduction& reduction, double timeout) override;
    void quant_reduce(const QuantReduction& reduction, double timeout) override;
    MessageWorkPtr post(const PeerMessage& message, double timeout, bool waits) override;
    void destroy() override;

  private:
    void begin_operator(double timeout) override { timeout_ = timeout; }

    // tcp_exchange.cpp
    void fill_row(const Exchange& exchange, Row& mine);
    void pack(const Exchange& exchange, Row& mine);
    void deliver(const Exchange& exchange, const Row& mine, std::vector<int64_t>& recvs);

    // tcp_reduce.cpp
    void reduce_small(const Reduction& reduction);
    void reduce_in_parts(const Reduction& reduction);

    // tcp_quant.cpp
    struct QuantPiece;
    struct QuantRun;
    void quant_reduce_in_pieces(const QuantReduction& reduction);

    /// One contiguous piece to and from every rank, this one too; sizes agree.
    struct Pieces {
        std::vector<const char*> out;
        std::vector<char*> in;
        std::vector<size_t> out_bytes, in_bytes;

        explicit Pieces(int ranks)
            : out(static_cast<size_t>(ranks)), in(out.size()), out_bytes(out.size()), in_bytes(out.size()) {}
    };
    /// After agreement. `within`: whether any rank of this host has a piece for another, or itself.
    void move(const Pieces& pieces, bool within);
    /// The same where every rank gives all others one piece: it goes once to every other host, to a rank that hands it
    /// on there.
    void share(const Pieces& pieces);
    void begin_between(const Pieces& pieces);
    void end_between();
    void move_within(const Pieces& pieces);
    int takes_for(int host, int from) const;

    std::string local_job_;
    std::shared_ptr<TcpLeaders> leaders_;
    std::vector<bool> on_this_host_;
    std::vector<int> first_on_host_;  // per rank: names its host
    Carriers carriers_;
    std::unique_ptr<TcpMessages> messages_;
    double timeout_ = -1;  // of the present operator
    std::vector<char> scratch_;
};

/// The ranks meet at rank 0, which listens on that port of that host. Collective.
std::shared_ptr<TcpCommunicator> make_tcp_communicator(const CommunicatorOptions& options, const TcpAddress& rank_0);

/// The ranks learn rank 0's addresses over `gather`, which hands everybody what all ranks give, of one length. All get
/// a communicator, or all get none, and `failure` then says why.
using GatherBytes = std::function<std::vector<std::string>(const std::string&)>;
std::shared_ptr<TcpCommunicator> make_tcp_communicator(const CommunicatorOptions& options, const GatherBytes& gather,
                                                       std::string& failure);

/// What all ranks give, texts of one length of up to 8 KiB. Collective.
std::vector<std::string> gather_texts(Communicator& communicator, const std::string& mine);

}  // namespace alltoallv
