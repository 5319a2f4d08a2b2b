#include "comm/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <string>

namespace alltoallv {

int quota_cpus() {
    int cpus = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    std::ifstream quota_file("/sys/fs/cgroup/cpu.max");
    std::string quota;
    double period = 0;
    if (quota_file >> quota >> period && quota != "max" && period > 0) {
        const double share = std::strtod(quota.c_str(), nullptr) / period;
        if (share > 0) cpus = std::min(cpus, static_cast<int>(std::ceil(share)));
    }
    return std::max(cpus, 1);
}

int usable_cpus() {
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) return quota_cpus();
    return std::max(1, std::min(quota_cpus(), CPU_COUNT(&mask)));
}

CpuSet affinity() {
    CpuSet result{};
    cpu_set_t mask;
    static_assert(sizeof mask == sizeof result);
    if (sched_getaffinity(0, sizeof mask, &mask) == 0) std::memcpy(result.data(), &mask, sizeof mask);
    return result;
}

// The futexes are shared between processes, hence without FUTEX_PRIVATE_FLAG.
void Doorbell::wake() {
    header_.doorbell.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &header_.doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Doorbell::futex_wait(uint32_t seen, int limit_ms) {
    const timespec limit{limit_ms / 1000, (limit_ms % 1000) * 1000000L};
    syscall(SYS_futex, &header_.doorbell, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

}  // namespace alltoallv
