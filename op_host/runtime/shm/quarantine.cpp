#include "runtime/shm/quarantine.h"

#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/base/error.h"
#include "runtime/bootstrap/reactor.h"

namespace alltoallv {
namespace {

constexpr long review_ms = 50;

}  // namespace

bool Quarantine::add(const char* data, size_t bytes, std::function<bool()> clear) {
    if (clear()) return false;
    ranges_.push_back({data, bytes, std::move(clear)});
    if (!timer_) watch();
    return true;
}

bool Quarantine::covers(const char* data, size_t bytes) const {
    return std::any_of(ranges_.begin(), ranges_.end(), [&](const Range& range) {
        return data < range.data + range.bytes && range.data < data + bytes;
    });
}

void Quarantine::settle() {
    std::erase_if(ranges_, [](const Range& range) { return range.clear(); });
}

// Nobody announces a peer's promise; without the timer the memory, and the descriptors that watch the peers, would stay
// until the owner happens to be used again.
void Quarantine::watch() {
    timer_ = UniqueFd(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (!timer_) return;
    const timespec period{0, review_ms * 1'000'000};
    const itimerspec schedule{period, period};
    timerfd_settime(timer_.get(), 0, &schedule, nullptr);
    try {
        Reactor::instance().add(timer_.get(), [review = review_, timer = timer_.get()](uint32_t) {
            uint64_t expirations;
            [[maybe_unused]] const ssize_t got = ::read(timer, &expirations, sizeof expirations);
            review();
        });
    } catch (const Error&) {
        timer_.reset();  // the next use of the owner makes the review
    }
}

void Quarantine::rest() {
    if (!timer_ || !ranges_.empty()) return;
    Reactor::instance().remove(timer_.get());
    timer_.reset();
}

}  // namespace alltoallv
