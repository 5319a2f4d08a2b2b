// SHA-256 (FIPS 180-4), HMAC over it (RFC 2104), and random secrets: how members of a job prove that they
// belong.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace alltoallv {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view data);

Digest hmac_sha256(std::string_view key, std::string_view data);

/// In a time that does not depend on where they differ.
bool equal(const Digest& a, const Digest& b);

/// 32 bytes that nobody can guess.
Digest random_digest();

/// Two digits for each byte.
std::string hex(const Digest& digest);

}  // namespace alltoallv
