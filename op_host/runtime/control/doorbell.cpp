#include "runtime/control/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace alltoallv {

// The futexes are shared between processes, hence without FUTEX_PRIVATE_FLAG.
void Doorbell::wake() {
    bell_.rung.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &bell_.rung, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Doorbell::futex_wait(uint32_t seen, int limit_ms) {
    const timespec limit{limit_ms / 1000, (limit_ms % 1000) * 1000000L};
    return syscall(SYS_futex, &bell_.rung, FUTEX_WAIT, seen, &limit, nullptr, 0) == 0 || errno != ETIMEDOUT;
}

}  // namespace alltoallv
