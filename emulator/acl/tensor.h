// The contents of ACL's opaque descriptions of tensors, buffers and attributes.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "acl/acl_op.h"

struct aclTensorDesc {
    aclDataType type;
    aclFormat format;
    std::vector<int64_t> dims;
    std::string name;
    bool on_host = false;
};

struct aclDataBuffer {
    void* data;
    size_t bytes;
};

struct aclopAttr {
    std::map<std::string, std::string> values;  ///< as text
};
