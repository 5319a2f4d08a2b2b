#include "runtime/core/blocked_thread.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace alltoallv {

struct BlockedThread::Slot {
    const uint64_t id = this_thread();
    std::atomic<bool> calls{false};
    std::atomic<uint32_t> depth{0};
    std::atomic<uint64_t> changes{0};
    std::atomic<Time> last_blocked{Time::min()};
};

struct BlockedThread::Slots {
    std::mutex mutex;
    std::vector<Slot*> all;
    pthread_key_t ends;  // its destructor runs when a thread ends; a thread_local would leak it in forked children

    static inline Slots* current = nullptr;

    static void forget(void* slot) {
        const std::lock_guard lock(current->mutex);
        std::erase(current->all, slot);
        delete static_cast<Slot*>(slot);
    }

    static void forget_other_threads() {
        std::erase_if(current->all, [](const Slot* slot) {
            const bool other = slot->id != this_thread();
            if (other) delete slot;
            return other;
        });
        current->mutex.unlock();
    }
};

// Never destroyed, because threads may end after static objects. A forked child has one thread.
BlockedThread::Slots& BlockedThread::slots() {
    static std::once_flag once;
    std::call_once(once, [] {
        Slots::current = new Slots;
        pthread_key_create(&Slots::current->ends, Slots::forget);
        pthread_atfork([] { Slots::current->mutex.lock(); }, [] { Slots::current->mutex.unlock(); },
                       Slots::forget_other_threads);
    });
    return *Slots::current;
}

BlockedThread::Slot& BlockedThread::own_slot() {
    thread_local Slot* slot = nullptr;
    if (slot == nullptr) {
        slot = new Slot;
        pthread_setspecific(slots().ends, slot);
        const std::lock_guard lock(slots().mutex);
        slots().all.push_back(slot);
    }
    return *slot;
}

BlockedThread::BlockedThread() : slot_(own_slot()) {
    slot_.last_blocked.store(Time::min());
    slot_.changes.fetch_add(1);
    slot_.depth.fetch_add(1);
}

BlockedThread::~BlockedThread() {
    if (!ended_) end();
}

void BlockedThread::note_blocked(Time time) {
    slot_.last_blocked.store(time);
}

void BlockedThread::end() {
    ended_ = true;
    slot_.depth.fetch_sub(1);
    slot_.changes.fetch_add(1);
}

void BlockedThread::make_calls() {
    own_slot().calls.store(true);
}

std::vector<BlockedThread::Thread> BlockedThread::threads() {
    std::vector<Thread> threads_seen;
    const std::lock_guard lock(slots().mutex);
    for (const Slot* slot : slots().all)
        threads_seen.push_back(
            {slot->id, slot->calls.load(), slot->depth.load() > 0, slot->changes.load(), slot->last_blocked.load()});
    return threads_seen;
}

uint64_t BlockedThread::this_thread() {
    return static_cast<uint64_t>(pthread_self());
}

}  // namespace alltoallv
