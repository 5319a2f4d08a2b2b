#include "comm/crowd.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace alltoallv {
namespace {

/// Threads of this host that run or could run now; 0 if that is not to be learnt.
int runnable_threads() {
    std::FILE* file = std::fopen("/proc/loadavg", "re");
    if (file == nullptr) return 0;
    int runnable = 0;
    if (std::fscanf(file, "%*f %*f %*f %d/", &runnable) != 1) runnable = 0;
    std::fclose(file);
    return runnable;
}

}  // namespace

bool Crowd::lost_slice() {
    // It may have been a peer at work. The count is of the whole host: of no use where this job has a share of it only.
    const bool whole_host = cpus_ >= static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    if (const int runnable = runnable_threads(); whole_host && runnable > 0 && runnable <= ranks_) return false;
    period_ = tried_ < 2 * period_ ? std::min(2 * period_, most) : fewest;  // still crowded, or again
    sleeps_ = period_;
    tried_ = 0;
    return true;
}

}  // namespace alltoallv
