#include "runtime/shm/copy_threads.h"

#include <sched.h>

#include <exception>

#include "runtime/base/processors.h"
#include "runtime/base/quiet_thread.h"

namespace alltoallv {
namespace {

/// Pauses before a helper sleeps: the copies of one exchange follow each other, and waking up takes as long as a copy
/// of half a MiB.
constexpr int idle_spins = 2000;

}  // namespace

CopyThreads::~CopyThreads() {
    {
        const std::lock_guard lock(mutex_);
        closing_.store(true);
    }
    called_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void CopyThreads::run(const std::function<void(size_t)>& share) {
    for (size_t i = threads_.size() + 1; i <= helpers_; ++i)
        threads_.push_back(quiet_thread("alltoallv-copy", "copies", [this, i] { help(i); }));
    share_ = &share;
    busy_.store(helpers_, std::memory_order_relaxed);
    {
        const std::lock_guard lock(mutex_);
        call_.fetch_add(1, std::memory_order_release);
    }
    called_.notify_all();
    std::exception_ptr error;
    try {
        share(0);
    } catch (...) {
        error = std::current_exception();
    }
    while (busy_.load(std::memory_order_acquire) > 0) sched_yield();  // they write into the caller's memory
    if (error) std::rethrow_exception(error);
}

void CopyThreads::help(size_t which) {
    for (uint64_t seen = 0;; ++seen) {
        const auto due = [&] { return call_.load(std::memory_order_acquire) != seen || closing_.load(); };
        for (int i = 0; i < idle_spins && !due(); ++i) cpu_pause();
        if (!due()) {
            std::unique_lock lock(mutex_);
            called_.wait(lock, due);
        }
        if (closing_.load()) return;
        (*share_)(which);
        busy_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace alltoallv
