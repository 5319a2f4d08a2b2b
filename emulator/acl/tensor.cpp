// ACL functions that describe tensors, buffers and attributes for aclopCompileAndExecute.
#include "acl/tensor.h"

#include "acl/arguments.h"
#include "op_kernel/cpu/half.h"

using namespace alltoallv::emulator;

namespace {

template <class T>
std::string list(int count, const T* values) {
    std::string text;
    for (int i = 0; i < count; ++i) text += (i > 0 ? "," : "") + std::to_string(values[i]);
    return "[" + text + "]";
}

aclError set(const char* function, aclopAttr* attr, const char* name, const std::string& value) {
    return guarded(function, [&] {
        check_pointer("attr", attr);
        check_pointer("attrName", name);
        attr->values[name] = value;
    });
}

}  // namespace

/// Returns the bytes of an element; 0 for types that are not emulated.
size_t aclDataTypeSize(aclDataType dataType) {
    switch (dataType) {
        case ACL_INT8:
        case ACL_UINT8:
        case ACL_BOOL:
            return 1;
        case ACL_FLOAT16:
        case ACL_BF16:
        case ACL_INT16:
        case ACL_UINT16:
            return 2;
        case ACL_FLOAT:
        case ACL_INT32:
        case ACL_UINT32:
            return 4;
        case ACL_INT64:
        case ACL_UINT64:
        case ACL_DOUBLE:
        case ACL_COMPLEX64:
            return 8;
        case ACL_COMPLEX128:
            return 16;
        default:
            return 0;
    }
}

float aclFloat16ToFloat(aclFloat16 value) {
    return alltoallv::kernel::float16_to_float(value);
}

aclFloat16 aclFloatToFloat16(float value) {
    return alltoallv::kernel::float_to_float16(value);
}

aclTensorDesc* aclCreateTensorDesc(aclDataType dataType, int numDims, const int64_t* dims, aclFormat format) {
    return new aclTensorDesc{dataType, format, {dims, dims + numDims}, ""};
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) {
    delete desc;
}

void aclSetTensorDescName(aclTensorDesc* desc, const char* name) {
    if (desc != nullptr && name != nullptr) desc->name = name;
}

// All storage formats are the same here: the shape that the tensor has.
aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat) {
    ACL_FUNCTION(check_pointer("desc", desc););
}

aclError aclSetTensorShape(aclTensorDesc* desc, int, const int64_t*) {
    ACL_FUNCTION(check_pointer("desc", desc););
}

aclError aclSetTensorPlaceMent(aclTensorDesc* desc, aclMemType memType) {
    ACL_FUNCTION(check_pointer("desc", desc); desc->on_host = memType != ACL_MEMTYPE_DEVICE;);
}

aclDataType aclGetTensorDescType(const aclTensorDesc* desc) {
    return desc == nullptr ? ACL_DT_UNDEFINED : desc->type;
}

aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) {
    return desc == nullptr ? ACL_FORMAT_UNDEFINED : desc->format;
}

size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) {
    return desc == nullptr ? 0 : desc->dims.size();
}

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* dimSize) {
    ACL_FUNCTION({
        check_pointer("desc", desc);
        if (index >= desc->dims.size())
            throw Failure(acl_error_invalid_param, "index is ", index, ", there are ", desc->dims.size(),
                          " dimensions");
        give("dimSize", dimSize, desc->dims[index]);
    });
}

aclDataBuffer* aclCreateDataBuffer(void* data, size_t size) {
    return new aclDataBuffer{data, size};
}

aclError aclDestroyDataBuffer(const aclDataBuffer* dataBuffer) {
    ACL_FUNCTION(check_pointer("dataBuffer", dataBuffer); delete dataBuffer;);
}

aclopAttr* aclopCreateAttr() {
    return new aclopAttr;
}

void aclopDestroyAttr(const aclopAttr* attr) {
    delete attr;
}

aclError aclopSetAttrBool(aclopAttr* attr, const char* attrName, uint8_t attrValue) {
    return set(__func__, attr, attrName, attrValue != 0 ? "true" : "false");
}

aclError aclopSetAttrDataType(aclopAttr* attr, const char* attrName, aclDataType attrValue) {
    return set(__func__, attr, attrName, std::to_string(attrValue));
}

aclError aclopSetAttrFloat(aclopAttr* attr, const char* attrName, float attrValue) {
    return set(__func__, attr, attrName, std::to_string(attrValue));
}

aclError aclopSetAttrInt(aclopAttr* attr, const char* attrName, int64_t attrValue) {
    return set(__func__, attr, attrName, std::to_string(attrValue));
}

aclError aclopSetAttrListBool(aclopAttr* attr, const char* attrName, int numValues, const uint8_t* values) {
    return set(__func__, attr, attrName, list(numValues, values));
}

aclError aclopSetAttrListFloat(aclopAttr* attr, const char* attrName, int numValues, const float* values) {
    return set(__func__, attr, attrName, list(numValues, values));
}

aclError aclopSetAttrListInt(aclopAttr* attr, const char* attrName, int numValues, const int64_t* values) {
    return set(__func__, attr, attrName, list(numValues, values));
}

aclError aclopSetAttrListListInt(aclopAttr* attr, const char* attrName, int numLists, const int* numValues,
                                 const int64_t* const values[]) {
    std::string text;
    for (int i = 0; i < numLists; ++i) text += list(numValues[i], values[i]);
    return set(__func__, attr, attrName, "[" + text + "]");
}

aclError aclopSetAttrString(aclopAttr* attr, const char* attrName, const char* attrValue) {
    return set(__func__, attr, attrName, attrValue == nullptr ? "" : attrValue);
}
