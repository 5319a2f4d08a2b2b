/// \file waiting.h
/// \brief The threads of this process that can go on only once a collective does.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace alltoallv {

/// While it lives, the thread that made it waits, for a peer or for another thread's call.
class Waiting {
  public:
    using Time = std::chrono::steady_clock::time_point;

    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    /// At that time, after the wait had begun, it could not go on. What nobody says this of may have ended already, in
    /// a thread that has not been given a processor since.
    void still(Time time);

    /// Until there is a call to make, of which somebody else tells.
    void idle() { still(Time::max()); }

    /// From another thread: the one that waits can go on.
    void end();

    struct Thread {
        uint64_t id;       // pthread_self()
        bool calls;        // a queue's own, which makes calls
        bool waits;        // now
        uint64_t changes;  // how often that has changed
        Time still;        // when it last could not go on
    };

    /// The calling thread counts among those that make calls.
    static void make_calls();

    /// Every thread that has waited or makes calls, and lives.
    static std::vector<Thread> threads();

    static uint64_t this_thread();

  private:
    struct Slot;
    struct Slots;
    static Slots& slots();
    static Slot& mine();

    Slot& slot_;
    bool ended_ = false;
};

}  // namespace alltoallv
