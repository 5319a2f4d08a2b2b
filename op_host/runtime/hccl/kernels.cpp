#include "runtime/hccl/kernels.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "all_to_all_v/op_api/aclnn_all_to_all_v.h"
#include "op_kernel/ascendc/quantized_tiling.h"
#include "quant_all_reduce/op_api/aclnn_quant_all_reduce.h"
#include "runtime/abi/hccl_windows.h"
#include "runtime/base/error.h"
#include "runtime/hccl/library.h"
#include "runtime/hccl/result.h"

namespace alltoallv {
namespace {

#define ALLTOALLV_KERNEL_CALLS(X)                   \
    X(aclCreateTensor)                              \
    X(aclDestroyTensor)                             \
    X(aclnnAlltoallvMakeWindows)                    \
    X(aclnnAlltoallvReleaseGroup)                   \
    X(aclnnAlltoallvAllToAllVGetWorkspaceSize)      \
    X(aclnnAlltoallvAllToAllV)                      \
    X(aclnnAlltoallvQuantAllReduceGetWorkspaceSize) \
    X(aclnnAlltoallvQuantAllReduce)

struct KernelLibrary {
    std::string missing;  ///< what is missing, in a sentence
#define ALLTOALLV_MEMBER(name) decltype(&::name) name = nullptr;
    ALLTOALLV_KERNEL_CALLS(ALLTOALLV_MEMBER)
#undef ALLTOALLV_MEMBER
};

/// Looks where torch_npu does, so that a process has the library once.
void* open_operators() {
    constexpr const char* name = "libcust_opapi.so";
    if (const char* paths = std::getenv("ASCEND_CUSTOM_OPP_PATH")) {
        std::istringstream split(paths);
        for (std::string path; std::getline(split, path, ':');)
            if (void* library = dlopen((path + "/op_api/lib/" + name).c_str(), RTLD_NOW)) return library;
    }
    return dlopen(name, RTLD_NOW);
}

KernelLibrary load_operators() {
    KernelLibrary library;
    try {
        cann();  // with names that all see
    } catch (const Error& error) {
        library.missing = error.what();
        return library;
    }
    void* const handle = open_operators();
    if (handle == nullptr) {
        library.missing = "libcust_opapi.so is in no folder of ASCEND_CUSTOM_OPP_PATH or LD_LIBRARY_PATH";
        return library;
    }
#define ALLTOALLV_FIND(name)                                                  \
    library.name = reinterpret_cast<decltype(&::name)>(dlsym(handle, #name)); \
    if (library.name == nullptr) library.missing = "libcust_opapi.so has no function " #name;
    ALLTOALLV_KERNEL_CALLS(ALLTOALLV_FIND)
#undef ALLTOALLV_FIND
#define ALLTOALLV_FIND(name) \
    if (dlsym(RTLD_DEFAULT, #name) == nullptr) library.missing = "HCCL has no function " #name;
    ALLTOALLV_WINDOW_CALLS(ALLTOALLV_FIND)
#undef ALLTOALLV_FIND
    return library;
}

const KernelLibrary& library() {
    static const auto& loaded = *new KernelLibrary(load_operators());  // never freed: in use until the process ends
    return loaded;
}

void check_aclnn(aclnnStatus status, const char* call, const std::string& where) {
    if (status == 0) return;
    const char* const said = cann().aclGetRecentErrMsg == nullptr ? nullptr : cann().aclGetRecentErrMsg();
    throw Error(ErrorClass::hccl, ErrorType::CANN_ERROR,
                with_id(7003, joined(where, ": ", call, " returned ", status, said == nullptr ? "" : ": ",
                                     said == nullptr ? "" : said)));
}

/// A contiguous tensor, or none.
class Tensor {
  public:
    Tensor(aclDataType dtype, std::vector<int64_t> shape, const void* data) {
        std::vector<int64_t> strides(shape.size(), 1);
        for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
        tensor_ = library().aclCreateTensor(shape.data(), shape.size(), dtype, strides.data(), 0, ACL_FORMAT_ND,
                                            shape.data(), shape.size(), const_cast<void*>(data));
    }
    /// None where there are no data.
    static Tensor optional(aclDataType dtype, std::vector<int64_t> shape, const void* data) {
        return data == nullptr ? Tensor() : Tensor(dtype, std::move(shape), data);
    }
    ~Tensor() {
        if (tensor_ != nullptr) library().aclDestroyTensor(tensor_);
    }
    Tensor(Tensor&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;
    operator aclTensor*() const { return tensor_; }

  private:
    Tensor() = default;

    aclTensor* tensor_ = nullptr;
};

aclDataType acl_type(DType dtype) {
    switch (dtype) {
        case DType::float32:
            return ACL_FLOAT;
        case DType::float16:
            return ACL_FLOAT16;
        case DType::bfloat16:
            return ACL_BF16;
        default:
            return ACL_INT8;
    }
}

/// Elements with one scale; a group that is longer than the vector is the whole vector.
int64_t group_of(const QuantReduction& q) {
    return std::min(q.group_size, std::max<int64_t>(total_count(q), 1));
}

/// Who made the windows of a group last, for each rank of this process; never destroyed, as communicators may outlive
/// it.
std::mutex owners_mutex;
auto& owners = *new std::map<std::pair<std::string, int>, const Kernels*>;

}  // namespace

std::string kernels_missing() {
    return library().missing;
}

std::string why_no_kernel(const QuantReduction& q) {
    if (q.tells_bound) return "it tells a bound";
    if (q.leaves != 0) return "it adds leaves";
    if (q.op != OpKind::quantized_all_reduce) return "it is a reduce-scatter";
    if (q.mode == QuantMode::two_scales) return "it has two scales";
    if (q.overflow == Overflow::raise) return "overflow is 'raise'";
    if (q.mode == QuantMode::shared_scale) return {};
    if (q.format != CodeFormat::int8 && q.format != CodeFormat::int4) return "its codes are neither int8 nor int4";
    if (q.requantizes) return "its sum is quantized again";
    if (q.feeds_back || q.gather_feeds_back) return "it has error feedback";
    return {};
}

Kernels::Kernels(std::string group, int rank, const Highest& highest, const std::string& where)
    : group_(std::move(group)), rank_(rank) {
    // A destroyed communicator may have had the same name: its windows, if they are still there, are of no use.
    library().aclnnAlltoallvReleaseGroup(group_.c_str());
    struct Context {
        const Highest& highest;
        std::exception_ptr error;
    } context{highest, {}};
    const auto agree = [](void* opaque, uint32_t own, uint32_t* most) {
        auto& at = *static_cast<Context*>(opaque);
        try {
            *most = at.highest(own);
            return 0;
        } catch (...) {  // through C
            at.error = std::current_exception();
            return 1;
        }
    };
    const aclnnStatus status =
        library().aclnnAlltoallvMakeWindows(group_.c_str(), agree, &context, &lanes_, &lane_bytes_);
    if (context.error) std::rethrow_exception(context.error);
    check_aclnn(status, "aclnnAlltoallvMakeWindows", where);
    if (lanes_ == 0)
        throw Error(ErrorClass::hccl, ErrorType::HCCL_FAIL, with_id(7004, where + ": HCCL gives no windows"));
    try {
        status_ = std::make_unique<DeviceMemory>(lanes_ * 8 * sizeof(int32_t), where);
    } catch (const Error&) {
        library().aclnnAlltoallvReleaseGroup(group_.c_str());
        throw;
    }
    const std::lock_guard lock(owners_mutex);
    owners[{group_, rank_}] = this;
}

Kernels::~Kernels() {
    {
        const std::lock_guard lock(owners_mutex);
        const auto owner = owners.find({group_, rank_});
        if (owner == owners.end() || owner->second != this) return;  // a later communicator of the name has them
        owners.erase(owner);
    }
    library().aclnnAlltoallvReleaseGroup(group_.c_str());
}

bool Kernels::fits(const QuantReduction& q, int ranks) const {
    const auto group = q.mode == QuantMode::shared_scale ? 0 : static_cast<uint64_t>(group_of(q));
    return alltoallv_kernels::fits_window(group, size_of(q.out_dtype), lane_bytes_, static_cast<uint64_t>(ranks));
}

template <class First, class Second>
void Kernels::run(const char* name, First first, Second second, const OnStream& on) {
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    check_aclnn(first(&bytes, &executor), name, on.where);
    check_aclnn(second(workspace(bytes, on), bytes, executor, on.stream), name, on.where);
}

/// Calls of a communicator are done in turn, so they share it.
char* Kernels::workspace(uint64_t bytes, const OnStream& on) {
    if (workspace_ == nullptr || workspace_bytes_ < bytes) {
        workspace_ = std::make_unique<DeviceMemory>(std::max<uint64_t>(bytes, 64 << 10), on.where);
        workspace_bytes_ = std::max<uint64_t>(bytes, 64 << 10);
    }
    return workspace_->data();
}

void Kernels::quant_all_reduce(const QuantReduction& q, const OnStream& on) {
    const int64_t count = total_count(q);
    if (count == 0) return;
    const Tensor x(acl_type(q.dtype), {count}, q.input), out(acl_type(q.out_dtype), {count}, q.output);
    const auto scales = static_cast<int64_t>(q.scale.size());
    const Tensor scale = Tensor::optional(ACL_FLOAT, {scales}, q.device_scale);
    const Tensor offset = Tensor::optional(ACL_FLOAT, {1}, q.device_offset);
    const Tensor status(ACL_INT32, {lanes_, 8}, status_->data());
    run(
        "aclnnAlltoallvQuantAllReduce",
        [&](uint64_t* bytes, aclOpExecutor** executor) {
            return library().aclnnAlltoallvQuantAllReduceGetWorkspaceSize(
                x, scale, offset, group_.c_str(), q.format == CodeFormat::int4 ? 4 : 8, group_of(q), q.average,
                q.overflow == Overflow::saturate, out, status, bytes, executor);
        },
        library().aclnnAlltoallvQuantAllReduce, on);
    unread_ = true;
}

void Kernels::all_to_all_v(const CountedOnDevice& call, const OnStream& on) {
    const int64_t row_bytes = call.row * static_cast<int64_t>(size_of(call.dtype));
    const auto ranks = [](const void* data, int64_t n) { return Tensor::optional(ACL_INT64, {n}, data); };
    const int64_t n = call.ranks;
    const Tensor x(ACL_UINT8, {call.input_rows, row_bytes}, call.input);
    const Tensor out(ACL_UINT8, {call.capacity, row_bytes}, call.output);
    const Tensor sends = ranks(call.send_counts, n), places = ranks(call.sdispls, n);
    const Tensor recvs = ranks(call.recv_counts, n), status(ACL_INT32, {lanes_, 8}, call.status);
    run(
        "aclnnAlltoallvAllToAllV",
        [&](uint64_t* bytes, aclOpExecutor** executor) {
            return library().aclnnAlltoallvAllToAllVGetWorkspaceSize(x, sends, places, group_.c_str(), call.expects,
                                                                     out, recvs, status, bytes, executor);
        },
        library().aclnnAlltoallvAllToAllV, on);
}

void Kernels::check(const std::string& where) {
    if (!std::exchange(unread_, false)) return;
    std::vector<int32_t> words(8 * size_t{lanes_});
    Device::copy(words.data(), status_->data(), words.size() * sizeof(int32_t), ACL_MEMCPY_DEVICE_TO_HOST, where);
    for (size_t i = 0; i < words.size(); i += 8)
        if (words[i] != 0)
            throw comm_timeout(4024, where, ": an earlier quantized_all_reduce did not get the data of rank ",
                               words[i + 1], " in time; its result is not defined");
}

}  // namespace alltoallv
