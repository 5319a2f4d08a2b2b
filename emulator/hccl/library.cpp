// HCCL's functions about the library: settings, error texts, groups of calls, and functions that the emulator does not
// have.
#include <atomic>

#include "hccl/launch.h"

using namespace alltoallv;
using namespace alltoallv::emulator;

uint32_t HcclGetCommConfigCapability() {
    return HCCL_COMM_CONFIG_RESERVED;
}

namespace {
std::atomic<int> deterministic{1};  // every reduction is deterministic

constexpr std::pair<HcclResult, const char*> error_texts[] = {
    {HCCL_SUCCESS, "no error"},
    {HCCL_E_PARA, "parameter error"},
    {HCCL_E_PTR, "empty pointer"},
    {HCCL_E_MEMORY, "memory error"},
    {HCCL_E_INTERNAL, "internal error"},
    {HCCL_E_NOT_SUPPORT, "feature not supported"},
    {HCCL_E_NOT_FOUND, "resource not found"},
    {HCCL_E_UNAVAIL, "resource unavailable"},
    {HCCL_E_SYSCALL, "system call error"},
    {HCCL_E_TIMEOUT, "timeout"},
    {HCCL_E_OPEN_FILE_FAILURE, "file cannot be opened"},
    {HCCL_E_TCP_CONNECT, "TCP connect failed"},
    {HCCL_E_ROCE_CONNECT, "RoCE connect failed"},
    {HCCL_E_TCP_TRANSFER, "TCP transfer failed"},
    {HCCL_E_ROCE_TRANSFER, "RoCE transfer failed"},
    {HCCL_E_RUNTIME, "runtime call failed"},
    {HCCL_E_DRV, "driver call failed"},
    {HCCL_E_PROFILING, "profiling call failed"},
    {HCCL_E_CCE, "CCE call failed"},
    {HCCL_E_NETWORK, "network call failed"},
    {HCCL_E_AGAIN, "try again"},
    {HCCL_E_REMOTE, "remote error"},
    {HCCL_E_SUSPENDING, "communicator is suspending"},
    {HCCL_E_OPRETRY_FAIL, "retry of an operator failed"},
    {HCCL_E_OOM, "out of memory"},
};

}  // namespace

HcclResult HcclSetConfig(HcclConfig config, HcclConfigValue configValue) {
    return guarded_hccl(__func__, [&] {
        if (config != HCCL_DETERMINISTIC) throw Failure(HCCL_E_NOT_SUPPORT, "only HCCL_DETERMINISTIC is emulated");
        deterministic = configValue.value;
    });
}

HcclResult HcclGetConfig(HcclConfig config, HcclConfigValue* configValue) {
    return guarded_hccl(__func__, [&] {
        check_given("configValue", configValue);
        if (config != HCCL_DETERMINISTIC) throw Failure(HCCL_E_NOT_SUPPORT, "only HCCL_DETERMINISTIC is emulated");
        configValue->value = deterministic;
    });
}

const char* HcclGetErrorString(HcclResult code) {
    for (const auto& [known, text] : error_texts)
        if (known == code) return text;
    return "unknown error";
}

HcclResult HcclGroupStart() {
    return guarded_hccl(__func__, [] { begin_group(); });
}

HcclResult HcclGroupEnd() {
    return guarded_hccl(__func__, [] { end_group(); });
}

#pragma GCC visibility push(default)
extern "C" {

#define FAILS(name)                                                                                          \
    int name();                                                                                              \
    int name() {                                                                                             \
        return alltoallv::emulator::report(#name, HCCL_E_NOT_SUPPORT, "is not implemented by the emulator"); \
    }

FAILS(HcclGetRootInfoScalable)
FAILS(HcclCommInitRootInfoScalable)
FAILS(HcclCommSuspend)
FAILS(HcclCommResume)
FAILS(HcclCommSetMemoryRange)
FAILS(HcclCommUnsetMemoryRange)
FAILS(HcclCommActivateCommMemory)
FAILS(HcclCommDeactivateCommMemory)
FAILS(HcclCommWorkingDevNicSet)
FAILS(HcclSetCommConfig)
FAILS(HcclGetCommConfig)
FAILS(HcclCommRegister)
FAILS(HcclCommDeregister)
FAILS(HcclCommExchangeMem)
FAILS(HcclCommSymWinRegister)
FAILS(HcclCommSymWinDeregister)

}  // extern "C"
#pragma GCC visibility pop
