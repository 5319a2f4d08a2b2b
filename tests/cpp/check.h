// The little that the C++ tests need: CHECK, ranks as processes or threads, open descriptors counted.
#pragma once

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNDER_SANITIZER 1
#else
#define UNDER_SANITIZER 0
#endif

#if defined(__SANITIZE_THREAD__)
#define UNDER_THREAD_SANITIZER 1
#else
#define UNDER_THREAD_SANITIZER 0
#endif

#define CHECK(condition)                                                                                        \
    do {                                                                                                        \
        if (!(condition)) {                                                                                     \
            throw std::runtime_error(std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition); \
        }                                                                                                       \
    } while (false)

/// CHECK that shows both sides, which must be strings or numbers.
#define CHECK_EQ(left, right) testing::check_equal((left), (right), #left, __FILE__, __LINE__)

/// Begins the function of a test that `run_all` runs; its parameters say with which ranks, see `add_test`.
#define TEST(name, ...)                                                           \
    void name(__VA_ARGS__);                                                       \
    [[maybe_unused]] const bool name##_is_added = testing::add_test(#name, name); \
    void name(__VA_ARGS__)

namespace testing {

inline std::string text(const std::string& value) {
    return "'" + value + "'";
}
template <class T>
std::string text(T value) {
    return std::to_string(value);
}

template <class Left, class Right>
void check_equal(const Left& left, const Right& right, const char* expression, const char* file, int line) {
    if (left == right) return;
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + expression + " is " + text(left) +
                             ", expected " + text(right));
}

inline void check_contains(const std::string& text, const std::string& part) {
    if (text.find(part) == std::string::npos) throw std::runtime_error("expected '" + part + "' in '" + text + "'");
}

/// Entries of a directory of /proc/self.
inline int count_entries(const char* path) {
    DIR* directory = opendir(path);
    if (directory == nullptr) return -1;
    int count = 0;
    while (readdir(directory) != nullptr) ++count;
    closedir(directory);
    return count;
}

inline int open_fds() {
    return count_entries("/proc/self/fd");
}

/// The kernel's letter for the state of a process or of a thread: S sleeps, T is stopped.
inline char state_of(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string text;
    std::getline(file, text);
    return text.at(text.rfind(')') + 2);
}

/// Whether the condition holds within so many milliseconds.
inline bool comes_true(const std::function<bool()>& condition, int milliseconds) {
    for (int i = 0; i < milliseconds && !condition(); ++i) usleep(1000);
    return condition();
}

/// Waits until the condition holds, which it must within 20 seconds.
inline void eventually(const std::function<bool()>& condition) {
    CHECK(comes_true(condition, 20000));
}

/// As many descriptors as before; the last thread to hold one may take a moment to end.
inline void check_fds(int before) {
    if (!comes_true([before] { return open_fds() == before; }, 20000))
        throw std::runtime_error(std::to_string(open_fds()) + " descriptors are open, before it were " +
                                 std::to_string(before));
}

/// What `call` throws; empty if it throws nothing.
inline std::string thrown(const std::function<void()>& call) {
    try {
        call();
    } catch (const std::exception& error) {
        return error.what();
    }
    return {};
}

/// True when `body` returns; prints what it throws.
inline bool passes(const std::string& who, const std::function<void()>& body) {
    try {
        body();
        return true;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", who.c_str(), error.what());
        return false;
    }
}

/// A process that runs `body` and ends with 0 if it returns, 1 if it throws.
inline pid_t spawn(const std::string& who, const std::function<void()>& body) {
    std::fflush(nullptr);
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("fork failed");
    if (pid == 0) {
        alarm(120);  // a test that hangs fails
        const bool good = passes(who, body);
        std::fflush(nullptr);
        std::exit(good ? 0 : 1);
    }
    return pid;
}

/// Exit status of a process, 128 + signal for one that was killed.
inline int wait_for(pid_t pid) {
    int status = 0;
    if (waitpid(pid, &status, 0) != pid) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

using Body = std::function<void(int rank)>;

/// Runs `body` in `count` processes; returns their exit statuses.
inline std::vector<int> run_processes(int count, const Body& body) {
    std::vector<pid_t> pids;
    for (int rank = 0; rank < count; ++rank) {
        pids.push_back(spawn("rank " + std::to_string(rank), [&] {
            const int before = open_fds();
            body(rank);
            check_fds(before);
        }));
    }
    std::vector<int> statuses;
    for (const pid_t pid : pids) statuses.push_back(wait_for(pid));
    return statuses;
}

/// Runs `body` in `count` threads.
inline std::vector<int> run_threads(int count, const Body& body) {
    const int before = open_fds();
    std::vector<int> statuses(static_cast<size_t>(count));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
        threads.emplace_back([&, rank] {
            const bool good = passes("thread rank " + std::to_string(rank), [&] { body(rank); });
            statuses[static_cast<size_t>(rank)] = good ? 0 : 1;
        });
    }
    for (std::thread& thread : threads) thread.join();
    check_fds(before);
    return statuses;
}

inline void all_pass(const std::vector<int>& statuses) {
    for (const int status : statuses) CHECK_EQ(status, 0);
}

struct Mode {
    const char* name;
    bool threads;
    std::vector<int> (*run)(int, const Body&);
};

inline constexpr Mode processes{"processes", false, run_processes};
inline constexpr Mode threads{"threads", true, run_threads};

struct Test {
    std::string name;
    std::function<void()> body;
};

/// The tests of this file, in its order.
inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

/// Adds a test under the name of its function, with spaces for underscores.
inline bool add_test(std::string name, std::function<void()> body) {
    std::ranges::replace(name, '_', ' ');
    tests().push_back({std::move(name), std::move(body)});
    return true;
}

/// Adds one for ranks that are processes, and one for threads.
inline bool add_test(const std::string& name, void (*body)(const Mode&)) {
    for (const Mode* mode : {&processes, &threads}) add_test(name + ", " + mode->name, [=] { body(*mode); });
    return true;
}

/// The same for 2 and for 4 ranks.
inline bool add_test(const std::string& name, void (*body)(const Mode&, int)) {
    for (const Mode* mode : {&processes, &threads})
        for (const int size : {2, 4})
            add_test(name + ", " + std::to_string(size) + " " + mode->name, [=] { body(*mode, size); });
    return true;
}

/// Runs the tests, or those whose name contains the first argument. For `return` from main.
inline int run_all(int argc, char** argv) {
    alarm(UNDER_SANITIZER ? 290 : 240);  // a test that hangs fails
    int failed = 0;
    for (const Test& test : tests()) {
        if (argc > 1 && test.name.find(argv[1]) == std::string::npos) continue;
        std::printf("%s ...\n", test.name.c_str());
        if (!passes(test.name, test.body)) {
            ++failed;
            std::printf("%s FAILED\n", test.name.c_str());
        }
    }
    std::printf(failed == 0 ? "all passed\n" : "%d failed\n", failed);
    return failed == 0 ? 0 : 1;
}

}  // namespace testing
