#include "runtime/core/message_text.h"

#include "runtime/core/peer_names.h"

namespace alltoallv {
namespace {

std::string elements(int64_t count, DType dtype) {
    return (count < 0 ? "any number of" : std::to_string(count)) + " " + peer_name(dtype);
}

}  // namespace

std::string describe(const PeerMessage& message, int other, const std::string& domain) {
    return std::string(name_of(message.op)) + " of " + elements(message.count, message.dtype) + " with " +
           (message.tag == PeerMessage::any_tag ? "any tag" : "tag " + std::to_string(message.tag)) +
           (message.op == OpKind::send ? " to " : " from ") +
           (other < 0 ? "any rank" : "rank " + std::to_string(other)) + " of domain '" + domain + "'";
}

Error message_mismatch(int32_t tag, const std::string& domain, int from, SentAs sent, int to, SentAs expected) {
    return peer_mismatch(3008, "message with tag " + std::to_string(tag) + " of domain '" + domain + "': rank " +
                                   std::to_string(from) + " sends " + elements(sent.count, sent.dtype) + " to rank " +
                                   std::to_string(to) + ", which expects " + elements(expected.count, expected.dtype));
}

}  // namespace alltoallv
