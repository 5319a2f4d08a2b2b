/// \file tcp_operator.h
/// \brief What surrounds every operator between hosts: its turn, and what a failure leaves behind.
#pragma once

#include <string>

#include "transport/tcp/tcp_communicator.h"

namespace alltoallv {

/// Of a rank, that travels with its row.
inline constexpr size_t tcp_payload_bytes = 8192;

/// Runs one operator in its turn: `body` fills the row, publishes it, agrees and moves the data.
template <class Body>
void TcpCommunicator::run(OpKind op, DType dtype, double timeout, Body&& body) {
    check_usable();
    const CallQueue::Turn turn(*queue_);
    check_usable();
    moving_ = false;
    timeout_ = timeout;
    const auto give_up = [&](const std::string& why) {
        if (!why.empty())
            control_->poison(PoisonKind::aborted,
                             "rank " + std::to_string(rank()) + why + " in " + control_->describe_op());
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->close(false, 0);
    };
    try {
        body(control_->open(op, dtype, timeout));
        control_->close(true, 0);
    } catch (const Error& error) {
        give_up(moving_ ? " failed (" + std::string(error.what()) + ")" : "");
        throw;
    } catch (...) {
        give_up(" was interrupted");
        throw;
    }
    operators_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace alltoallv
