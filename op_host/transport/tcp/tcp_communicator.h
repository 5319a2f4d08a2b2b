/// \file tcp_communicator.h
/// \brief Communicator between hosts that compares what ranks are about to do, for transports that move the data.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "control/control.h"
#include "core/call_queue.h"
#include "core/communicator.h"
#include "core/options.h"
#include "transport/tcp/tcp_meeting.h"
#include "transport/tcp/tcp_star.h"

namespace alltoallv {

/// Exchanges and reductions with `moves` false: their rows are compared, learnt counts told. Of data it moves what fits
/// a row and goes to all alike, such as root info of HCCL.
class TcpCommunicator final : public Communicator {
  public:
    TcpCommunicator(const CommunicatorOptions& options, TcpMembership membership);
    ~TcpCommunicator() override;

    int rank() const override { return options_.rank; }
    int size() const override { return options_.size; }
    const std::string& domain() const override { return options_.domain; }
    std::string backend() const override { return "tcp"; }

    void exchange(const Exchange& exchange, double timeout) override;
    void reduce(const Reduction& reduction, double timeout) override;
    void quant_reduce(const QuantReduction& reduction, double timeout) override;
    void fail(OpKind op, const Error& error) override;
    WorkPtr submit(std::function<void()> call) override;
    void abort(const std::string& reason) override;
    void destroy() override;
    bool usable() const override;
    bool busy() const override { return queue_->busy(); }
    Stats stats() const override;
    std::string flight_record() const override;

  private:
    void check_usable() const;
    template <class Body>
    void run(OpKind op, DType dtype, double timeout, Body&& body);
    void pack(const Exchange& exchange, Row& mine);
    void unpack(const Exchange& exchange);

    CommunicatorOptions options_;
    pid_t pid_;
    std::unique_ptr<ControlPlane> control_;
    std::shared_ptr<TcpStar> star_;
    std::atomic<uint64_t> operators_{0}, failed_{0};
    std::string final_record_;  // of the flight recorder, once destroyed
    std::atomic<bool> destroyed_{false};
    mutable std::mutex lifetime_;  // guards control_ against destroy(), for what runs outside the turns
    std::unique_ptr<CallQueue> queue_ = std::make_unique<CallQueue>();  // last: its thread ends before the rest
};

/// The ranks meet at rank 0, which listens on that port of that host. Collective.
CommunicatorPtr make_tcp_communicator(const CommunicatorOptions& options, const TcpAddress& rank_0);

/// The ranks learn rank 0's addresses over `gather`, which hands everybody what all ranks give, of one length. All get
/// a communicator, or all get none, and `failure` then says why.
using GatherBytes = std::function<std::vector<std::string>(const std::string&)>;
CommunicatorPtr make_tcp_communicator(const CommunicatorOptions& options, const GatherBytes& gather,
                                      std::string& failure);

}  // namespace alltoallv
