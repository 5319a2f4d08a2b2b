#include "runtime/control/oversubscription.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace alltoallv {

Oversubscription::Oversubscription(int ranks)
    : ranks_(ranks), cpus_(usable_cpus()), loadavg_(open("/proc/loadavg", O_RDONLY | O_CLOEXEC)) {}

bool Oversubscription::was_preempted() {
    static const auto online = sysconf(_SC_NPROCESSORS_ONLN);  // reads a file
    // A peer may have been at work. The count is for the whole host: useless if this job has only a share of it.
    if (cpus_ >= static_cast<int>(online)) {
        const int runnable = runnable_threads();
        if (runnable > 0 && runnable <= ranks_) return false;
    }
    period_ = tried_ < 2 * period_ ? std::min(2 * period_, most) : fewest;  // still oversubscribed, or again
    sleeps_ = period_;
    tried_ = 0;
    return true;
}

int Oversubscription::runnable_threads() {
    char text[128];
    const ssize_t length = pread(loadavg_.get(), text, sizeof text - 1, 0);
    if (length < 0) return 0;
    text[length] = '\0';
    int runnable = 0;
    return std::sscanf(text, "%*f %*f %*f %d/", &runnable) == 1 ? runnable : 0;
}

}  // namespace alltoallv
