// The background thread over epoll.
#include "bootstrap/reactor.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "bootstrap/unix_socket.h"

namespace alltoallv {

namespace {

struct Entry {
    Reactor::Callback callback;
    uint32_t generation = 0;  ///< tells an event of this entry from a late one of an earlier entry of the same number
    bool running = false;
    std::thread::id runner;
};

/// All signals but those that a fault raises in the thread itself: handlers stay with the program's own threads.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t blocked;
        sigfillset(&blocked);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&blocked, fault);
        pthread_sigmask(SIG_SETMASK, &blocked, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

}  // namespace

/// One run of the thread. A thread that empties the reactor from its own callback cannot be joined; it is left to end
/// by itself while a new one may already have begun, so each has its own epoll.
class Reactor::Worker {
  public:
    Worker() : epoll(::epoll_create1(EPOLL_CLOEXEC)), wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
        if (!epoll || !wake) throw system_error("cannot create the descriptors of the watching thread", errno);
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = wake_key;
        if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
            throw system_error("cannot set up the watching thread", errno);
        }
    }

    void run(State& state);

    static constexpr uint64_t wake_key = ~uint64_t{0};

    UniqueFd epoll, wake;
    bool stopping = false;  ///< under the state's mutex
};

struct Reactor::State {
    std::mutex mutex;
    std::condition_variable idle;  ///< a callback has returned
    std::map<int, std::shared_ptr<Entry>> entries;
    std::shared_ptr<Worker> worker;  ///< the one that watches `entries`; there is none while that is empty
    std::thread thread;              ///< its thread
    std::vector<std::shared_ptr<Worker>> alive;
    uint32_t generation = 0;
    State* parents = nullptr;  ///< in a forked child: keeps it reachable

    void start() {
        auto fresh = std::make_shared<Worker>();
        alive.push_back(fresh);
        try {
            const SignalsBlocked blocked;
            thread = std::thread([this, fresh] { fresh->run(*this); });
        } catch (const std::system_error& error) {
            alive.pop_back();
            throw system_error("cannot start the watching thread", error.code().value());
        }
        worker = std::move(fresh);
    }

    /// Ends the thread. Unlocks, since the thread needs the mutex to end.
    void stop(std::unique_lock<std::mutex>& lock) {
        if (!worker) return;
        worker->stopping = true;
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = ::write(worker->wake.get(), &one, sizeof(one));  // cannot be full
        worker.reset();
        std::thread ending = std::move(thread);
        lock.unlock();
        if (ending.get_id() == std::this_thread::get_id()) {
            ending.detach();
        } else {
            ending.join();
        }
    }

    std::shared_ptr<Entry> find(uint64_t key) const {
        const auto found = entries.find(static_cast<int>(key & 0xffffffff));
        const bool current = found != entries.end() && found->second->generation == key >> 32;
        return current ? found->second : nullptr;
    }
};

void Reactor::Worker::run(State& state) {
    pthread_setname_np(pthread_self(), "alltoallv-watch");
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
                bool threw = false;
                try {
                    entry->callback(events[i].events);
                } catch (...) {
                    threw = true;
                }
                if (threw) instance().remove(static_cast<int>(events[i].data.u64 & 0xffffffff));
                lock.lock();
                entry->running = false;
                state.idle.notify_all();
            }
            stop = stopping;
            lock.unlock();
            entry.reset();  // what the callback holds may call in again
        }
    }
    const std::scoped_lock lock(state.mutex);
    std::erase_if(state.alive, [this](const auto& worker) { return worker.get() == this; });
}

Reactor& Reactor::instance() {
    static Reactor* const reactor = new Reactor;  // never destroyed, see state_
    return *reactor;
}

Reactor::Reactor() : state_(new State) {
    pthread_atfork([] { instance().state_->mutex.lock(); }, [] { instance().state_->mutex.unlock(); }, forget_in_child);
    std::atexit([] {
        State& state = *instance().state_;
        std::unique_lock lock(state.mutex);
        state.stop(lock);
    });
}

// The thread does not exist in the child, and what waits in the parent's state does not either. The old state is kept
// as it is, callbacks included: what they own belongs to the parent. Only its descriptors are closed.
void Reactor::forget_in_child() {
    State* const old = instance().state_;
    for (const auto& worker : old->alive) {
        worker->epoll.reset();
        worker->wake.reset();
    }
    old->mutex.unlock();
    instance().state_ = new State;
    instance().state_->parents = old;
}

void Reactor::add(int fd, Callback callback) {
    State& state = *state_;
    std::unique_lock lock(state.mutex);
    if (state.entries.contains(fd)) throw invalid_param("descriptor " + std::to_string(fd) + " is already watched");
    auto entry = std::make_shared<Entry>();
    entry->callback = std::move(callback);
    entry->generation = ++state.generation;
    if (!state.worker) state.start();
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = uint64_t{entry->generation} << 32 | static_cast<uint32_t>(fd);
    if (::epoll_ctl(state.worker->epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
        const int number = errno;
        if (state.entries.empty()) state.stop(lock);
        throw system_error("cannot watch descriptor " + std::to_string(fd), number);
    }
    state.entries[fd] = std::move(entry);
}

void Reactor::remove(int fd) {
    State& state = *state_;
    Callback callback;  // destroyed last, without the lock
    std::unique_lock lock(state.mutex);
    const auto found = state.entries.find(fd);
    if (found == state.entries.end()) return;
    const std::shared_ptr<Entry> entry = std::move(found->second);
    state.entries.erase(found);
    if (state.worker) ::epoll_ctl(state.worker->epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
    if (!entry->running || entry->runner != std::this_thread::get_id()) {
        state.idle.wait(lock, [&] { return !entry->running; });
        callback = std::move(entry->callback);
    }
    if (state.entries.empty()) state.stop(lock);
}

}  // namespace alltoallv
