#include "runtime/bootstrap/reactor.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/process_state.h"
#include "runtime/base/quiet_thread.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {

namespace {

constexpr uint32_t input = EPOLLIN | EPOLLRDHUP;

struct Entry {
    Reactor::Callback callback;
    uint32_t generation = 0;  ///< distinguishes this entry's events from late ones of an older entry of the same number
    bool running = false;
    std::thread::id runner;

    uint64_t key(int fd) const { return uint64_t{generation} << 32 | static_cast<uint32_t>(fd); }
};

struct State;

/// One run of the thread. If a callback removes the last descriptor, its thread cannot be joined: it ends by itself,
/// perhaps after a new one has begun, so each thread has its own epoll.
class Worker {
  public:
    Worker() : epoll(::epoll_create1(EPOLL_CLOEXEC)), wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (!epoll || !wake) throw system_error("cannot create the descriptors of the watching thread", errno);
        if (!watch(wake.get(), EPOLLIN, wake_key)) throw system_error("cannot set up the watching thread", errno);
    }

    bool watch(int fd, uint32_t events, uint64_t key, int change = EPOLL_CTL_ADD) const {
        epoll_event event{};
        event.events = events;
        event.data.u64 = key;
        return ::epoll_ctl(epoll.get(), change, fd, &event) == 0;
    }

    void run(State& state);

    static constexpr uint64_t wake_key = ~uint64_t{0};

    UniqueFd epoll, wake;
    bool stopping = false;  ///< under the state's mutex
};

struct State {
    std::mutex mutex;
    std::condition_variable idle;  ///< a callback has returned
    std::map<int, std::shared_ptr<Entry>> entries;
    std::shared_ptr<Worker> worker;  ///< watches `entries`; null while they are empty
    std::thread thread;              ///< its thread
    std::vector<std::shared_ptr<Worker>> alive;
    uint32_t generation = 0;

    void start() {
        auto fresh = std::make_shared<Worker>();
        thread = quiet_thread("alltoallv-watch", "watching the peers", [this, fresh] { fresh->run(*this); });
        alive.push_back(fresh);
        worker = std::move(fresh);
    }

    /// Ends the thread. Unlocks the mutex, which the thread needs to end.
    void stop(std::unique_lock<std::mutex>& lock) {
        if (!worker) return;
        worker->stopping = true;
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = ::write(worker->wake.get(), &one, sizeof(one));  // cannot be full
        worker.reset();
        std::thread ending = std::move(thread);
        lock.unlock();
        if (ending.get_id() == std::this_thread::get_id())
            ending.detach();
        else
            ending.join();
    }

    std::shared_ptr<Entry> find(uint64_t key) const {
        const auto match = entries.find(static_cast<int>(key & 0xffffffff));
        const bool current = match != entries.end() && match->second->generation == key >> 32;
        return current ? match->second : nullptr;
    }

    /// In a forked child, which has no such thread: the callbacks' objects belong to the parent, and are kept.
    void forget() const {
        for (const auto& of_parent : alive) {
            of_parent->epoll.reset();
            of_parent->wake.reset();
        }
    }
};

State& the_state() {
    return ProcessState<State>::get();
}

void Worker::run(State& state) {
    epoll_event events[16];
    for (bool stop = false; !stop;) {
        const int count = ::epoll_wait(epoll.get(), events, 16, -1);
        if (count < 0 && errno != EINTR) break;  // a callback has forked, and this is the child
        for (int i = 0; i < count && !stop; ++i) {
            std::unique_lock lock(state.mutex);
            std::shared_ptr<Entry> entry = stopping ? nullptr : state.find(events[i].data.u64);
            if (entry) {
                entry->running = true;
                entry->runner = std::this_thread::get_id();
                lock.unlock();
                try {
                    entry->callback(events[i].events);
                } catch (...) {
                    Reactor::instance().remove(static_cast<int>(events[i].data.u64 & 0xffffffff));
                }
                lock.lock();
                entry->running = false;
                state.idle.notify_all();
            }
            stop = stopping;
            lock.unlock();
            entry.reset();  // its destructors may call this class again
        }
    }
    const std::scoped_lock lock(state.mutex);
    std::erase_if(state.alive, [this](const auto& worker) { return worker.get() == this; });
}

}  // namespace

Reactor& Reactor::instance() {
    static Reactor reactor;
    return reactor;
}

Reactor::Reactor() {
    the_state();
    std::atexit([] {
        State& state = the_state();
        std::unique_lock lock(state.mutex);
        state.stop(lock);
    });
}

void Reactor::add(int fd, Callback callback) {
    State& state = the_state();
    std::unique_lock lock(state.mutex);
    if (state.entries.contains(fd)) throw invalid_param(1097, "descriptor ", fd, " is already watched");
    auto entry = std::make_shared<Entry>();
    entry->callback = std::move(callback);
    entry->generation = ++state.generation;
    if (!state.worker) state.start();
    if (!state.worker->watch(fd, input, entry->key(fd))) {
        const int number = errno;
        if (state.entries.empty()) state.stop(lock);
        throw system_error("cannot watch descriptor " + std::to_string(fd), number);
    }
    state.entries[fd] = std::move(entry);
}

void Reactor::watch_output(int fd, bool watched) {
    State& state = the_state();
    const std::lock_guard lock(state.mutex);
    const auto match = state.entries.find(fd);
    if (match == state.entries.end() || !state.worker) return;
    (void)state.worker->watch(fd, watched ? input | EPOLLOUT : input, match->second->key(fd), EPOLL_CTL_MOD);
}

void Reactor::remove(int fd) {
    State& state = the_state();
    Callback callback;  // destroyed last, without the lock
    std::unique_lock lock(state.mutex);
    const auto match = state.entries.find(fd);
    if (match == state.entries.end()) return;
    const std::shared_ptr<Entry> entry = std::move(match->second);
    state.entries.erase(match);
    if (state.worker) ::epoll_ctl(state.worker->epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
    if (!entry->running || entry->runner != std::this_thread::get_id()) {
        state.idle.wait(lock, [&] { return !entry->running; });
        callback = std::move(entry->callback);
    }
    if (state.entries.empty()) state.stop(lock);
}

}  // namespace alltoallv
