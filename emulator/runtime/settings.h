// The emulator's settings: environment variables, or AlltoallvEmulatorSet at run time.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace alltoallv::emulator {

/// The order in which HCCL's floating-point sums and products are made; `length` chooses among the others.
enum class Order : uint8_t { rank, ring, halving, length };

/// Read from ALLTOALLV_EMULATOR_<NAME IN CAPITALS> when the first function of the emulator is called.
struct Settings {
    std::atomic<int> devices{8};              ///< number of devices
    std::atomic<int64_t> memory_mb{8192};     ///< of each device
    std::atomic<int64_t> task_delay_us{0};    ///< before every task of a stream, to reveal missing synchronization
    std::atomic<double> connect_timeout{-1};  ///< seconds; negative: HCCL_CONNECT_TIMEOUT decides
    std::atomic<double> exec_timeout{-1};     ///< seconds; negative: HCCL_EXEC_TIMEOUT decides
    std::atomic<Order> order{Order::length};  ///< of reductions
    std::atomic<bool> late_counts{false};     ///< HcclAlltoAllV checks the caller's counts again when it runs
    std::atomic<bool> capturing{false};       ///< a graph is captured, which does not see what is launched now
    std::atomic<bool> verbose{true};          ///< true: failures are also reported on standard error
    std::atomic<int> cann_version{80500};     ///< the reported version: 10000 * major + 100 * minor + release
};

Settings& settings();

/// Changes a setting, or adds rules of faults (name "faults", an empty value removes all). Throws
/// std::invalid_argument, naming what is wrong.
void set(const std::string& name, const std::string& value);

/// Returns this process's rank, for faults with a rank: RANK (torchrun) or ALLTOALLV_RANK; -1 if neither is set.
int process_rank();

}  // namespace alltoallv::emulator

#pragma GCC visibility push(default)
extern "C" {
/// Calls `set`, for C and ctypes: returns 0, or -1 after a message on standard error.
int AlltoallvEmulatorSet(const char* name, const char* value);
}
#pragma GCC visibility pop
