#include "control/controlled_communicator.h"

namespace alltoallv {

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

void ControlledCommunicator::abort(const std::string& reason) {
    if (is_inherited()) return;
    const std::lock_guard lock(lifetime_);
    if (control_ == nullptr) return;
    control_->poison(PoisonKind::aborted, "rank " + std::to_string(rank()) + " aborted: " + reason);
}

void ControlledCommunicator::check_counts(int from, int to, int64_t sent, int64_t expected) const {
    if (sent == expected) return;
    throw peer_mismatch(control_->describe_op() + ": rank " + std::to_string(from) + " sends " + std::to_string(sent) +
                        " elements to rank " + std::to_string(to) + ", which expects " + std::to_string(expected));
}

void ControlledCommunicator::close_control() {
    const std::lock_guard lock(lifetime_);
    final_record_ = control_->flight_record();
    control_.reset();
}

std::string ControlledCommunicator::flight_record() const {
    const std::lock_guard lock(lifetime_);
    return control_ == nullptr ? final_record_ : control_->flight_record();
}

}  // namespace alltoallv
