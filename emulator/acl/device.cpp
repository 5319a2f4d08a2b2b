// ACL functions about devices and contexts.
#include "runtime/device.h"

#include <unistd.h>

#include <chrono>
#include <cstring>

#include "acl/arguments.h"
#include "runtime/memory.h"
#include "runtime/settings.h"
#include "runtime/stream.h"

using namespace alltoallv::emulator;

namespace {

// Values of an Ascend 910B1 and of a 910_9391, by which some programs divide.
constexpr int64_t cube_cores = 24, vector_cores = 48, l2_bytes = int64_t{192} << 20;

/// Waits for the device, in milliseconds (-1: without limit); throws the error of the task that failed.
void synchronize_device(int32_t milliseconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    int failure = 0;
    for (const StreamPtr& stream : streams_of_device(current_device())) {
        const std::chrono::duration<double> left = end - std::chrono::steady_clock::now();
        if (!stream->synchronize(milliseconds < 0 ? -1 : std::max(0.0, left.count())))
            throw Failure(acl_error_rt_stream_sync_timeout, "stream ", stream->id(), " is not done after ",
                          milliseconds, " ms");
        const int code = stream->take_failure();
        if (failure == 0) failure = code;
    }
    if (failure != 0) throw Failure(failure, "a task of this device's streams has failed, see above");
}

}  // namespace

aclError aclrtGetDeviceCount(uint32_t* count) {
    ACL_FUNCTION(give("count", count, settings().devices.load()););
}

aclError aclrtSetDevice(int32_t deviceId) {
    ACL_FUNCTION(set_device(deviceId););
}

aclError aclrtGetDevice(int32_t* deviceId) {
    // Programs ask before they choose a device; that is not a failure worth a message.
    if (deviceId != nullptr && current_context_or_null() == nullptr) return acl_error_rt_context_null;
    ACL_FUNCTION(give("deviceId", deviceId, current_device()););
}

/// Waits for the device's streams; memory stays with its owners.
aclError aclrtResetDevice(int32_t deviceId) {
    ACL_FUNCTION(check_device(deviceId);
                 for (const StreamPtr& stream : streams_of_device(deviceId)) stream->synchronize(-1););
}

aclError aclrtResetDeviceForce(int32_t deviceId) {
    return aclrtResetDevice(deviceId);
}

aclError aclrtSynchronizeDevice() {
    ACL_FUNCTION(synchronize_device(-1););
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    ACL_FUNCTION(synchronize_device(timeout););
}

aclError aclrtCreateContext(aclrtContext* context, int32_t deviceId) {
    ACL_FUNCTION(check_pointer("context", context); *context = add_context(deviceId););
}

aclError aclrtDestroyContext(aclrtContext context) {
    ACL_FUNCTION(remove_context(context););
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    ACL_FUNCTION(set_context(context););
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
    if (context != nullptr && current_context_or_null() == nullptr) {
        *context = nullptr;
        return acl_error_rt_context_null;
    }
    ACL_FUNCTION(check_pointer("context", context); *context = current_context(););
}

aclError aclrtGetPrimaryCtxState(int32_t deviceId, uint32_t* flags, int32_t* active) {
    ACL_FUNCTION(check_device(deviceId); if (flags != nullptr)* flags = 0;
                 give("active", active, device_active(deviceId) ? 1 : 0););
}

aclError aclrtDeviceCanAccessPeer(int32_t* canAccessPeer, int32_t deviceId, int32_t peerDeviceId) {
    ACL_FUNCTION(check_device(deviceId); check_device(peerDeviceId);
                 give("canAccessPeer", canAccessPeer, deviceId != peerDeviceId););
}

aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t) {
    ACL_FUNCTION(check_device(peerDeviceId););
}

aclError aclrtDeviceGetBareTgid(int32_t* pid) {
    ACL_FUNCTION(give("pid", pid, getpid()););
}

/// Returns an id that is equal in all processes and different between devices.
aclError aclrtDeviceGetUuid(int32_t deviceId, aclrtUuid* uuid) {
    ACL_FUNCTION({
        check_device(deviceId);
        check_pointer("uuid", uuid);
        *uuid = aclrtUuid{"emulated npu"};
        std::memcpy(uuid->bytes + 12, &deviceId, sizeof deviceId);
    });
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t* const logicDevId) {
    ACL_FUNCTION(check_device(userDevid); give("logicDevId", logicDevId, userDevid););
}

aclError aclGetDeviceCapability(uint32_t deviceId, aclDeviceInfo deviceInfo, int64_t* value) {
    ACL_FUNCTION({
        check_device(deviceId);
        const int64_t values[] = {cube_cores, vector_cores, l2_bytes};  // by aclDeviceInfo
        if (static_cast<size_t>(deviceInfo) >= std::size(values))
            throw Failure(acl_error_invalid_param, "deviceInfo ", deviceInfo, " is not emulated");
        give("value", value, values[deviceInfo]);
    });
}

aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t* value) {
    ACL_FUNCTION({
        check_device(deviceId);
        switch (attr) {
            case ACL_DEV_ATTR_AICORE_CORE_NUM:
            case ACL_DEV_ATTR_CUBE_CORE_NUM:
                return give("value", value, cube_cores);
            case ACL_DEV_ATTR_VECTOR_CORE_NUM:
                return give("value", value, vector_cores);
            case ACL_DEV_ATTR_L2_CACHE_SIZE:
                return give("value", value, l2_bytes);
            case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
                return give("value", value, memory_usage(static_cast<int>(deviceId)).total);
        }
        throw Failure(acl_error_rt_param_invalid, "attr ", attr, " is not emulated");
    });
}

/// Returns 0: no core of an emulated device is ever busy.
aclError aclrtGetDeviceUtilizationRate(int32_t deviceId, aclrtUtilizationInfo* utilizationInfo) {
    ACL_FUNCTION(check_device(deviceId); check_pointer("utilizationInfo", utilizationInfo);
                 *utilizationInfo = aclrtUtilizationInfo{};);
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
    ACL_FUNCTION(const Usage usage = memory_usage(current_device()); give("free", free, usage.free);
                 give("total", total, usage.total););
}
