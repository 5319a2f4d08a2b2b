// ACL functions about the process: start, end, messages, versions, options.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>

#include "acl/arguments.h"
#include "runtime/device.h"
#include "runtime/settings.h"

using namespace alltoallv::emulator;

namespace {

// The options that ACL keeps. They change nothing here: results are deterministic anyway.
std::array<std::atomic<int64_t>, 3> options{};
std::atomic<int> saturation_mode{ACL_RT_OVERFLOW_MODE_INFNAN};

std::atomic<int64_t>& option(aclSysParamOpt opt) {
    if (opt < 0 || static_cast<size_t>(opt) >= options.size())
        throw Failure(acl_error_rt_param_invalid, "opt is ", opt, ", expected 0 to 2");
    return options[static_cast<size_t>(opt)];
}

/// Returns the version of CANN whose interface this is.
std::string version_text(int all) {
    return std::to_string(all / 10000) + '.' + std::to_string(all / 100 % 100) + '.' + std::to_string(all % 100);
}

// The CPU's kernels of aten compute: they support infinities, NaN and bfloat16. Nothing is compiled.
constexpr aclCannAttr attributes[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16};

}  // namespace

aclError aclInit(const char*) {
    ACL_FUNCTION(initialize(););
}

aclError aclFinalize() {
    ACL_FUNCTION(finalize(););
}

/// Returns the last message, valid until this thread's next call; empty, not null, if there is none.
const char* aclGetRecentErrMsg() {
    thread_local std::string message;
    message = take_recent_message();
    return message.c_str();
}

void aclAppLog(aclLogLevel logLevel, const char* func, const char*, uint32_t, const char* fmt, ...) {
    if (logLevel < ACL_ERROR || !settings().verbose || fmt == nullptr) return;
    std::array<char, 1024> text{};
    va_list arguments;
    va_start(arguments, fmt);
    std::vsnprintf(text.data(), text.size(), fmt, arguments);
    va_end(arguments);
    std::fprintf(stderr, "[application, %s] %s\n", func == nullptr ? "?" : func, text.data());
}

/// Returns the name of the product whose limits torch_npu's operators check.
const char* aclrtGetSocName() {
    const char* named = std::getenv("ALLTOALLV_NPU_PRODUCT");
    const std::string_view product = named == nullptr ? "" : named;
    return product == "A2" ? "Ascend910B1" : product == "950" ? "Ascend950DT_9591" : "Ascend910_9391";
}

aclError aclrtGetVersion(int32_t* majorVersion, int32_t* minorVersion, int32_t* patchVersion) {
    ACL_FUNCTION(give("majorVersion", majorVersion, 1); give("minorVersion", minorVersion, 17);
                 give("patchVersion", patchVersion, 0););
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
    ACL_FUNCTION(check_pointer("version", version); *version = aclCANNPackageVersion{};
                 const int all = settings().cann_version; const auto text = version_text(all);
                 std::strcpy(version->version, text.c_str());
                 std::strcpy(version->majorVersion, std::to_string(all / 10000).c_str());
                 std::strcpy(version->minorVersion, std::to_string(all / 100 % 100).c_str());
                 std::strcpy(version->releaseVersion, std::to_string(all % 100).c_str()););
}

aclError aclsysGetVersionStr(char* pkgName, char* versionStr) {
    ACL_FUNCTION(check_pointer("pkgName", pkgName); check_pointer("versionStr", versionStr);
                 std::strcpy(versionStr, version_text(settings().cann_version).c_str()););
}

aclError aclGetCannAttributeList(const aclCannAttr** cannAttrList, size_t* num) {
    ACL_FUNCTION(check_pointer("cannAttrList", cannAttrList); *cannAttrList = attributes;
                 give("num", num, std::size(attributes)););
}

aclError aclGetCannAttribute(aclCannAttr cannAttr, int32_t* value) {
    ACL_FUNCTION(give("value", value,
                      std::find(std::begin(attributes), std::end(attributes), cannAttr) != std::end(attributes)););
}

aclError aclrtGetRunMode(aclrtRunMode* runMode) {
    ACL_FUNCTION(give("runMode", runMode, ACL_HOST););
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    ACL_FUNCTION(saturation_mode = mode;);
}

aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode* mode) {
    ACL_FUNCTION(give("mode", mode, saturation_mode.load()););
}

aclError aclrtGetSysParamOpt(aclSysParamOpt opt, int64_t* value) {
    ACL_FUNCTION(give("value", value, option(opt).load()););
}

aclError aclrtSetSysParamOpt(aclSysParamOpt opt, int64_t value) {
    ACL_FUNCTION(option(opt) = value;);
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt opt, int64_t* value) {
    return aclrtGetSysParamOpt(opt, value);
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt opt, int64_t value) {
    return aclrtSetSysParamOpt(opt, value);
}

// No operator of the emulator runs for a second, so the limit is accepted and never reached.
aclError aclrtSetOpExecuteTimeOut(uint32_t) {
    ACL_FUNCTION();
}

aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actualTimeout) {
    ACL_FUNCTION(give("actualTimeout", actualTimeout, timeout););
}

aclError aclrtPeekAtLastError(aclrtLastErrLevel) {
    return last_code();
}

aclError aclrtGetLastError(aclrtLastErrLevel) {
    const int code = last_code();
    last_code() = 0;
    return code;
}
