#include "runtime/core/digest.h"

#include <cstring>

namespace alltoallv {
namespace {

uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

}  // namespace

/// Count and ranks enter the two words in different ways, so that no two pairs collide in both before they are mixed.
Digest128 pair_hash(int from, int to, int64_t count) {
    if (count == 0) return {};
    const auto number = static_cast<uint64_t>(count);
    const uint64_t ranks = static_cast<uint64_t>(static_cast<uint32_t>(from)) << 32 | static_cast<uint32_t>(to);
    return {{mixed(number * 0x9e3779b97f4a7c15u ^ (ranks + 0x632be59bd9b4e019u)),
             mixed(ranks * 0xd1b54a32d192ed03u ^ (number + 0xabc98388fb8fac03u))}};
}

Digest128 digest_of_words(const void* data, size_t bytes) {
    Digest128 digest{{bytes + 1, ~bytes}};
    for (size_t at = 0; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
        uint64_t word;
        std::memcpy(&word, static_cast<const char*>(data) + at, sizeof word);
        digest.words[0] = mixed(digest.words[0] * 0x9e3779b97f4a7c15u + word);
        digest.words[1] = mixed(digest.words[1] ^ word * 0xd1b54a32d192ed03u) + 0xabc98388fb8fac03u;
    }
    if (!digest) digest.words[0] = 1;
    return digest;
}

}  // namespace alltoallv
