// The C ABI of DLPack 1: a tensor, and the table of functions that a framework's tensor type carries as
// `__dlpack_c_exchange_api__` (https://dmlc.github.io/dlpack/latest/c_api.html).
//
// These are our own declarations of the parts that we use.
#pragma once

#include <cstdint>

struct DLPackVersion {
    uint32_t major, minor;
};

enum DLDeviceType : int32_t { kDLCPU = 1 };

struct DLDevice {
    int32_t device_type;
    int32_t device_id;
};

enum DLDataTypeCode : uint8_t {
    kDLInt = 0,
    kDLUInt = 1,
    kDLFloat = 2,
    kDLBfloat = 4,
    kDLComplex = 5,
    kDLBool = 6,
    kDLFloat8_e3m4 = 7,
    kDLFloat8_e4m3 = 8,
    kDLFloat8_e4m3b11fnuz = 9,
    kDLFloat8_e4m3fn = 10,
    kDLFloat8_e4m3fnuz = 11,
    kDLFloat8_e5m2 = 12,
    kDLFloat8_e5m2fnuz = 13,
    kDLFloat8_e8m0fnu = 14,
};

struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides;  ///< in elements
    uint64_t byte_offset;
};

struct DLManagedTensorVersioned {
    DLPackVersion version;
    void* manager_ctx;
    void (*deleter)(DLManagedTensorVersioned*);
    uint64_t flags;
    DLTensor dl_tensor;
};

struct DLPackExchangeAPIHeader {
    DLPackVersion version;
    DLPackExchangeAPIHeader* prev_api;  ///< the table of an earlier major version, or null
};

struct DLPackExchangeAPI {
    DLPackExchangeAPIHeader header;
    void* managed_tensor_allocator;
    void* managed_tensor_from_py_object_no_sync;
    int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned* tensor, void** object);
    int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* tensor);  ///< may be null
    void* current_work_stream;
};
