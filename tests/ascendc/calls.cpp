// Many calls of one kernel on several ranks, each a thread that does not wait for the others between its calls: ranks
// run ahead of each other as far as the kernel lets them.
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

using Run = int (*)(const char* kernel, unsigned cores, void* const* arguments, size_t count, unsigned long long seed,
                    double mean_delay_us, char* fault, size_t fault_bytes);

/// `arguments` are addresses, [ranks][calls][count]. Returns 0, or 1 with the first fault as text.
extern "C" int alltoallv_run_calls(Run run, const char* kernel, unsigned ranks, unsigned cores, size_t calls,
                                   void* const* arguments, size_t count, unsigned long long seed, char* fault,
                                   size_t fault_bytes) {
    std::atomic<bool> failed = false;
    const auto rank = [&](unsigned r) {
        for (size_t i = 0; i < calls && !failed; ++i) {
            char text[1000];
            void* const* own = arguments + (r * calls + i) * count;
            if (run(kernel, cores, own, count, seed + i * ranks + r, 0, text, sizeof text) != 0 &&
                !failed.exchange(true))
                std::snprintf(fault, fault_bytes, "rank %u, call %zu: %s", r, i, text);
        }
    };
    std::vector<std::thread> threads;
    for (unsigned r = 0; r < ranks; ++r) threads.emplace_back(rank, r);
    for (std::thread& thread : threads) thread.join();
    return failed;
}
