// libFuzzer: whatever bytes a stranger sends while ranks gather, decoding them is an answer or an error of the family.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "runtime/bootstrap/bootstrap_protocol.h"

using namespace alltoallv;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const auto packet = decode({reinterpret_cast<const char*>(data), size});
    if (!packet) return 0;
    if (packet->kind == MessageKind::failure) (void)decode_failure(*packet);
    auto hello = decode_hello(*packet);
    if (!hello) return 0;
    if (hello->version != protocol_version) {
        if (!why_no_member(*hello, {})) std::abort();
        return 0;
    }
    const std::string again = encode_hello(*hello);
    const auto back = decode(again);
    if (!back || !decode_hello(*back) || decode_hello(*back)->job != hello->job) std::abort();
    Hello present;
    present.size = 4;
    present.job = "job#0";
    present.domain = "default";
    try {
        if (!why_no_member(*hello, present)) check_joining(*hello, present);
        hello->job = present.job;  // strangers seldom guess it
        hello->domain = present.domain;
        check_joining(*hello, present);
    } catch (const Error&) {
    }
    return 0;
}
