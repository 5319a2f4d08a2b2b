#include "control/controlled_communicator.h"

namespace alltoallv {

void ControlledCommunicator::check_usable() const {
    if (is_inherited()) throw inherited();
    if (destroyed_.load(std::memory_order_acquire)) throw destroyed();
}

bool ControlledCommunicator::usable() const {
    if (is_inherited()) return false;
    const std::lock_guard lock(lifetime_);
    return control_ != nullptr && !control_->poisoned();
}

void ControlledCommunicator::fail(OpKind op, const Error& error) {
    check_usable();
    queue_->run_or_submit([this, op, error] {
        check_usable();  // it may have been destroyed by now
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->fail(op, error);
    });
}

WorkPtr ControlledCommunicator::submit(std::function<void()> call) {
    check_usable();
    return queue_->submit(std::move(call));
}

void ControlledCommunicator::abort(const std::string& reason) {
    if (is_inherited()) return;
    const std::lock_guard lock(lifetime_);
    if (control_ == nullptr) return;
    control_->poison(PoisonKind::aborted, "rank " + std::to_string(rank()) + " aborted: " + reason);
}

void ControlledCommunicator::close_control() {
    const std::lock_guard lock(lifetime_);
    final_record_ = control_->flight_record();
    control_.reset();
}

Stats ControlledCommunicator::stats() const {
    return {{"operators", operators_.load(std::memory_order_relaxed)},
            {"failed_operators", failed_.load(std::memory_order_relaxed)}};
}

std::string ControlledCommunicator::flight_record() const {
    const std::lock_guard lock(lifetime_);
    return control_ == nullptr ? final_record_ : control_->flight_record();
}

}  // namespace alltoallv
