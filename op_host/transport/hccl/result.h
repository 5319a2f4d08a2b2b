/// \file result.h
/// \brief From HCCL's and ACL's numbers to errors that say which call failed, why, and what can be done.
#pragma once

#include <string>

#include "abi/hccl.h"
#include "base/error.h"

namespace alltoallv {

/// ATB's code for an HcclResult: parameter, device memory, or the general one.
ErrorType code_of(HcclResult result);

/// "HCCL_E_PARA", or "HcclResult 99".
std::string hccl_name(HcclResult result);

/// The error of a call that returned `result`. `call` is the function's name, `where` the operator or domain,
/// `buffer_bytes` the data of one rank, for advice about HCCL_BUFFSIZE (0: none).
Error hccl_error(HcclResult result, const std::string& call, const std::string& where, size_t buffer_bytes = 0);

Error acl_error(aclError result, const std::string& call, const std::string& where);

inline void check_hccl(HcclResult result, const char* call, const std::string& where) {
    if (result != HCCL_SUCCESS) throw hccl_error(result, call, where);
}

inline void check_acl(aclError result, const char* call, const std::string& where) {
    if (result != 0) throw acl_error(result, call, where);
}

}  // namespace alltoallv
