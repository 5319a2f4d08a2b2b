// The emulator's switches: environment variables, or AlltoallvEmulatorSet at run time.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace alltoallv::emulator {

/// Read from ALLTOALLV_EMULATOR_<NAME IN CAPITALS> when the first function of the emulator is called.
struct Settings {
    std::atomic<int> devices{8};              ///< how many there are
    std::atomic<int64_t> memory_mb{8192};     ///< of each device
    std::atomic<int64_t> task_delay_us{0};    ///< before every task of a stream: shows a missing synchronization
    std::atomic<double> connect_timeout{-1};  ///< seconds; negative: HCCL_CONNECT_TIMEOUT decides
    std::atomic<double> exec_timeout{-1};     ///< seconds; negative: HCCL_EXEC_TIMEOUT decides
    std::atomic<bool> late_counts{false};     ///< HcclAlltoAllV looks at the caller's counts again when it runs
    std::atomic<bool> verbose{true};          ///< failures are reported on standard error, too
    std::atomic<int> cann_version{80500};     ///< that is reported: 10000 * major + 100 * minor + release
};

Settings& settings();

/// Changes a setting, or adds rules of faults (name "faults", an empty value removes all). Throws
/// std::invalid_argument, naming what is wrong.
void set(const std::string& name, const std::string& value);

/// This process's rank, for faults that name one: RANK as torchrun, or ALLTOALLV_RANK; -1 where neither is set.
int process_rank();

}  // namespace alltoallv::emulator

#pragma GCC visibility push(default)
extern "C" {
/// `set` for C and ctypes: 0, or -1 after a message on standard error.
int AlltoallvEmulatorSet(const char* name, const char* value);
}
#pragma GCC visibility pop
