#include "runtime/device.h"

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "acl/acl_api.h"
#include "runtime/handles.h"
#include "runtime/settings.h"

namespace alltoallv::emulator {
namespace {

struct State {
    std::mutex mutex;
    bool initialized = false, finalized = false;
    std::map<int, void*> primary;  // contexts by device
    /// The device of each context.
    Handles<int> contexts{"context", 0xC0E0, acl_error_rt_context_null};
};

State& state = *new State;  // never destroyed: threads use it to the end

thread_local void* current = nullptr;

}  // namespace

void initialize() {
    const std::lock_guard lock(state.mutex);
    if (state.initialized) throw Failure(acl_error_repeat_initialize, "called twice");
    state.initialized = true;
    state.finalized = false;
}

void finalize() {
    const std::lock_guard lock(state.mutex);
    if (!state.initialized) throw Failure(acl_error_uninitialize, "aclInit has not been called");
    state.initialized = false;
    state.finalized = true;
}

bool finalized() {
    const std::lock_guard lock(state.mutex);
    return state.finalized;
}

void check_device(int64_t device) {
    const int count = settings().devices;
    if (device >= 0 && device < count) return;
    throw Failure(acl_error_rt_invalid_deviceid, "device is ", device, ", there are ", count,
                  " (ALLTOALLV_EMULATOR_DEVICES)");
}

void set_device(int device) {
    check_device(device);
    const std::lock_guard lock(state.mutex);
    void*& primary = state.primary[device];
    if (primary == nullptr) primary = state.contexts.add(std::make_shared<int>(device));
    current = primary;
}

int current_device() {
    if (current == nullptr)
        throw Failure(acl_error_rt_context_null, "this thread has no device: aclrtSetDevice has not been called");
    return *state.contexts.get(current);
}

bool device_active(int device) {
    const std::lock_guard lock(state.mutex);
    return state.primary.count(device) != 0;
}

void* current_context() {
    (void)current_device();
    return current;
}

void* current_context_or_null() {
    return current;
}

void set_context(void* context) {
    (void)state.contexts.get(context);
    current = context;
}

void* add_context(int device) {
    check_device(device);
    return current = state.contexts.add(std::make_shared<int>(device));
}

void remove_context(void* context) {
    const std::lock_guard lock(state.mutex);
    for (const auto& entry : state.primary)
        if (entry.second == context)
            throw Failure(acl_error_rt_param_invalid, "the context belongs to the device, it was not created");
    state.contexts.remove(context);
    if (current == context) current = nullptr;
}

}  // namespace alltoallv::emulator
