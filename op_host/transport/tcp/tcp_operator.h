/// \file tcp_operator.h
/// \brief What surrounds every operator between hosts: its turn, and what a failure leaves behind.
#pragma once

#include <new>
#include <string>

#include "transport/tcp/tcp_communicator.h"

namespace alltoallv {

/// Of a rank, that travels with its row.
inline constexpr size_t tcp_payload_bytes = 8192;

/// Runs one operator in its turn: `body` fills the row, publishes it, agrees and moves the data.
template <class Body>
void TcpCommunicator::run(OpKind op, DType dtype, double timeout, Body&& body) {
    check_usable();
    const CallQueue::Turn turn(*queue_, size() > 1);
    check_usable();
    if (turn.overlaps()) {
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->fail(op, two_threads(op));
        throw two_threads(op);
    }
    moving_ = false;
    timeout_ = timeout;
    const auto close_failed = [&] {
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->close(false, 0);
    };
    const auto fail_with = [&](const Error& error) {
        control_->give_up(error, moving_);
        close_failed();
        throw error;
    };
    try {
        body(control_->open(op, dtype, timeout));
        control_->close(true, 0);
    } catch (const Error& error) {
        fail_with(error);
    } catch (const std::bad_alloc&) {
        fail_with(resource_error("no memory for what " + control_->describe_op() + " needs"));
    } catch (...) {
        control_->poison(PoisonKind::aborted,
                         "rank " + std::to_string(rank()) + " was interrupted in " + control_->describe_op());
        close_failed();
        throw;
    }
    operators_.fetch_add(1, std::memory_order_relaxed);
    if (turn.is_joined()) throw two_threads(op);  // what has come may have been meant for the other
}

}  // namespace alltoallv
