/// \file peer_words.h
/// \brief Reads what a peer has written into shared memory so that a broken peer can do no harm: each value once, and
/// only valid text.
///
/// A peer may change its memory at any time, so checked values must not be read again.
#pragma once

#include <cstddef>
#include <string>

#include "runtime/control/layout.h"

namespace alltoallv {

template <class T>
T read_once(const T& field) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    T value;
    __atomic_load(&field, &value, __ATOMIC_RELAXED);
    return value;
}

/// Stores a value that a peer may read at the same time.
template <class T>
void write_once(T& field, T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    __atomic_store(&field, &value, __ATOMIC_RELAXED);
}

/// The part of a row for one of its readers.
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

/// Reads up to the first zero byte; question marks replace bytes that are not UTF-8, which Python cannot hold.
std::string peer_text(const char* text, size_t capacity);

}  // namespace alltoallv
