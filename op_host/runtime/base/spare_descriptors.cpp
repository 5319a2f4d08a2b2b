#include "runtime/base/spare_descriptors.h"

#include <fcntl.h>

namespace alltoallv {

void SpareDescriptors::hold() {
    {
        const std::lock_guard lock(mutex);
        ++holders_;
    }
    refill();
}

void SpareDescriptors::release() {
    const std::lock_guard lock(mutex);
    if (--holders_ == 0) spares_.clear();
}

bool SpareDescriptors::give_one() {
    const std::lock_guard lock(mutex);
    if (spares_.empty()) return false;
    spares_.pop_back();
    return true;
}

void SpareDescriptors::lend(bool begins) {
    const std::lock_guard lock(mutex);
    lenders_ += begins ? 1 : -1;
    if (begins) spares_.clear();
}

/// Not while they are lent: another thread would take them from the borrower.
void SpareDescriptors::refill() {
    const std::lock_guard lock(mutex);
    while (holders_ > 0 && lenders_ == 0 && spares_.size() < kept) {
        UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        if (!fd) return;
        spares_.push_back(std::move(fd));
    }
}

}  // namespace alltoallv
