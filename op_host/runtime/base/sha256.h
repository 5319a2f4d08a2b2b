// SHA-256 (FIPS 180-4), HMAC with it (RFC 2104), and random secrets, by which members of a job prove that they belong
// to it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace alltoallv {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view data);

Digest hmac_sha256(std::string_view key, std::string_view data);

/// Compares in a time that does not depend on the position of the first difference.
bool equal(const Digest& a, const Digest& b);

/// Returns 32 unpredictable bytes.
Digest random_digest();

/// Returns two hexadecimal digits for each byte.
std::string hex(const Digest& digest);

}  // namespace alltoallv
