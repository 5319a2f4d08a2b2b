// What ranks say to each other while they gather, what they check, and the errors they then raise.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"
#include "bootstrap/bootstrap.h"

namespace alltoallv {

/// Raised whenever a message changes; ranks of different releases then refuse each other in words.
inline constexpr uint32_t protocol_version = 1;

enum class MessageKind : uint32_t {
    hello,    ///< peer: value = rank, body = what must agree
    welcome,  ///< root: admitted
    table,    ///< root: body = pid_t per rank, carries the control segment
    pair,     ///< root: value = a peer, carries the socket to it
    ack,      ///< peer: holds everything
    commit,   ///< root: everybody holds everything
    expired,  ///< peer: its timeout of `value` ms is over
    failure,  ///< both: value = ErrorClass, body = ErrorType and text
};

struct Packet {
    uint32_t version = protocol_version;
    MessageKind kind = MessageKind::hello;
    int32_t value = 0;
    std::string_view body;
};

std::string encode(MessageKind kind, int32_t value = 0, std::string_view body = {});

/// Empty for bytes that are none of ours. `body` points into `data`.
std::optional<Packet> decode(std::string_view data);

/// The text says which rank it comes from, if it does not begin with one already.
std::string encode_failure(const Error& error, const BootstrapOptions& options);
Error decode_failure(const Packet& packet);

/// What a rank says of itself and the domain.
struct Hello {
    uint32_t version = protocol_version;
    int rank = 0;
    int size = 0;
    uint64_t control_bytes = 0;
    std::string job, domain, settings;
};

Hello hello_of(const BootstrapOptions& options);
std::string encode_hello(const Hello& hello);

/// Of another version only rank and version are filled in. Empty when malformed.
std::optional<Hello> decode_hello(const Packet& packet);

/// Throws invalid_param for options that are wrong on their own.
void check_options(const BootstrapOptions& options);

/// The reason to refuse `joining`, who is of another release or asks for another domain: a stranger, who ends nothing.
std::optional<Error> why_no_member(const Hello& joining, const Hello& present);

/// Throws invalid_param when a member cannot be in one domain with `present`, naming both ranks and both values.
void check_joining(const Hello& joining, const Hello& present);

Error joined_twice(const Hello& hello, pid_t first, pid_t second);

/// "after 2.0 s ranks 1, 3 of 4 <had_not> domain 'd' (job 'j')", for instance with had_not = "had not joined".
Error absent_error(const BootstrapOptions& options, double seconds, const std::vector<int>& ranks,
                   const std::string& had_not);

/// For the other ranks when `rank` leaves with an exception that is not an `Error`.
Error gave_up_error(const BootstrapOptions& options);

/// "domain 'd' (job 'j')"
std::string describe(const BootstrapOptions& options);

/// A memfd of `bytes` zero bytes that nobody can resize.
UniqueFd make_control_segment(size_t bytes);

/// How long a rank still waits, and its caller's `poll` on the way.
class Patience {
  public:
    using TimePoint = std::chrono::steady_clock::time_point;

    explicit Patience(const BootstrapOptions& options);

    /// Calls `poll` when 50 ms have passed since the last time; passes on what it throws.
    void tick();

    bool expired() const { return std::chrono::steady_clock::now() >= deadline_; }

    /// Time to sleep at most, so that `poll` and the deadline are met: at most 50 ms and `limit_ms`.
    int slice_ms(int limit_ms = 50) const;

  private:
    const std::function<void()>& poll_;
    TimePoint deadline_, polled_;
};

}  // namespace alltoallv
