#include "runtime/base/sha256.h"

#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/base/error.h"

namespace alltoallv {
namespace {

constexpr size_t block_bytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;

uint32_t big_endian(const uint8_t* bytes) {
    return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

void compress(State& state, const uint8_t* block) {
    uint32_t words[64];
    for (size_t i = 0; i < 16; ++i) words[i] = big_endian(block + 4 * i);
    for (size_t i = 16; i < 64; ++i) {
        const uint32_t a = words[i - 15], b = words[i - 2];
        words[i] = words[i - 16] + words[i - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ (a >> 3)) +
                   (std::rotr(b, 17) ^ std::rotr(b, 19) ^ (b >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t i = 0; i < 64; ++i) {
        const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) +
                               round_constants[i] + words[i];
        const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = std::exchange(g, std::exchange(f, std::exchange(e, d + first)));
        d = std::exchange(c, std::exchange(b, std::exchange(a, first + second)));
    }
    const State added{a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += added[i];
}

std::string_view text_of(const Digest& digest) {
    return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

Digest sha256(std::string_view data) {
    // The fractional parts of the square roots of the first 8 primes.
    State state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::string padded(data);
    padded += '\x80';
    padded.resize((padded.size() + 8 + block_bytes - 1) / block_bytes * block_bytes, '\0');
    for (size_t i = 0; i < 8; ++i)
        padded[padded.size() - 1 - i] = static_cast<char>(uint64_t{data.size()} * 8 >> (8 * i));
    for (size_t at = 0; at < padded.size(); at += block_bytes)
        compress(state, reinterpret_cast<const uint8_t*>(padded.data()) + at);
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
    return digest;
}

Digest hmac_sha256(std::string_view key, std::string_view data) {
    std::string inner(block_bytes, '\0');
    const Digest shortened = sha256(key);
    if (key.size() > block_bytes) key = text_of(shortened);
    std::memcpy(inner.data(), key.data(), key.size());
    std::string outer = inner;
    for (char& c : inner) c ^= 0x36;
    for (char& c : outer) c ^= 0x5c;
    return sha256(outer.append(text_of(sha256(inner.append(data)))));
}

bool equal(const Digest& a, const Digest& b) {
    uint8_t difference = 0;
    for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
    return difference == 0;
}

Digest random_digest() {
    Digest digest;
    while (::getrandom(digest.data(), digest.size(), 0) != static_cast<ssize_t>(digest.size()))
        if (errno != EINTR) throw backend_unavailable(5006, "the kernel gives no random numbers (getrandom)");
    return digest;
}

std::string hex(const Digest& digest) {
    std::string text;
    for (const uint8_t byte : digest)
        for (const int shift : {4, 0}) text += "0123456789abcdef"[byte >> shift & 15];
    return text;
}

}  // namespace alltoallv
