/// \file controlled_communicator.h
/// \brief The common part of communicators over a control plane: one operator, and the state after a failure.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/control/control.h"
#include "runtime/core/communicator.h"
#include "runtime/core/options.h"

namespace alltoallv {

class ControlledCommunicator : public Communicator {
  public:
    void fail(OpKind op, const Error& error, bool of_caller) override;
    void abort(const std::string& reason) override;
    bool usable() const override;
    void set_timeout(double seconds) override;
    std::string flight_record() const override;
    std::vector<int64_t> processes() const override;

    /// Ends with this error, which another communicator of the process has met; after `destroy` too late.
    void end_with(const ControlPlane::Poison& poison);

  protected:
    explicit ControlledCommunicator(const CommunicatorOptions& options)
        : Communicator(options.rank, options.size, options.domain, CallQueue::Waiters::help), options_(options) {
        queue_->on_interrupt = [this] { abort("interrupted while waiting for its turn"); };
    }

    /// Runs one operator in its turn: `body` fills the row, agrees and moves the data; it may return the number of
    /// bytes moved. After an UnmetFailure it runs again as the next operator; if it `moves` nothing, its caller does
    /// that.
    template <class Body>
    void run(OpKind op, DType dtype, double timeout, bool moves, Body&& body);
    /// Called before each operator.
    virtual void begin_operator(double /*timeout*/) {}
    /// Throws if the data that an operator has moved are not valid.
    virtual void check_moved() const {}
    /// Called after a failed operator, before the peers are informed.
    virtual void before_failure() {}

    /// Throws if a rank sends another number of elements than its receiver expects. Also needed with `check` off: data
    /// of a wrong size would be written where they do not belong.
    void check_counts(int from, int to, int64_t sent, int64_t expected) const;

    /// Makes `part` carry out operators of this one: the failure of either is one of both. `share_poison` on this one's
    /// plane tells the part; until `part` is destroyed, this one stays.
    void part_of_this(ControlledCommunicator& part);

    /// Ends use of the control plane; the flight record stays.
    void close_control();
    std::shared_ptr<ControlPlane> shared_control() const;

    CommunicatorOptions options_;
    std::shared_ptr<ControlPlane> control_;
    bool moving_ = false;  // data are moving: the peers cannot continue without this rank

  private:
    /// Writes the flight record of a poisoned communicator to ALLTOALLV_FLIGHT_DIR: into a file of its own, beside
    /// the records of communicators that have failed before under the same name.
    void write_flight_record();

    std::string record_path_;      // the file, once it is written
    std::string final_record_;     // of the flight recorder, once destroyed
    mutable std::mutex lifetime_;  // guards control_ against `close_control`, for calls outside the turns
};

template <class Body>
void ControlledCommunicator::run(OpKind op, DType dtype, double timeout, bool moves, Body&& body) {
    if (has_ended()) check_usable();
    const CallQueue::Slot slot(*queue_, size() > 1);
    if (has_ended()) check_usable();  // destroyed meanwhile
    if (slot.overlaps()) {
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->fail(op, two_threads(op), false);
        throw two_threads(op);
    }
    moving_ = false;
    const auto close_failed = [&] {
        before_failure();
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->close(false, 0);
        write_flight_record();
    };
    const auto fail_with = [&](const Error& error) {
        control_->give_up(error, moving_);
        close_failed();
    };
    const auto once = [&] {
        begin_operator(timeout);
        OwnRow& own_row = control_->open(op, dtype, timeout);
        uint64_t bytes = 0;
        if constexpr (std::is_void_v<std::invoke_result_t<Body&, OwnRow&>>)
            body(own_row);
        else
            bytes = body(own_row);
        control_->confirm();
        check_moved();
        control_->close(true, bytes);
        return true;
    };
    const auto met = [&] {
        try {
            return once();
        } catch (const UnmetFailure&) {
            if (!moves) throw;
            control_->close(false, 0);
            return false;
        }
    };
    try {
        while (!met()) {
        }
    } catch (const Error& error) {
        fail_with(error);
        throw;
    } catch (const std::bad_alloc&) {
        const Error error = resource_error(5017, "no memory for what " + control_->describe_op() + " needs");
        fail_with(error);
        throw error;
    } catch (...) {
        control_->poison(PoisonKind::aborted, "rank " + std::to_string(control_->reported_rank(rank())) +
                                                  " was interrupted in " + control_->describe_op());
        close_failed();
        throw;
    }
    operators_.store(operators_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);  // it has the turn
    if (slot.is_joined()) throw two_threads(op);  // what has arrived may have been meant for the other call
}

}  // namespace alltoallv
