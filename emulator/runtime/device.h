// Devices, contexts, and those that a thread uses.
#pragma once

#include <cstdint>

namespace alltoallv::emulator {

/// Record that aclInit, or aclFinalize, has been called.
void initialize();
void finalize();

/// True if aclFinalize has been called, and aclInit has not since.
bool finalized();

/// Returns this thread's device. Throws Failure if it has chosen none.
int current_device();
void set_device(int device);

/// Throws Failure unless 0 <= device < settings().devices.
void check_device(int64_t device);

/// True once a thread has used the device.
bool device_active(int device);

void* current_context();
void* current_context_or_null();
void set_context(void* context);
void* add_context(int device);
void remove_context(void* context);

}  // namespace alltoallv::emulator
