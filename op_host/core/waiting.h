/// \file waiting.h
/// \brief The threads of this process that can go on only once a collective does.
#pragma once

#include <cstdint>
#include <vector>

namespace alltoallv {

/// While it lives, the thread that made it waits, for a peer or for another thread's call.
class Waiting {
  public:
    Waiting();
    ~Waiting();
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    struct Thread {
        uint64_t id;       // pthread_self()
        bool calls;        // a queue's own, which makes calls
        bool waits;        // now
        uint64_t changes;  // how often that has changed
    };

    /// The calling thread counts among those that make calls.
    static void make_calls();

    /// Every thread that has waited or makes calls, and lives.
    static std::vector<Thread> threads();

    static uint64_t this_thread();
};

}  // namespace alltoallv
