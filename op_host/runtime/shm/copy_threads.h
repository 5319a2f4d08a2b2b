/// \file copy_threads.h
/// \brief Threads that help a rank with large copies if there are more processors than ranks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace alltoallv {

/// Used by one thread at a time. The helpers are started by the first copy, and sleep between copies.
class CopyThreads {
  public:
    explicit CopyThreads(size_t helpers) : helpers_(helpers) {}
    ~CopyThreads();
    CopyThreads(const CopyThreads&) = delete;
    CopyThreads& operator=(const CopyThreads&) = delete;

    size_t shares() const { return helpers_ + 1; }

    /// Calls `share(0)` here and `share(1)` to `share(helpers)` in threads, which must not throw, at the same time.
    /// Returns, or throws the exception of `share(0)`, after all have ended.
    void run(const std::function<void(size_t)>& share);

  private:
    void help(size_t which);

    size_t helpers_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable called_;
    const std::function<void(size_t)>* share_ = nullptr;
    std::atomic<uint64_t> call_{0};  // number of the present call
    std::atomic<size_t> busy_{0};    // helpers that have not ended the call
    std::atomic<bool> closing_{false};
};

}  // namespace alltoallv
