// aclnn's tensors and executors: the functions of libnnopbase.so that callers of operators use.
#include <algorithm>
#include <vector>

#include "runtime/aclnn/call.h"

struct aclTensor {
    std::vector<int64_t> shape, strides;
    aclDataType dtype;
    int64_t offset;
    aclFormat format;
    void* data;
};

namespace {

aclnnStatus give_array(const std::vector<int64_t>& values, int64_t** array, uint64_t* count) {
    if (array == nullptr || count == nullptr) return aclnn_err_param_nullptr;
    *array = new int64_t[values.size()];
    std::copy(values.begin(), values.end(), *array);
    *count = values.size();
    return 0;
}

template <class T>
aclnnStatus give_value(const T& value, T* to) {
    if (to == nullptr) return aclnn_err_param_nullptr;
    *to = value;
    return 0;
}

}  // namespace

/// Without strides the tensor is contiguous.
aclTensor* aclCreateTensor(const int64_t* viewDims, uint64_t viewDimsNum, aclDataType dataType, const int64_t* stride,
                           int64_t offset, aclFormat format, const int64_t*, uint64_t, void* tensorData) {
    if (viewDims == nullptr && viewDimsNum > 0) return nullptr;
    const std::vector<int64_t> shape(viewDims, viewDims + viewDimsNum);
    std::vector<int64_t> strides(viewDimsNum, 1);
    if (stride != nullptr) {
        strides.assign(stride, stride + viewDimsNum);
    } else {
        for (size_t i = viewDimsNum; i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    }
    return new aclTensor{shape, strides, dataType, offset, format, tensorData};
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
    delete tensor;
    return 0;
}

aclnnStatus aclGetViewShape(const aclTensor* tensor, int64_t** viewDims, uint64_t* viewDimsNum) {
    return tensor == nullptr ? aclnn_err_param_nullptr : give_array(tensor->shape, viewDims, viewDimsNum);
}

aclnnStatus aclGetViewStrides(const aclTensor* tensor, int64_t** stridesValue, uint64_t* stridesNum) {
    return tensor == nullptr ? aclnn_err_param_nullptr : give_array(tensor->strides, stridesValue, stridesNum);
}

aclnnStatus aclGetViewOffset(const aclTensor* tensor, int64_t* offset) {
    return tensor == nullptr ? aclnn_err_param_nullptr : give_value(tensor->offset, offset);
}

aclnnStatus aclGetDataType(const aclTensor* tensor, aclDataType* dataType) {
    return tensor == nullptr ? aclnn_err_param_nullptr : give_value(tensor->dtype, dataType);
}

aclnnStatus aclGetFormat(const aclTensor* tensor, aclFormat* format) {
    return tensor == nullptr ? aclnn_err_param_nullptr : give_value(tensor->format, format);
}

aclnnStatus aclGetRawTensorAddr(const aclTensor* tensor, void** addr) {
    return tensor == nullptr ? aclnn_err_param_nullptr : give_value(tensor->data, addr);
}

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
    if (executor == nullptr) return aclnn_err_param_nullptr;
    executor->repeatable = true;
    return 0;
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
    if (executor == nullptr) return aclnn_err_param_nullptr;
    delete executor;
    return 0;
}
