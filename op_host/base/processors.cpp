#include "base/processors.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
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

}  // namespace alltoallv
