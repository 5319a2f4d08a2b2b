// The watching thread: the end of a process seen in time, removal from every side, fork, exit; quotas of processors.
#include "runtime/bootstrap/reactor.h"

#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>

#include "check.h"
#include "runtime/base/processors.h"
#include "runtime/bootstrap/bootstrap_rendezvous.h"
#include "runtime/bootstrap/unix_socket.h"

using namespace alltoallv;
using testing::eventually;

namespace {

Reactor& reactor() {
    return Reactor::instance();
}

/// How many threads of the reactor's name this process has.
int watchers() {
    int count = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::getline(std::ifstream(task.path() / "comm"), name);
        count += name == "alltoallv-watch";
    }
    return count;
}

/// A pipe-like pair whose first end is readable.
std::pair<UniqueFd, UniqueFd> ringing_pair() {
    auto ends = socket_pair();
    CHECK(try_send(ends.second.get(), "x") == IoStatus::done);
    return ends;
}

TEST(sees_death) {
    std::vector<double> delays;
    for (int i = 0; i < 5; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            pause();
            _exit(0);
        }
        const UniqueFd pidfd = open_pidfd(child);
        if (!pidfd) {
            std::printf("  NOT RUN: this kernel gives no pidfd\n");
            kill(child, SIGKILL);
            testing::wait_for(child);
            return;
        }
        std::atomic<bool> seen = false;
        reactor().add(pidfd.get(), [&, fd = pidfd.get()](uint32_t) {
            reactor().remove(fd);
            seen.store(true, std::memory_order_release);
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        CHECK(!seen.load(std::memory_order_acquire));
        const auto start = Clock::now();
        kill(child, SIGKILL);
        eventually([&] { return seen.load(std::memory_order_acquire); });
        delays.push_back(1e3 * seconds_since(start));
        testing::wait_for(child);
    }
    std::sort(delays.begin(), delays.end());
    std::printf("  seen after %.2f ms (median), %.2f ms (longest)\n", delays[2], delays[4]);
}

TEST(sees_hang_up) {
    auto [ours, theirs] = socket_pair();
    std::atomic<uint32_t> events = 0;
    reactor().add(ours.get(), [&, fd = ours.get()](uint32_t got) {
        reactor().remove(fd);
        events.store(got, std::memory_order_release);
    });
    theirs.reset();
    eventually([&] { return events.load(std::memory_order_acquire) != 0; });
    CHECK((events.load(std::memory_order_acquire) & EPOLLHUP) != 0);
}

TEST(remove_waits_for_callback) {
    for (int i = 0; i < 20; ++i) {
        const auto [ours, theirs] = ringing_pair();
        std::atomic<int> inside = 0, calls = 0;
        auto owned = std::make_shared<int>(0);
        reactor().add(ours.get(), [&, held = owned](uint32_t) {
            ++inside;
            ++calls;
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            --inside;
        });
        eventually([&] { return calls > 0; });
        reactor().remove(ours.get());
        CHECK_EQ(inside.load(), 0);
        CHECK_EQ(owned.use_count(), 1L);  // what the callback held is gone as well
        const int before = calls;
        std::this_thread::sleep_for(std::chrono::milliseconds(3));
        CHECK_EQ(calls.load(), before);
        reactor().remove(ours.get());  // of nothing: no effect
    }
}

TEST(callbacks_add_and_remove) {
    const auto [first, first_end] = ringing_pair();
    const auto [second, second_end] = ringing_pair();
    std::atomic<int> done = 0;
    // Each callback replaces itself by the other: the reactor is empty in between, 100 times.
    std::function<void(int)> watch = [&](int step) {
        const int fd = step % 2 == 0 ? first.get() : second.get();
        reactor().add(fd, [&, fd, step](uint32_t) {
            reactor().remove(fd);
            if (step < 100) watch(step + 1);
            ++done;
        });
    };
    watch(1);
    eventually([&] { return done == 100; });
    eventually([&] { return watchers() == 0; });
}

TEST(many_threads) {
    testing::all_pass(testing::run_threads(4, [](int) {
        for (int round = 0; round < 300; ++round) {
            const auto [ours, theirs] = ringing_pair();
            std::atomic<int> calls = 0;
            reactor().add(ours.get(), [&](uint32_t) { ++calls; });
            if (round % 3 == 0) eventually([&] { return calls > 0; });
            reactor().remove(ours.get());
        }
    }));
}

TEST(thread_comes_and_goes) {
    const int fds = testing::open_fds();
    {
        const auto [ours, theirs] = socket_pair();
        reactor().add(ours.get(), [](uint32_t) {});
        eventually([&] { return watchers() == 1; });
        reactor().remove(ours.get());
    }
    eventually([&] { return watchers() == 0; });  // a joined thread leaves /proc a moment later
    CHECK_EQ(testing::open_fds(), fds);
}

TEST(refuses_and_survives) {
    const auto [ours, theirs] = ringing_pair();
    std::atomic<int> calls = 0;
    reactor().add(ours.get(), [&](uint32_t) {
        ++calls;
        throw std::runtime_error("a callback must not");
    });
    eventually([&] { return calls > 0; });
    reactor().remove(ours.get());  // removed already, or just now
    CHECK_EQ(calls.load(), 1);

    const auto refused = [](int fd) { return !testing::thrown([fd] { reactor().add(fd, [](uint32_t) {}); }).empty(); };
    CHECK(refused(-1));
    const auto [quiet, quiet_end] = socket_pair();
    reactor().add(quiet.get(), [](uint32_t) {});
    CHECK(refused(quiet.get()));
    reactor().remove(quiet.get());
    eventually([&] { return watchers() == 0; });
}

TEST(takes_no_signals) {
    static std::atomic<bool> elsewhere;
    static thread_local bool is_main = false;
    is_main = true;
    elsewhere = false;
    const auto before = signal(SIGUSR1, [](int) { elsewhere = !is_main; });
    const auto [ours, theirs] = socket_pair();
    reactor().add(ours.get(), [](uint32_t) {});
    sigset_t blocked, old;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &blocked, &old);
    kill(getpid(), SIGUSR1);  // pending: the reactor's thread would be the only one to take it
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    CHECK(!elsewhere);
    reactor().remove(ours.get());
    signal(SIGUSR1, before);
}

