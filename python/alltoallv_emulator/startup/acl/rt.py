"""Devices, contexts, memory, streams and events. Addresses and handles are integers."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p

from alltoallv_emulator.pyacl import Result, function, missing

__getattr__ = missing("acl.rt")

set_device = function("aclrtSetDevice", c_int32)
get_device = function("aclrtGetDevice", Result(c_int32))
reset_device = function("aclrtResetDevice", c_int32)
synchronize_device = function("aclrtSynchronizeDevice")
get_device_count = function("aclrtGetDeviceCount", Result(c_uint32))
get_run_mode = function("aclrtGetRunMode", Result(c_int))
get_version = function("aclrtGetVersion", Result(c_int32), Result(c_int32), Result(c_int32))
device_can_access_peer = function("aclrtDeviceCanAccessPeer", Result(c_int32), c_int32, c_int32)
get_device_res_limit = function("aclrtGetDeviceResLimit", c_int32, c_int, Result(c_uint32))
set_device_res_limit = function("aclrtSetDeviceResLimit", c_int32, c_int, c_uint32)
reset_device_res_limit = function("aclrtResetDeviceResLimit", c_int32)

create_context = function("aclrtCreateContext", Result(c_void_p), c_int32)
destroy_context = function("aclrtDestroyContext", c_void_p)
set_context = function("aclrtSetCurrentContext", c_void_p)
get_context = function("aclrtGetCurrentContext", Result(c_void_p))

malloc = function("aclrtMalloc", Result(c_void_p), c_size_t, c_int)
free = function("aclrtFree", c_void_p)
malloc_host = function("aclrtMallocHost", Result(c_void_p), c_size_t)
free_host = function("aclrtFreeHost", c_void_p)
get_mem_info = function("aclrtGetMemInfo", c_int, Result(c_size_t), Result(c_size_t))
memcpy = function("aclrtMemcpy", c_void_p, c_size_t, c_void_p, c_size_t, c_int)
memcpy_async = function("aclrtMemcpyAsync", c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_void_p)
memset = function("aclrtMemset", c_void_p, c_size_t, c_int32, c_size_t)
memset_async = function("aclrtMemsetAsync", c_void_p, c_size_t, c_int32, c_size_t, c_void_p)

create_stream = function("aclrtCreateStream", Result(c_void_p))
destroy_stream = function("aclrtDestroyStream", c_void_p)
synchronize_stream = function("aclrtSynchronizeStream", c_void_p)
stream_wait_event = function("aclrtStreamWaitEvent", c_void_p, c_void_p)

create_event = function("aclrtCreateEvent", Result(c_void_p))
destroy_event = function("aclrtDestroyEvent", c_void_p)
record_event = function("aclrtRecordEvent", c_void_p, c_void_p)
synchronize_event = function("aclrtSynchronizeEvent", c_void_p)
event_elapsed_time = function("aclrtEventElapsedTime", Result(c_float), c_void_p, c_void_p)
