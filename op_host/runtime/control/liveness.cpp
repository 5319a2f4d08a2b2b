#include "runtime/control/liveness.h"

#include <poll.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <string_view>

#include "runtime/base/error.h"
#include "runtime/base/place.h"
#include "runtime/base/process_state.h"
#include "runtime/control/deadlock.h"
#include "runtime/core/hooks.h"

namespace alltoallv {
namespace {

struct Losses {
    std::mutex mutex;
    std::set<int64_t> notified, reported;

    static Losses& instance() { return ProcessState<Losses>::get(); }
};

}  // namespace

std::string Liveness::end_of(int64_t process) {
    static const uint32_t here = place_number(this_place());
    const auto pid = static_cast<uint32_t>(process);
    if (process == 0 || pid == 0) return {};
    if (static_cast<uint32_t>(process >> 32) != here) return Deadlocks::instance().loss_of(process);
    return std::string_view(process_state(pid)) == "gone" ? "its process has ended" : "";
}

void Liveness::report(int64_t process, const std::string& loss) {
    {
        const std::lock_guard lock(Losses::instance().mutex);
        if (!Losses::instance().reported.insert(process).second) return;
    }
    const std::string line = "alltoallv: " + loss + "\n";
    pollfd standard_error{STDERR_FILENO, POLLOUT, 0};  // no thread may stop here because nobody reads it
    if (::poll(&standard_error, 1, 0) != 1 || (standard_error.revents & POLLOUT) == 0) return;
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

void Liveness::tell(int64_t process) {
    const std::lock_guard lock(Losses::instance().mutex);
    Losses::instance().notified.insert(process);
}

std::vector<int64_t> Liveness::untold(std::vector<int64_t> processes) {
    const std::lock_guard lock(Losses::instance().mutex);
    for (int64_t& process : processes)
        if (Losses::instance().notified.contains(process)) process = 0;
    return processes;
}

void Liveness::check(const std::vector<int64_t>& processes, int rank, const std::string& domain) {
    // Who is lost to a communicator has been lost first: others may have ended since, because of that.
    const auto end_of_rank = [&](size_t j, bool by_peers) {
        if (static_cast<int>(j) == rank) return std::string();
        return by_peers ? Deadlocks::instance().loss_of(processes[j]) : end_of(processes[j]);
    };
    for (size_t i = 0; i < 2 * processes.size(); ++i) {
        const size_t j = i % processes.size();
        const std::string how = end_of_rank(j, i < processes.size());
        if (how.empty()) continue;
        tell(processes[j]);
        throw peer_lost(4016, "rank ", j, " (pid ", static_cast<uint32_t>(processes[j]),
                        ") was lost before it joined domain '", domain, "': ", how);
    }
}

std::function<void()> Liveness::poll(const CommunicatorOptions& options) {
    return [processes = options.replaceable ? untold(options.processes) : options.processes, rank = options.rank,
            domain = options.domain] {
        if (hooks().poll) hooks().poll();
        check(processes, rank, domain);
    };
}

}  // namespace alltoallv
