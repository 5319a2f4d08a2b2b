#include "base/spare_descriptors.h"

#include <fcntl.h>

namespace alltoallv {

namespace {

// Never destroyed: holders may outlive static objects.
SpareDescriptors*& current() {
    static auto* spares = new SpareDescriptors;
    return spares;
}

}  // namespace

SpareDescriptors& SpareDescriptors::instance() {
    return *current();
}

// The parent's object may be locked, so it is kept and not destroyed.
void SpareDescriptors::forget() {
    for (UniqueFd& spare : current()->spares_) spare.reset();
    auto* const fresh = new SpareDescriptors;
    fresh->parents_ = current();
    current() = fresh;
}

void SpareDescriptors::hold() {
    {
        const std::lock_guard lock(mutex_);
        ++holders_;
    }
    refill();
}

void SpareDescriptors::let_go() {
    const std::lock_guard lock(mutex_);
    if (--holders_ == 0) spares_.clear();
}

bool SpareDescriptors::give_one() {
    const std::lock_guard lock(mutex_);
    if (spares_.empty()) return false;
    spares_.pop_back();
    return true;
}

void SpareDescriptors::refill() {
    const std::lock_guard lock(mutex_);
    while (holders_ > 0 && spares_.size() < kept) {
        UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        if (!fd) return;
        spares_.push_back(std::move(fd));
    }
}

}  // namespace alltoallv