TEST(fork_starts_afresh) {
    if (UNDER_THREAD_SANITIZER) {
        std::printf("  NOT RUN: the thread sanitizer allows no new thread in a child forked beside a thread\n");
        return;
    }
    const auto [ours, theirs] = ringing_pair();
    std::atomic<int> calls = 0;
    reactor().add(ours.get(), [&](uint32_t) { ++calls; });
    const int fds = testing::open_fds();
    for (int i = 0; i < 10; ++i) {
        const pid_t child = testing::spawn("child", [&, fd = ours.get()] {
            CHECK_EQ(testing::open_fds(), fds - 2);  // epoll and eventfd are closed
            reactor().remove(fd);                    // the parent's: nothing here
            std::atomic<int> own = 0;
            reactor().add(fd, [&](uint32_t) { ++own; });
            eventually([&] { return own > 0; });
            reactor().remove(fd);
        });
        CHECK_EQ(testing::wait_for(child), 0);
    }
    const int before = calls;
    eventually([&] { return calls > before; });  // the parent's still runs
    reactor().remove(ours.get());
}

TEST(exit_while_watching) {
    struct Late {
        int fd;
        ~Late() { reactor().remove(fd); }  // as a static's destructor would, when the thread is gone
    };
    const pid_t child = testing::spawn("child", [] {
        static Late late{ringing_pair().first.release()};
        reactor().add(late.fd, [](uint32_t) {});
    });
    CHECK_EQ(testing::wait_for(child), 0);
}

TEST(quotas_of_both_versions_of_cgroups) {
    const std::string folder = std::filesystem::temp_directory_path() / ("cgroup-" + std::to_string(getpid()));
    const auto cpus = [&](const std::vector<std::pair<std::string, std::string>>& files) {
        std::filesystem::create_directories(folder + "/cpu");
        for (const auto& [name, text] : files) std::ofstream(folder + name) << text;
        const int found = quota_cpus(folder);
        std::filesystem::remove_all(folder);
        return found;
    };
    const int all = cpus({});
    CHECK_EQ(cpus({{"/cpu.max", "50000 100000\n"}}), 1);
    CHECK_EQ(cpus({{"/cpu.max", "max 100000\n"}}), all);
    CHECK_EQ(cpus({{"/cpu/cpu.cfs_quota_us", "50000\n"}, {"/cpu/cpu.cfs_period_us", "100000\n"}}), 1);
    CHECK_EQ(cpus({{"/cpu/cpu.cfs_quota_us", "-1\n"}, {"/cpu/cpu.cfs_period_us", "100000\n"}}), all);
}

}  // namespace
