#include "runtime/control/controlled_communicator.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>

#include "runtime/base/unique_fd.h"
#include "runtime/core/mismatch.h"

namespace alltoallv {

bool ControlledCommunicator::usable() const {
    if (is_inherited()) return false;
    const std::lock_guard lock(lifetime_);
    return control_ != nullptr && !control_->poisoned();
}

void ControlledCommunicator::set_timeout(double seconds) {
    const std::lock_guard lock(lifetime_);
    if (control_ != nullptr) control_->set_timeout(seconds);
}

void ControlledCommunicator::fail(OpKind op, const Error& error, bool of_caller) {
    check_usable();
    queue_->run_or_submit([this, op, error, of_caller] {
        check_usable();  // it may have been destroyed by now
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->fail(op, error, of_caller);
    });
}

void ControlledCommunicator::abort(const std::string& reason) {
    if (is_inherited()) return;
    const auto control = shared_control();
    if (!control) return;
    control->poison(PoisonKind::aborted,
                    "rank " + std::to_string(control->reported_rank(rank())) + " aborted: " + reason);
}

std::vector<int64_t> ControlledCommunicator::processes() const {
    std::vector<int64_t> found;
    const std::lock_guard lock(lifetime_);
    for (int j = 0; control_ != nullptr && j < size(); ++j) found.push_back(control_->process_of(j));
    return found;
}

void ControlledCommunicator::end_with(const ControlPlane::Poison& poison) {
    if (const auto control = shared_control()) control->receive_poison(poison);
}

/// What ends is told to the part of a communicator, and by a part to the whole, so that no lock may be held meanwhile.
std::shared_ptr<ControlPlane> ControlledCommunicator::shared_control() const {
    const std::lock_guard lock(lifetime_);
    return control_;
}

void ControlledCommunicator::part_of_this(ControlledCommunicator& part) {
    part.control_->become_part_of(*control_);
    part.control_->share_poison([whole = std::weak_ptr(control_)](const ControlPlane::Poison& poison) {
        if (const auto there = whole.lock()) there->receive_poison(poison);
    });
}

void ControlledCommunicator::check_counts(int from, int to, int64_t sent, int64_t expected) const {
    if (sent == expected) return;
    throw counts_disagree(control_->describe_op(), joined("rank ", from), sent, joined("rank ", to), expected);
}

void ControlledCommunicator::write_flight_record() {
    const char* folder = std::getenv("ALLTOALLV_FLIGHT_DIR");
    if (!control_->poisoned() || folder == nullptr || *folder == 0) return;
    std::string start = domain();
    std::ranges::replace(start, '/', '_');
    start = std::string(folder) + "/flight-" + start + "-rank" + std::to_string(rank());
    for (int number = 1; record_path_.empty(); ++number) {
        const std::string path = start + (number == 1 ? "" : "-" + std::to_string(number)) + ".json";
        if (const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)); fd)
            record_path_ = path;
        else if (errno != EEXIST)
            return;
    }
    std::ofstream(record_path_) << control_->flight_record() << "\n";
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
