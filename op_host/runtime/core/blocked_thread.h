/// \file blocked_thread.h
/// \brief The threads of this process that can continue only when a collective does.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace alltoallv {

/// While this object lives, the thread that made it waits, for a peer or for another thread's call.
class BlockedThread {
  public:
    using Time = std::chrono::steady_clock::time_point;

    BlockedThread();
    ~BlockedThread();
    BlockedThread(const BlockedThread&) = delete;
    BlockedThread& operator=(const BlockedThread&) = delete;

    /// Reports that it still waited at that time. A wait without such a report may have ended already, in a thread that
    /// has not got a processor since.
    void note_blocked(Time time);

    /// Waits until there is a call to make, which another thread announces.
    void idle() { note_blocked(Time::max()); }

    /// Called from another thread: the waiting one can continue.
    void end();

    struct Thread {
        uint64_t id;        // pthread_self()
        bool calls;         // a queue's own thread, which makes calls
        bool waits;         // now
        uint64_t changes;   // number of changes of `waits`
        Time last_blocked;  // when it last could not continue
    };

    /// Counts the calling thread among those that make calls.
    static void make_calls();

    /// Returns every living thread that has waited or makes calls.
    static std::vector<Thread> threads();

    static uint64_t this_thread();

  private:
    struct Slot;
    struct Slots;
    static Slots& slots();
    static Slot& own_slot();

    Slot& slot_;
    bool ended_ = false;
};

}  // namespace alltoallv
