#include "runtime/event.h"

#include "acl/acl_api.h"
#include "runtime/handles.h"

namespace alltoallv::emulator {
namespace {

Handles<Event>& events =
    *new Handles<Event>("event", 0xE7E0, acl_error_rt_param_invalid);  // never destroyed: threads use it to the end

}  // namespace

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

bool Record::done() const {
    const std::lock_guard lock(mutex_);
    return done_;
}

int Record::failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
}

Record::Time Record::time() const {
    const std::lock_guard lock(mutex_);
    return time_;
}

std::shared_ptr<Record> Event::renew(std::weak_ptr<Stream> source) {
    const std::lock_guard lock(mutex_);
    return latest_ = std::make_shared<Record>(std::move(source));
}

std::shared_ptr<Record> Event::latest() const {
    const std::lock_guard lock(mutex_);
    return latest_;
}

void* add_event() {
    return events.add(std::make_shared<Event>());
}

EventPtr event_of(void* handle) {
    return events.get(handle);
}

void remove_event(void* handle) {
    events.remove(handle);
}

}  // namespace alltoallv::emulator
