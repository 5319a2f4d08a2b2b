// The two calls of an aclnn operator: GetWorkspaceSize checks everything and makes an executor, the second call runs
// it.
//
// The same source serves a device and the emulator: it uses the C ABI of ACL, aclnn and HCCL alone, and `platform.h`
// for what differs.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/abi/aclnn.h"
#include "runtime/abi/hccl.h"
#include "runtime/aclnn/platform.h"

namespace alltoallv::aclnn {

/// What ends a call: a number of CANN's, and a sentence that names argument, value and expectation.
class Refusal : public std::runtime_error {
  public:
    Refusal(aclnnStatus status, const std::string& message) : std::runtime_error(message), status_(status) {}
    aclnnStatus status() const { return status_; }

  private:
    aclnnStatus status_;
};

/// Runs the body of a C function; what it throws becomes a reported status.
aclnnStatus guarded(const char* function, const std::function<void()>& body);

[[noreturn]] void refuse(const std::string& message);  ///< with 161002
void require_pointer(const char* name, const void* pointer);
/// Throws a Refusal with 361001 unless the call of ACL or HCCL has succeeded.
void require_success(const char* function, int code);

/// A contiguous tensor of a caller.
struct View {
    const char* name;
    aclDataType dtype;
    std::vector<int64_t> shape;
    char* data;  ///< the first element

    int64_t numel() const;
    int64_t bytes() const;
    std::string text() const;  ///< the name and the shape, for messages
    Argument argument() const { return {name, data, data == nullptr ? 0 : static_cast<uint64_t>(bytes())}; }
};

/// Throws a Refusal unless the tensor exists, is contiguous and has one of these types.
View view(const char* name, const aclTensor* tensor, std::initializer_list<aclDataType> dtypes);
/// Bytes of a row of a tensor that has dimensions.
int64_t row_bytes_of(const View& tensor);
/// True if the tensors differ in the first dimension at most, which both have.
bool has_rows_of(const View& tensor, const View& other);
/// Throws a Refusal if an output shares memory with another tensor.
void require_apart(const std::vector<View>& inputs, const std::vector<View>& outputs);

inline constexpr std::initializer_list<aclDataType> floating_types = {ACL_FLOAT, ACL_FLOAT16, ACL_BF16};
/// What is only moved.
inline constexpr std::initializer_list<aclDataType> all_types = {
    ACL_FLOAT, ACL_FLOAT16, ACL_INT8,   ACL_INT32, ACL_UINT8, ACL_INT16,     ACL_UINT16,    ACL_UINT32,
    ACL_INT64, ACL_UINT64,  ACL_DOUBLE, ACL_BOOL,  ACL_BF16,  ACL_COMPLEX64, ACL_COMPLEX128};

/// A communicator of this process, by the name that HCCL or the framework has given it.
struct Group {
    HcclComm comm;
    uint32_t rank, size;
};
Group group_named(const char* name);

/// Divides a workspace into parts that begin at multiples of 512 bytes.
class Workspace {
  public:
    /// Returns the offset of a part.
    uint64_t add(uint64_t bytes);
    uint64_t bytes() const { return bytes_; }

  private:
    uint64_t bytes_ = 0;
};

/// Keeps host memory that a launch reads until the stream has come so far; for ever where the stream is captured, since
/// every replay reads it.
void keep_until_done(aclrtStream stream, std::shared_ptr<const void> memory);

using Run = std::function<void(char* workspace, aclrtStream stream)>;

/// Body of a GetWorkspaceSize: `make` checks all arguments, adds its parts to the workspace and returns what to run.
aclnnStatus prepare(const char* function, uint64_t* workspace_bytes, aclOpExecutor** executor,
                    const std::function<Run(Workspace& workspace)>& make);

/// Body of the second call. It uses the executor up, unless that is repeatable or the arguments are refused.
aclnnStatus execute(const char* function, void* workspace, uint64_t workspace_bytes, aclOpExecutor* executor,
                    aclrtStream stream);

}  // namespace alltoallv::aclnn

/// Ours, not CANN's: only `execute` and, on the emulator, aclSetAclOpExecutorRepeatable look inside.
struct aclOpExecutor {
    std::string function;
    uint64_t workspace_bytes;
    alltoallv::aclnn::Run run;
    bool repeatable = false;
};
