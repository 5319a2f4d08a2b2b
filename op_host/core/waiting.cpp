#include "core/waiting.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace alltoallv {
namespace {

struct Slot {
    const uint64_t id = Waiting::this_thread();
    std::atomic<bool> calls{false};
    std::atomic<uint32_t> depth{0};
    std::atomic<uint64_t> changes{0};
};

struct Slots {
    std::mutex mutex;
    std::vector<Slot*> all;
    pthread_key_t ends;  // whose destructor a thread's end calls; a thread_local with one leaks it in forked children
};

Slots* current = nullptr;

void forget(void* slot) {
    const std::lock_guard lock(current->mutex);
    std::erase(current->all, slot);
    delete static_cast<Slot*>(slot);
}

void forget_other_threads() {
    std::erase_if(current->all, [](const Slot* slot) {
        const bool other = slot->id != Waiting::this_thread();
        if (other) delete slot;
        return other;
    });
    current->mutex.unlock();
}

// Never destroyed: threads may end after static objects. In a forked child there is one thread.
Slots& slots() {
    static std::once_flag once;
    std::call_once(once, [] {
        current = new Slots;
        pthread_key_create(&current->ends, forget);
        pthread_atfork([] { current->mutex.lock(); }, [] { current->mutex.unlock(); }, forget_other_threads);
    });
    return *current;
}

Slot& mine() {
    thread_local Slot* slot = nullptr;
    if (slot == nullptr) {
        slot = new Slot;
        pthread_setspecific(slots().ends, slot);
        const std::lock_guard lock(slots().mutex);
        slots().all.push_back(slot);
    }
    return *slot;
}

}  // namespace

Waiting::Waiting() {
    mine().changes.fetch_add(1);
    mine().depth.fetch_add(1);
}

Waiting::~Waiting() {
    mine().depth.fetch_sub(1);
    mine().changes.fetch_add(1);
}

void Waiting::make_calls() {
    mine().calls.store(true);
}

std::vector<Waiting::Thread> Waiting::threads() {
    std::vector<Thread> found;
    const std::lock_guard lock(slots().mutex);
    for (const Slot* slot : slots().all)
        found.push_back({slot->id, slot->calls.load(), slot->depth.load() > 0, slot->changes.load()});
    return found;
}

uint64_t Waiting::this_thread() {
    return static_cast<uint64_t>(pthread_self());
}

}  // namespace alltoallv
