// Converts HCCL's and ACL's numbers to errors that name which call failed, why, and what to do.
#pragma once

#include <string>

#include "runtime/abi/hccl.h"
#include "runtime/base/error.h"

namespace alltoallv {

/// Returns ATB's code for an HcclResult: parameter, device memory, or the general one.
ErrorType code_of(HcclResult result);

/// Returns "HCCL_E_PARA", or "HcclResult 99".
std::string hccl_name(HcclResult result);

/// The setting for the size of a communicator's buffer in HCCL, for advice if memory is short.
struct BufferAdvice {
    std::string setting;  ///< empty: HCCL_BUFFSIZE
    uint64_t bytes = 0;   ///< moved per rank by the call; 0: unknown
};

/// Returns HCCL_BUFFSIZE with its value.
std::string buffer_variable();

/// Returns the error of a call that returned `result`: `call` is the function's name, `where` the operator or domain.
Error hccl_error(HcclResult result, const std::string& call, const std::string& where, const BufferAdvice& buffer = {});

Error acl_error(aclError result, const std::string& call, const std::string& where);

inline void check_hccl(HcclResult result, const char* call, const std::string& where) {
    if (result != HCCL_SUCCESS) throw hccl_error(result, call, where);
}

inline void check_acl(aclError result, const char* call, const std::string& where) {
    if (result != 0) throw acl_error(result, call, where);
}

}  // namespace alltoallv
