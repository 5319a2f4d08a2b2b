// The device's part of libcust_opapi.so. Never compiled against CANN, never run on a device.
#include "runtime/aclnn/platform.h"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "op_kernel/ascendc/window.h"
#include "runtime/aclnn/call.h"
#include "runtime/device/launch.h"

// Of CANN's acl_rt.h, whose enumerator is an int here.
extern "C" aclError aclrtGetDeviceInfo(uint32_t deviceId, int attr, int64_t* value);

namespace alltoallv::aclnn {
namespace {

constexpr int vector_core_count = 201;  // ACL_DEV_ATTR_VECTOR_CORE_NUM

}  // namespace

aclnnStatus report(const char* function, aclnnStatus status, const std::string& message) {
    std::fprintf(stderr, "%s: %s (%d)\n", function, message.c_str(), status);
    return status;
}

uint32_t vector_cores() {
    int32_t device = 0;
    int64_t cores = 0;
    require_success("aclrtGetDevice", aclrtGetDevice(&device));
    require_success("aclrtGetDeviceInfo", aclrtGetDeviceInfo(static_cast<uint32_t>(device), vector_core_count, &cores));
    return static_cast<uint32_t>(cores);
}

uint32_t lanes() {
    return std::min(vector_cores(), alltoallv_kernels::most_lanes);
}

void launch(const char* kernel, uint32_t cores, const std::vector<Argument>& arguments, const void* numbers,
            size_t bytes, void* tiling, aclrtStream stream) {
    const auto* begin = static_cast<const char*>(numbers);
    auto copy = std::make_shared<const std::vector<char>>(begin, begin + bytes);
    require_success("aclrtMemcpyAsync",
                    aclrtMemcpyAsync(tiling, bytes, copy->data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    keep_until_done(stream, std::move(copy));
    std::vector<uint8_t*> addresses;
    for (const Argument& argument : arguments)
        addresses.push_back(static_cast<uint8_t*>(const_cast<void*>(argument.address)));
    addresses.push_back(static_cast<uint8_t*>(tiling));
    if (alltoallv_launch(kernel, cores, stream, addresses.data()) != 0)
        throw Refusal(aclnn_err_inner, std::string(kernel) + " is not a kernel of this library");
}

/// A device's stream cannot be made to fail by what a kernel has found: whoever wants to know looks at the status.
void check_status(const char*, const void*, aclrtStream) {}

}  // namespace alltoallv::aclnn
