/// \file message_text.h
/// \brief Messages between two ranks, in the words of errors.
#pragma once

#include <string>

#include "base/error.h"
#include "core/collective.h"

namespace alltoallv {

/// `other`: the rank on the other side; negative: any.
std::string describe(const PeerMessage& message, int other, const std::string& domain);

/// What both sides raise when a send does not have what the recv of its tag expects.
struct SentAs {
    int64_t count;
    DType dtype;
};
Error message_mismatch(int32_t tag, const std::string& domain, int from, SentAs sent, int to, SentAs expected);

}  // namespace alltoallv
