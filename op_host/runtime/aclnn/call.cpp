#include "runtime/aclnn/call.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>

#include "runtime/aclnn/platform.h"

// HCCL's newest header has it, libhccl.so has had it for longer.
extern "C" HcclResult HcclCommGetHandleWithName(const char* commName, HcclComm* comm);

namespace alltoallv::aclnn {
namespace {

constexpr uint64_t alignment = 512;

std::string name_of(aclDataType dtype) {
    switch (dtype) {
        case ACL_FLOAT:
            return "float32";
        case ACL_FLOAT16:
            return "float16";
        case ACL_BF16:
            return "bfloat16";
        case ACL_INT8:
            return "int8";
        case ACL_UINT8:
            return "uint8";
        case ACL_INT32:
            return "int32";
        case ACL_INT64:
            return "int64";
        default:
            return "aclDataType " + std::to_string(static_cast<int>(dtype));
    }
}

/// Reads an array that an accessor of libnnopbase allocates.
template <class Accessor>
std::vector<int64_t> array_of(Accessor accessor, const char* function, const aclTensor* tensor) {
    int64_t* values = nullptr;
    uint64_t count = 0;
    require_success(function, accessor(tensor, &values, &count));
    const std::unique_ptr<int64_t[]> owned(values);
    return {values, values + count};
}

/// True if what the stream is given goes into a graph. Older releases have no graphs, and no such function.
bool is_captured(aclrtStream stream) {
    using CaptureInfo = aclError (*)(aclrtStream stream, int* status, void** graph);
    static const auto info = reinterpret_cast<CaptureInfo>(dlsym(RTLD_DEFAULT, "aclmdlRICaptureGetInfo"));
    int status = 0;
    void* graph = nullptr;
    return info != nullptr && info(stream, &status, &graph) == 0 && status != 0;
}

bool is_contiguous(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return true;
    int64_t expected = 1;
    for (size_t i = shape.size(); i-- > 0;) {
        if (shape[i] != 1 && strides[i] != expected) return false;
        expected *= shape[i];
    }
    return true;
}

}  // namespace

aclnnStatus guarded(const char* function, const std::function<void()>& body) {
    try {
        body();
        return 0;
    } catch (const Refusal& refusal) {
        return report(function, refusal.status(), refusal.what());
    } catch (const std::exception& error) {
        return report(function, aclnn_err_inner, error.what());
    }
}

void refuse(const std::string& message) {
    throw Refusal(aclnn_err_param_invalid, message);
}

void require_pointer(const char* name, const void* pointer) {
    if (pointer == nullptr) throw Refusal(aclnn_err_param_nullptr, std::string(name) + " is null");
}

void require_success(const char* function, int code) {
    if (code == 0) return;
    throw Refusal(aclnn_err_runtime_error, std::string(function) + " returned " + std::to_string(code));
}

int64_t View::numel() const {
    int64_t product = 1;
    for (const int64_t dim : shape) product *= dim;
    return product;
}

int64_t View::bytes() const {
    return numel() * static_cast<int64_t>(aclDataTypeSize(dtype));
}

std::string View::text() const {
    std::string dims;
    for (const int64_t dim : shape) dims += (dims.empty() ? "" : ", ") + std::to_string(dim);
    return std::string(name) + " has the shape [" + dims + "]";
}

View view(const char* name, const aclTensor* tensor, std::initializer_list<aclDataType> dtypes) {
    require_pointer(name, tensor);
    View result{name, ACL_DT_UNDEFINED, array_of(aclGetViewShape, "aclGetViewShape", tensor), nullptr};
    require_success("aclGetDataType", aclGetDataType(tensor, &result.dtype));
    if (std::find(dtypes.begin(), dtypes.end(), result.dtype) == dtypes.end()) {
        std::string expected;
        for (const aclDataType dtype : dtypes) expected += (expected.empty() ? "" : ", ") + name_of(dtype);
        refuse(std::string(name) + " has the type " + name_of(result.dtype) + ", expected " + expected);
    }
    aclFormat format{};
    require_success("aclGetFormat", aclGetFormat(tensor, &format));
    // What torch_npu calls a plain tensor of so many dimensions.
    const auto plain = {ACL_FORMAT_ND, ACL_FORMAT_NCL, ACL_FORMAT_NCHW, ACL_FORMAT_NCDHW};
    if (std::find(plain.begin(), plain.end(), format) == plain.end())
        refuse(std::string(name) + " has the format " + std::to_string(static_cast<int>(format)) + ", expected ND");
    for (const int64_t dim : result.shape)
        if (dim < 0) refuse(result.text() + ", expected sizes of 0 or more");
    if (!is_contiguous(result.shape, array_of(aclGetViewStrides, "aclGetViewStrides", tensor)))
        refuse(std::string(name) + " is not contiguous, expected a contiguous tensor");
    int64_t offset = 0;
    void* storage = nullptr;
    require_success("aclGetViewOffset", aclGetViewOffset(tensor, &offset));
    require_success("aclGetRawTensorAddr", aclGetRawTensorAddr(tensor, &storage));
    if (result.numel() > 0) require_pointer((std::string(name) + "'s data").c_str(), storage);
    if (storage != nullptr)
        result.data = static_cast<char*>(storage) + offset * static_cast<int64_t>(aclDataTypeSize(result.dtype));
    return result;
}

int64_t row_bytes_of(const View& tensor) {
    const auto element = static_cast<int64_t>(aclDataTypeSize(tensor.dtype));
    return std::accumulate(tensor.shape.begin() + 1, tensor.shape.end(), element, std::multiplies<>());
}

bool has_rows_of(const View& tensor, const View& other) {
    return !tensor.shape.empty() && tensor.shape.size() == other.shape.size() &&
           std::equal(other.shape.begin() + 1, other.shape.end(), tensor.shape.begin() + 1);
}

void require_apart(const std::vector<View>& inputs, const std::vector<View>& outputs) {
    const auto overlap = [](const View& a, const View& b) {
        return a.bytes() > 0 && b.bytes() > 0 && a.data < b.data + b.bytes() && b.data < a.data + a.bytes();
    };
    for (size_t i = 0; i < outputs.size(); ++i) {
        std::vector<View> others = inputs;
        others.insert(others.end(), outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(i));
        for (const View& other : others)
            if (overlap(outputs[i], other))
                refuse(std::string(outputs[i].name) + " and " + other.name +
                       " share memory, expected separate tensors");
    }
}

Group group_named(const char* name) {
    require_pointer("group", name);
    const size_t length = strnlen(name, hccl_comm_name_bytes);
    if (length == 0 || length == hccl_comm_name_bytes)
        refuse("group is a name of " + std::to_string(length) + " bytes or more, expected 1 to 127");
    Group group{};
    if (HcclCommGetHandleWithName(name, &group.comm) != HCCL_SUCCESS)
        refuse("group is '" + std::string(name) + "', which names no communicator of this process");
    require_success("HcclGetRankId", HcclGetRankId(group.comm, &group.rank));
    require_success("HcclGetRankSize", HcclGetRankSize(group.comm, &group.size));
    return group;
}

uint64_t Workspace::add(uint64_t bytes) {
    const uint64_t offset = bytes_;
    bytes_ += (bytes + alignment - 1) / alignment * alignment;
    return offset;
}

void keep_until_done(aclrtStream stream, std::shared_ptr<const void> memory) {
    using Kept = std::shared_ptr<const void>;
    auto kept = std::make_unique<Kept>(std::move(memory));
    if (!is_captured(stream)) {
        const auto free = [](void* pointer) { delete static_cast<Kept*>(pointer); };
        require_success("aclrtLaunchHostFunc", aclrtLaunchHostFunc(stream, free, kept.get()));
    }
    kept.release();
}

aclnnStatus prepare(const char* function, uint64_t* workspace_bytes, aclOpExecutor** executor,
                    const std::function<Run(Workspace& workspace)>& make) {
    return guarded(function, [&] {
        require_pointer("workspaceSize", workspace_bytes);
        require_pointer("executor", executor);
        Workspace workspace;
        Run run = make(workspace);
        *executor = new aclOpExecutor{function, workspace.bytes(), std::move(run)};
        *workspace_bytes = workspace.bytes();
    });
}

aclnnStatus execute(const char* function, void* workspace, uint64_t workspace_bytes, aclOpExecutor* executor,
                    aclrtStream stream) {
    return guarded(function, [&] {
        require_pointer("executor", executor);
        if (executor->function != std::string(function) + "GetWorkspaceSize")
            refuse("executor comes from " + executor->function + ", expected " + function + "GetWorkspaceSize");
        if (executor->workspace_bytes > 0) require_pointer("workspace", workspace);
        if (workspace_bytes < executor->workspace_bytes)
            refuse("workspaceSize is " + std::to_string(workspace_bytes) + ", expected at least " +
                   std::to_string(executor->workspace_bytes));
        const std::unique_ptr<aclOpExecutor> used_up(executor->repeatable ? nullptr : executor);
        executor->run(static_cast<char*>(workspace), stream);
    });
}

}  // namespace alltoallv::aclnn
