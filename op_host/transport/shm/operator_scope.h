/// \file operator_scope.h
/// \brief What surrounds every operator of the shared-memory communicator: its turn, and what a failure leaves behind.
#pragma once

#include <new>
#include <string>

#include "transport/shm/shm_communicator.h"

namespace alltoallv {

template <class Body>
void ShmCommunicator::run(OpKind op, DType dtype, double timeout, Body&& body) {
    check_usable();
    const CallQueue::Turn turn(*queue_, size() > 1);
    check_usable();
    if (turn.overlaps()) {
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->fail(op, two_threads(op));
        throw two_threads(op);
    }
    copying_ = false;
    output_ = nullptr;
    for (PeerState& peer : peers_) peer.segments.refresh();
    peer_writer_.begin();
    scratch_writer_.begin();
    codes_writer_.begin();
    const auto close_failed = [&] {
        if (output_ != nullptr && control_->poisoned()) quarantine_output(output_, output_bytes_);
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->close(false, 0);
        if (control_->poisoned()) dump_flight_record();
    };
    const auto fail_with = [&](const Error& error) {
        control_->give_up(error, copying_);
        close_failed();
        throw error;
    };
    try {
        Row& mine = control_->open(op, dtype, timeout);
        const uint64_t bytes = body(mine);
        control_->confirm();
        if (output_ != nullptr && Arena::instance().has_cuts() &&
            Arena::instance().locate(output_, output_bytes_).segment() == 0)
            throw peer_lost(control_->describe_op() +
                            ": the output shares a page with that of an operator which has failed meanwhile");
        control_->close(true, bytes);
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
