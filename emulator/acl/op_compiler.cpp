// libacl_op_compiler: stores the options of a compiler that does not exist. Compiling an operator fails.
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "acl/arguments.h"

using namespace alltoallv::emulator;

namespace {

struct Options {
    std::mutex mutex;
    std::map<int, std::string> values;
};

Options& options = *new Options;  // never destroyed: threads use it to the end

/// Returns "disable" until the option is set.
std::string value_of(aclCompileOpt opt) {
    const std::lock_guard lock(options.mutex);
    const auto found = options.values.find(opt);
    return found == options.values.end() ? "disable" : found->second;
}

}  // namespace

aclError aclSetCompileopt(aclCompileOpt opt, const char* value) {
    ACL_FUNCTION({
        check_pointer("value", value);
        const std::lock_guard lock(options.mutex);
        options.values[opt] = value;
    });
}

/// Returns the size of the value with its terminating zero.
size_t aclGetCompileoptSize(aclCompileOpt opt) {
    return value_of(opt).size() + 1;
}

aclError aclGetCompileopt(aclCompileOpt opt, char* value, size_t length) {
    ACL_FUNCTION({
        check_pointer("value", value);
        const std::string text = value_of(opt);
        if (length < text.size() + 1)
            throw Failure(acl_error_invalid_param, "length is ", length, ", expected at least ", text.size() + 1);
        std::memcpy(value, text.c_str(), text.size() + 1);
    });
}
