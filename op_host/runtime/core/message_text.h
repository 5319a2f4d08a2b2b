/// \file message_text.h
/// \brief Describes messages between two ranks in error texts.
#pragma once

#include <string>

#include "runtime/base/error.h"
#include "runtime/core/collective.h"

namespace alltoallv {

/// `other` is the rank on the other side; negative means any.
std::string describe(const PeerMessage& message, int other, const std::string& domain);

/// The error of both sides when a send does not match the recv of its tag.
struct SentAs {
    int64_t count;
    DType dtype;
};
Error message_mismatch(int32_t tag, const std::string& domain, int from, SentAs sent, int to, SentAs expected);

}  // namespace alltoallv
