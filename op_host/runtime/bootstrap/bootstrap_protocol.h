// The messages between ranks while they gather, the checks, and the errors that these raise.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/processors.h"
#include "runtime/base/unique_fd.h"
#include "runtime/bootstrap/bootstrap.h"
#include "runtime/core/late_warning.h"

namespace alltoallv {

/// Increased whenever a message changes; ranks of different releases then refuse each other with an error text.
inline constexpr uint32_t protocol_version = 1;

enum class MessageKind : uint32_t {
    hello,    ///< peer: value = rank, body = what must agree
    welcome,  ///< root: admitted
    table,    ///< root: body = pid_t per rank, carries the control segment
    pair,     ///< root: value = a peer, carries the socket to it
    ack,      ///< peer: holds everything
    commit,   ///< root: everybody holds everything
    expired,  ///< peer: its timeout of `value` ms has passed
    failure,  ///< both: value = ErrorClass, body = ErrorType and text
    present,  ///< another root of the domain asks if this is one, and gets the same as an answer
};

struct Packet {
    uint32_t version = protocol_version;
    MessageKind kind = MessageKind::hello;
    int32_t value = 0;
    std::string_view body;
};

std::string encode(MessageKind kind, int32_t value = 0, std::string_view body = {});

/// Returns nothing for bytes that are not a message of ours. `body` points into `data`.
std::optional<Packet> decode(std::string_view data);

/// Adds the rank from which the error comes, unless the text begins with a rank already.
std::string encode_failure(const Error& error, const BootstrapOptions& options);
Error decode_failure(const Packet& packet);

/// A rank's announcement about itself and the domain.
std::string encode_hello(const BootstrapOptions& options);

/// Returns what a hello announces; of another version, only the rank. Returns nothing for a malformed message.
std::optional<BootstrapOptions> decode_hello(const Packet& packet);

/// Throws invalid_param for options that are wrong by themselves.
void check_options(const BootstrapOptions& options);

/// Returns why `joining` is a stranger: its release or domain differs. A stranger is refused; nothing else ends.
std::optional<Error> why_no_member(uint32_t version, const BootstrapOptions& joining, const BootstrapOptions& present);

/// Throws invalid_param if a member cannot be in one domain with `present`; the text names both ranks and both values.
void check_joining(const BootstrapOptions& joining, const BootstrapOptions& present);

Error joined_twice(const BootstrapOptions& joining, pid_t first, pid_t second);

/// Returns "after 2.0 s ranks 1, 3 of 4 <had_not> domain 'd' (job 'j')", for example with had_not = "had not joined",
/// then `why` and the options' cure.
Error absent_error(const BootstrapOptions& options, double seconds, const std::vector<int>& ranks,
                   const std::string& had_not, const std::string& why = {});

/// Returns the error of the other ranks when `rank` leaves with an exception that is not an `Error`.
Error gave_up_error(const BootstrapOptions& options);

/// Returns a rank's number in messages.
inline int name_of(const BootstrapOptions& options, int rank) {
    return options.names.empty() ? rank : options.names[static_cast<size_t>(rank)];
}

/// Returns "domain 'd' (job 'j')".
std::string describe(const BootstrapOptions& options);

/// Makes a memfd of `bytes` zero bytes that nobody can resize.
UniqueFd make_control_segment(size_t bytes);

/// The time that a rank still waits; calls its caller's `poll` meanwhile.
class Patience {
  public:
    explicit Patience(const BootstrapOptions& options);

    /// Calls `poll` when 50 ms have passed since the last time; passes on what it throws.
    void tick();

    bool expired() const { return Clock::now() >= deadline_; }

    /// Warns, if it is time, with what `absent` says of the seconds waited.
    void warn(const std::function<Error(double)>& absent);

    /// Returns how long to sleep so that `poll` and the deadline are met: at most 50 ms and `limit_ms`.
    int slice_ms(int limit_ms = 50) const;

  private:
    const std::function<void()>& poll_;
    Clock::time_point deadline_, polled_;
    LateWarning warning_;
};

}  // namespace alltoallv
