/// \file deadlock.h
/// \brief Ranks that wait for each other in different domains: found, proven, and told to all of them.
///
/// A process in which no thread can go on before one of its operators does publishes these operators, and whom they
/// wait for, in the segments of all its domains, with the time since when that is so and the time it last was. It
/// passes on what the peers that it waits for have published. Processes of which each waits, in every operator, for
/// another of them stand still for good if there was one instant at which all did so: such a state cannot end by
/// itself. No message is lost on the way, for what a peer has published is seen at once in shared memory; between hosts
/// it travels behind the row that it waits with, its times as that host's clock has them at the latest and the
/// earliest. A message of which the peer has not made its half waits for a call of that peer, too, unless the peer has
/// messages under way that nobody waits for, which its process moves by itself.
#pragma once

#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/processors.h"
#include "control/layout.h"
#include "core/waiting.h"

namespace alltoallv {

class ControlPlane;

void write(WaitBoard& board, const std::vector<WaitRecord>& records);

/// Nothing while it is being written.
std::vector<WaitRecord> read(const WaitBoard& board);

/// Of this process; thread-safe.
class Deadlocks {
  public:
    static constexpr auto long_wait = std::chrono::milliseconds(400);

    static Deadlocks& instance();

    void add(ControlPlane& plane);
    void remove(ControlPlane& plane);

    /// One wait of the calling thread; it ends with this.
    class Wait {
      public:
        explicit Wait(const ControlPlane& plane) : plane_(plane) {}
        ~Wait() { ends(); }
        Wait(const Wait&) = delete;
        Wait& operator=(const Wait&) = delete;

        /// Later than `time` it waited for calls of these ranks. Told to others once that has lasted `long_wait`.
        void still(OpKind op, const std::vector<int>& missing, Clock::time_point time);
        void ends();

      private:
        const ControlPlane& plane_;
        Clock::time_point begun_{};
        std::optional<Waiting> waiting_;
    };

    /// Whether it is time to look.
    bool due();

    /// Publishes what this process waits for and judges. `callers`: the program's threads that may make calls.
    void look(const std::vector<uint64_t>& callers);

    /// Ends the domains in which ranks wait for each other, as far as what this process has published proves it.
    void judge();

  private:
    struct Told {
        uint64_t number;
        WaitRecord record;
    };
    using Place = std::pair<const ControlPlane*, uint64_t>;  // where a thread waits
    struct Process {
        int64_t since_ns, seen_ns;
        std::vector<WaitRecord> records;
    };
    using Known = std::map<int64_t, Process>;  // by WaitRecord::process

    bool stands_still(const std::vector<uint64_t>& callers, std::vector<uint64_t>& state, int64_t& seen) const;
    bool moves_messages() const;
    void publish();
    void hear();
    void judge_known();

    const Deadlocks* of_parent_ = nullptr;  // before a fork

    std::mutex mutex_;
    std::set<ControlPlane*> planes_;
    std::map<Place, Told> waits_;
    uint64_t numbers_ = 0;
    int64_t next_look_ns_ = 0, since_ns_ = 0;
    std::vector<uint64_t> state_;  // of the last look: which threads wait, in what
    std::vector<WaitRecord> mine_;
    Known known_;
};

}  // namespace alltoallv
