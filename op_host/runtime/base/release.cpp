#include "runtime/base/release.h"

namespace alltoallv {
namespace {

// A text in the file, where tests change it.
const char* const volatile text = "alltoallv release " ALLTOALLV_RELEASE;

}  // namespace

std::string release() {
    return std::string(text).substr(sizeof "alltoallv release " - 1);
}

}  // namespace alltoallv
