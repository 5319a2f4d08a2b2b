#include "runtime/event.h"

namespace alltoallv::emulator {

void Record::complete(int failure) {
    {
        const std::lock_guard lock(mutex_);
        done_ = true;
        failure_ = failure;
        time_ = std::chrono::steady_clock::now();
    }
    completed_.notify_all();
}

bool Record::wait(double seconds) {
    std::unique_lock lock(mutex_);
    const auto done = [this] { return done_; };
    if (seconds >= 0) return completed_.wait_for(lock, std::chrono::duration<double>(seconds), done);
    completed_.wait(lock, done);
    return true;
}

std::shared_ptr<Record> Event::renew(std::weak_ptr<Stream> source) {
    const std::lock_guard lock(mutex_);
    return latest_ = std::make_shared<Record>(std::move(source));
}

std::shared_ptr<Record> Event::latest() const {
    const std::lock_guard lock(mutex_);
    return latest_;
}

}  // namespace alltoallv::emulator
