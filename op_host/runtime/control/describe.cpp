/// \file describe.cpp
/// \brief Names of operators and ranks in messages.
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

#include "runtime/control/control.h"
#include "runtime/control/liveness.h"
#include "runtime/control/peer_words.h"

namespace alltoallv {

const char* process_state(uint32_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    if (!file.is_open() && kill(static_cast<pid_t>(pid), 0) == 0) return "running";  // no descriptor is left to read it
    std::string line;
    if (!std::getline(file, line)) return "gone";
    const size_t paren = line.rfind(')');  // the command name may itself contain parentheses
    if (paren == std::string::npos || paren + 2 >= line.size()) return "gone";
    std::istringstream rest(line.substr(paren + 2));
    char state = 0;
    int64_t unused = 0;
    uint64_t flags = 0;  // the ninth field
    rest >> state;
    for (int field = 4; field < 9; ++field) rest >> unused;
    rest >> flags;
    // Its descriptors close, so that its peers see its end, a moment before it becomes a zombie.
    constexpr uint64_t exiting = 4;  // PF_EXITING
    if (state == 'Z' || state == 'X' || (flags & exiting) != 0) return "gone";
    return state == 'T' || state == 't' ? "stopped" : "running";
}

std::string ControlPlane::describe_op(OpKind op) const {
    if (const ControlPlane& all = whole(); &all != this) return all.describe_op();
    if (op == OpKind::none) return "domain '" + domain() + "'";
    return "operator #" + std::to_string(seq_) + " " + std::string(name_of(op)) + " of domain '" + domain() + "'";
}

std::string ControlPlane::describe_rank(int peer) const {
    if (const ControlPlane& all = whole(); &all != this) return all.describe_rank(reported_rank(peer));
    const RankStatus& peer_status = status(peer);
    const uint32_t pid = peer_status.pid.load(std::memory_order_relaxed);
    const std::string host = peer_text(peer_status.host, sizeof peer_status.host);
    const bool silent = peer_status.silent.load(std::memory_order_relaxed) != 0;
    const std::string state = has_left(peer) ? "left"
                              : host.empty() ? process_state(pid)
                                             : std::string("on another host") + (silent ? ", does not answer" : "");
    std::string text = "rank " + std::to_string(reported_rank(peer)) + " (pid " + std::to_string(pid) +
                       (host.empty() ? "" : " of " + host) + ", " + state;
    uint64_t last = 0, what = 0;
    for (const FlightEntry& entry : peer_status.flight) {
        const uint64_t seq = entry.seq.load(std::memory_order_relaxed);
        if (seq <= last) continue;
        last = seq;
        what = entry.what.load(std::memory_order_relaxed);
    }
    if (last == 0) return text + (host.empty() ? ", no operator yet)" : ")");  // other hosts' records are not here
    return text + ", last operator #" + std::to_string(last) + " " +
           std::string(name_of(static_cast<OpKind>(what >> 40))) + ")";
}

std::string ControlPlane::describe_wait(const std::string& waited, Clock::time_point since, const std::string& what,
                                        const std::vector<int>& ranks) const {
    if (const ControlPlane& all = whole(); &all != this) {
        std::vector<int> named;
        for (const int j : ranks) named.push_back(reported_rank(j));
        return all.describe_wait(waited, since, what, named);
    }
    std::vector<int> guilty;  // a rank that does not answer hides others, which may have come
    for (const int j : ranks) {
        const int by = hosts ? hosts->hidden_by(j) : j;
        if (std::ranges::find(guilty, by) == guilty.end()) guilty.push_back(by);
    }
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, " %.1f s in ", seconds_since(since));
    std::string text = "rank " + std::to_string(reported_rank(rank())) + " " + waited + seconds + what + " for ";
    for (const int j : guilty) text += (j == guilty[0] ? "" : ", ") + describe_rank(j);
    return text;
}

std::vector<int> ControlPlane::peers_of(int peer) const {
    if (peer >= 0) return {peer};
    std::vector<int> ranks;
    for (int j = 0; j < size(); ++j)
        if (j != rank()) ranks.push_back(j);
    return ranks;
}

}  // namespace alltoallv
