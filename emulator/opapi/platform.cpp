// The emulator's part of libcust_opapi.so: kernels as tasks of emulated streams, run by their twin.
#include "runtime/aclnn/platform.h"

#include <array>
#include <cstring>

#include "op_kernel/ascendc/twin/kernels.h"
#include "runtime/failure.h"
#include "runtime/memory.h"
#include "runtime/stream.h"

namespace alltoallv::aclnn {
namespace {

constexpr int acl_error_rt_vector_core_exception = 507035;  // as a device reports a kernel that does what it must not

}  // namespace

aclnnStatus report(const char* function, aclnnStatus status, const std::string& message) {
    return emulator::report(function, status, message);
}

/// Each is a thread.
uint32_t vector_cores() {
    return 4;
}

/// On every rank, and there may be many.
uint32_t lanes() {
    return 2;
}

void launch(const char* kernel, uint32_t cores, const std::vector<Argument>& arguments, const void* numbers,
            size_t bytes, void* tiling, aclrtStream stream) {
    std::vector<void*> addresses;
    for (const Argument& argument : arguments) {
        emulator::check_device_range(argument.name, argument.address, argument.bytes);
        addresses.push_back(const_cast<void*>(argument.address));
    }
    emulator::check_device_range("workspace", tiling, bytes);
    addresses.push_back(tiling);
    std::array<char, tiling_bytes> copy{};
    std::memcpy(copy.data(), numbers, bytes);
    emulator::stream_of(stream)->enqueue([=] {
        return emulator::guarded(kernel, [&] {
            std::memcpy(tiling, copy.data(), bytes);
            std::array<char, 1000> fault{};
            if (alltoallv_twin_run(kernel, cores, addresses.data(), addresses.size(), 0, 0, fault.data(), fault.size()))
                throw emulator::Failure(acl_error_rt_vector_core_exception, fault.data());
        });
    });
}

void check_status(const char* kernel, const void* status, aclrtStream stream) {
    emulator::stream_of(stream)->enqueue([=] {
        return emulator::guarded(kernel, [&] {
            const auto* words = static_cast<const int32_t*>(status);
            if (words[0] == 0) return;
            throw emulator::Failure(acl_error_rt_vector_core_exception, "ends with status ", words[0], " of rank ",
                                    words[1], " in round ", words[2]);
        });
    });
}

}  // namespace alltoallv::aclnn
