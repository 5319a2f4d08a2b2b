#include "runtime/base/fork_generation.h"

#include <pthread.h>

namespace alltoallv {
namespace {

[[maybe_unused]] const int watching =
    pthread_atfork(nullptr, nullptr, [] { forks_above.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

constinit std::atomic<uint32_t> forks_above{0};

}  // namespace alltoallv
