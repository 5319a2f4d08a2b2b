/// \file peer_words.h
/// \brief What a peer has written into shared memory, read so that a broken one can do no harm: once, and as text that
/// is text.
///
/// A peer may change what it has written at any time, so what has been checked must not be read again.
#pragma once

#include <cstddef>
#include <string>

#include "control/layout.h"

namespace alltoallv {

template <class T>
T read_once(const T& field) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    T value;
    __atomic_load(&field, &value, __ATOMIC_RELAXED);
    return value;
}

/// Where a peer may read meanwhile.
template <class T>
void write_once(T& field, T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    __atomic_store(&field, &value, __ATOMIC_RELAXED);
}

/// What a row says to one of its readers.
struct RowWords {
    uint8_t flags = 0;
    Location input, output;
    Pair pair{};

    RowWords() = default;
    RowWords(const Row& row, int reader)
        : flags(read_once(row.flags)), input(read_once(row.input)), output(read_once(row.output)) {
        const Pair& said = row.pairs()[reader];
        pair = {read_once(said.send_count), read_once(said.source), read_once(said.recv_count), read_once(said.target)};
    }
};

/// Up to the first zero byte; what is not UTF-8, which Python's strings cannot hold, becomes question marks.
std::string peer_text(const char* text, size_t capacity);

}  // namespace alltoallv
