/// \file digest.h
/// \brief Digests of 128 bits, which can be added up over ranks in any order.
///
/// Two sums or two words that differ have equal digests with a probability of 2^-128. There is no key: the ranks of a
/// job are one user's, who gains nothing by a collision, and without a key every rank computes the same without asking.
#pragma once

#include <cstddef>
#include <cstdint>

namespace alltoallv {

struct Digest128 {
    uint64_t words[2] = {};

    bool operator==(const Digest128&) const = default;
    explicit operator bool() const { return (words[0] | words[1]) != 0; }
    Digest128& operator+=(const Digest128& other) {
        words[0] += other.words[0];
        words[1] += other.words[1];
        return *this;
    }
    Digest128& operator-=(const Digest128& other) {
        words[0] -= other.words[0];
        words[1] -= other.words[1];
        return *this;
    }
};

/// Returns one pair's part of a sum over pairs; zero if the count is.
Digest128 pair_hash(int from, int to, int64_t count);

/// Returns the digest of some bytes, which are a multiple of 8; never zero.
Digest128 digest_of_words(const void* data, size_t bytes);

}  // namespace alltoallv
