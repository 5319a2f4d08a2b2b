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
}

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
    switch (code) {
        case HCCL_SUCCESS:
            return "no error";
        case HCCL_E_PARA:
            return "parameter error";
        case HCCL_E_PTR:
            return "empty pointer";
        case HCCL_E_MEMORY:
            return "memory error";
        case HCCL_E_INTERNAL:
            return "internal error";
        case HCCL_E_NOT_SUPPORT:
            return "feature not supported";
        case HCCL_E_NOT_FOUND:
            return "resource not found";
        case HCCL_E_UNAVAIL:
            return "resource unavailable";
        case HCCL_E_SYSCALL:
            return "system call error";
        case HCCL_E_TIMEOUT:
            return "timeout";
        case HCCL_E_OPEN_FILE_FAILURE:
            return "file cannot be opened";
        case HCCL_E_TCP_CONNECT:
            return "TCP connect failed";
        case HCCL_E_ROCE_CONNECT:
            return "RoCE connect failed";
        case HCCL_E_TCP_TRANSFER:
            return "TCP transfer failed";
        case HCCL_E_ROCE_TRANSFER:
            return "RoCE transfer failed";
        case HCCL_E_RUNTIME:
            return "runtime call failed";
        case HCCL_E_DRV:
            return "driver call failed";
        case HCCL_E_PROFILING:
            return "profiling call failed";
        case HCCL_E_CCE:
            return "CCE call failed";
        case HCCL_E_NETWORK:
            return "network call failed";
        case HCCL_E_AGAIN:
            return "try again";
        case HCCL_E_REMOTE:
            return "remote error";
        case HCCL_E_SUSPENDING:
            return "communicator is suspending";
        case HCCL_E_OPRETRY_FAIL:
            return "retry of an operator failed";
        case HCCL_E_OOM:
            return "out of memory";
        default:
            return "unknown error";
    }
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
