/// \file deadlock.h
/// \brief Finds and proves that ranks wait for each other in different domains, and informs all of them.
///
/// If all threads of a process wait for operators, the process publishes these operators and the ranks for which they
/// wait in the segments of all its domains, with the time when this began and the time when it was last true. It also
/// passes on the records of the peers that it waits for. If there was one instant at which each of several processes
/// waited, in every operator, for another of them, they wait for ever, unless one of them dies: they are told if that
/// has lasted for 0.1 s and none is lost, so that a loss on its way comes first. No record is missed: in shared memory
/// a peer's record is visible at once; between hosts it travels after the row that it waits with, with bounds of its
/// times on the receiver's clock. A message whose peer has not made its half also waits for a call of that peer, unless
/// the peer has messages under way that no thread waits for, which its process moves by itself.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/processors.h"
#include "runtime/control/layout.h"
#include "runtime/core/blocked_thread.h"

namespace alltoallv {

class ControlPlane;

void write(WaitBoard& board, const std::vector<WaitRecord>& records);

/// Returns nothing while the board is being written.
std::vector<WaitRecord> read(const WaitBoard& board);

inline std::span<const WaitRecord::For> missing_of(const WaitRecord& record) {
    return {record.missing, record.ranks};
}

inline bool is_message(OpKind op) {
    return op == OpKind::send || op == OpKind::recv;
}

/// Describes who waits for whom, from the wait `from` through the waits `all` back to its process.
std::string chain_text(const WaitRecord& from, const std::vector<WaitRecord>& all);

/// One object per process; thread-safe.
class Deadlocks {
  public:
    static constexpr auto long_wait = std::chrono::milliseconds(400);

    static Deadlocks& instance();

    void add(ControlPlane& plane);
    void remove(ControlPlane& plane);

    /// Returns how a process has ended in the view of one of the domains; empty if it may live.
    std::string loss_of(int64_t process);

    /// `answer` is called when this process has waited for long: it lets messages of peers be answered.
    void answer_by(const ControlPlane& plane, std::function<void()> answer);

    /// One wait of the calling thread; it ends when this object is destroyed.
    class Wait {
      public:
        explicit Wait(const ControlPlane& plane) : plane_(plane) {}
        ~Wait() { ends(); }
        Wait(const Wait&) = delete;
        Wait& operator=(const Wait&) = delete;

        /// Reports that it still waited for calls of these ranks after `time`. Published `long_wait` after its
        /// beginning: the first report, or `since` if that was earlier.
        /// The wait ends by itself after `limit` seconds.
        void note_blocked(OpKind op, const std::vector<int>& missing, double limit, Clock::time_point time,
                          Clock::time_point since = Clock::time_point::max());
        void ends();

      private:
        const ControlPlane& plane_;
        Clock::time_point begun_{};
        std::optional<BlockedThread> blocked_;
    };

    /// True if it is time to look.
    bool due();

    /// Publishes what this process waits for, and judges. `callers` are the program's threads that may make calls.
    void look(const std::vector<uint64_t>& callers);

    /// This process has been told of a deadlock: ends the other domains in which ranks wait for each other, as far as
    /// what this process has published proves it. Others may wait for it where it does not know: see below.
    void judge(const std::string& reason);

    /// Returns the deadlock that this process was told of since its last operator in this domain; empty if there was
    /// none. Ranks that still wait there must not take it for lost.
    std::string reason_to_leave(const ControlPlane& plane);

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
    using Known = std::map<int64_t, Process>;  // key: WaitRecord::process

    bool stands_still(const std::vector<uint64_t>& callers, std::vector<uint64_t>& state, int64_t& seen) const;
    bool moves_messages() const;
    void publish();
    void hear();
    bool ends_by_loss(const WaitRecord& record) const;
    static bool ends_by_itself(const std::vector<WaitRecord>& cycle);
    void judge_known(int64_t together);

    const Deadlocks* of_parent_ = nullptr;  // before a fork

    std::mutex mutex_;
    std::set<ControlPlane*> planes_;
    std::map<const ControlPlane*, std::function<void()>> answers_;
    std::map<Place, Told> waits_;
    std::map<const ControlPlane*, std::pair<uint64_t, std::string>> reasons_;  // with the last operator then
    uint64_t numbers_ = 0;
    int64_t next_look_ns_ = 0, since_ns_ = 0;
    std::vector<uint64_t> state_;  // of the last look: which threads wait, and in what
    std::vector<WaitRecord> mine_;
    Known known_;
};

}  // namespace alltoallv
