/// \file routing.h
/// \brief Where the tokens of a mixture of experts go and how they come back: arithmetic on numbers of rows.
///
/// A pair is a token and one of its k choices of an expert: pair t * k + j. Pairs are sent sorted by rank and expert,
/// and within an expert by number. A receiver sorts them by its expert, then by the rank that they come from, then as
/// they lay there; behind the rows of an expert are rows of zeros, up to a multiple of the alignment.
///
/// A token goes once to every rank that has experts of it, behind headers that list the pairs it stands for. What goes
/// to a rank is a matrix of bytes: rows of a header, then a row for each token. A header begins with four int32: the
/// digest of the terms, the number of pairs, and how many tokens and choices of each the sender has. Columns follow,
/// which have some bytes of every pair. Between hosts, tokens may follow their headers in chunks instead, so that a
/// rank works on one while the next travels; rows go back in chunks that stay in the caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/code_format.h"

namespace alltoallv::moe {

using Numbers = std::vector<int64_t>;
using Span = std::span<const int64_t>;

/// About how many bytes a rank sends or receives in one chunk: back to the tokens, and after a header.
inline int64_t chunk_bytes = int64_t{16} << 20, following_bytes = int64_t{1} << 20;

/// What a dispatcher was made with, for the ranks of one group. Checked by who makes it.
struct Options {
    Numbers slots;                      ///< every expert's place among the experts of all ranks; -1: it gets no rows
    Numbers ends;                       ///< of each rank: the first place behind its experts
    std::optional<int64_t> rows = {};   ///< that a rank may send to one expert
    std::optional<double> factor = {};  ///< the same, as a multiple of an even share
    bool lightest = false;              ///< what is dropped beyond that: the pairs of smallest weight, or the last
    int64_t alignment = 1;              ///< rows of an expert are filled up to a multiple of this
    std::optional<CodeFormat> payload = {};  ///< how rows travel to the experts
    bool codes = false;                      ///< experts get the codes
    std::string text = {};                   ///< what ranks agree on

    /// Returns how many rows a rank with that many pairs may send to one expert.
    std::optional<int64_t> room(int64_t pairs) const;
    int64_t experts_of(int rank) const {
        const auto r = static_cast<size_t>(rank);
        return r == 0 ? ends[0] : ends[r] - ends[r - 1];
    }
};

/// A pair as a header lists it: its expert, by the receiver's numbers, and its token.
struct Tag {
    int32_t expert, token;
};

/// What a rank sends.
struct SendPlan {
    Numbers order;  ///< pairs, by rank and expert
    Numbers sends;  ///< pairs for every rank
    std::vector<Tag> tags;
};

/// Routes the choices `ids` of tokens with `k` each. `weights`: of all pairs, if they decide what is dropped. Throws
/// invalid_param for experts that do not exist.
SendPlan send(const Options& options, Span ids, int64_t k, std::span<const double> weights);

/// What a rank has received.
struct ReceivePlan {
    Numbers source;            ///< per row of the experts the pair that came; -1: zeros
    Numbers received, counts;  ///< rows of every expert, without and with the rows of zeros
};

/// Sorts the pairs that have arrived, given by their experts in the order of ranks.
ReceivePlan receive(std::span<const Tag> tags, int64_t experts, int64_t alignment);

/// Returns the bytes of a row of `width` bytes with its padding, so that a header's beginning fits into one.
size_t row_bytes(size_t width);

/// Some bytes of every pair.
struct Column {
    const void* data;
    size_t width;
};

/// What goes to the ranks: in one buffer, for every rank its header and then its tokens.
struct Packed {
    size_t stride = 0;
    Numbers counts;                    ///< rows for every rank
    std::vector<std::byte> headers;    ///< of all ranks, in whole rows
    Numbers header_at;                 ///< per row of these, its row in the buffer
    Numbers token, token_at;           ///< the tokens that go at once, and their rows in the buffer
    std::vector<Numbers> tokens_of{};  ///< this rank's tokens for every rank, ascending
};

/// Packs pairs in that order, of `tokens` tokens with `k` choices whose rows have `width` bytes; a column has its pairs
/// in the same order. `follows`: tokens follow their headers.
Packed pack(Span order, Span sends, int64_t tokens, int64_t k, std::span<const Column> columns, size_t width,
            int64_t terms, bool follows);

/// What the headers of all ranks say.
struct Headers {
    Numbers pairs, tokens, choices;  ///< of every rank
    Numbers firsts;                  ///< the first row of its tokens
    std::vector<std::vector<std::byte>> columns;

    /// The first column, of a dispatch that does not take a known route.
    std::span<const Tag> tags() const {
        return {reinterpret_cast<const Tag*>(columns[0].data()), columns[0].size() / sizeof(Tag)};
    }
};

/// Copies chosen rows of those that arrived.
using Fetch = std::function<void(Span rows, std::byte* out)>;

/// Reads the headers in the rows that arrived, `recvs` from every rank. Throws peer_mismatch if a peer's terms are
/// others, which a device compares in the first calls only, or the rows are not what they say.
Headers unpack(const Fetch& fetch, Span recvs, std::span<const size_t> widths, size_t stride, int64_t terms, int rank);

/// Returns the token of each pair that arrived, by the numbers of the rank that it came from.
Numbers tokens_of(const Headers& headers);

/// Returns, for every pair, the row in which its token came. `came[j]`: how many rows rank j has sent; `late`: its
/// tokens follow.
Numbers lines(const Headers& headers, Span token, Span came, const std::vector<bool>& late);

/// Returns, for each of `rows` received pairs, its place among the rows of the experts.
Numbers places(Span source, int64_t rows);

/// Returns, per token and choice, the place in `order` of its pair; -1: none, it was dropped.
Numbers positions(Span order, int64_t tokens, int64_t k);

/// Returns whether a rank's tokens follow their headers; `apart`: ranks on several hosts.
inline bool follow(bool apart, int64_t tokens, size_t stride) {
    return apart && tokens * static_cast<int64_t>(stride) > following_bytes;
}

/// One of the exchanges in which tokens follow their headers.
struct Remainder {
    int64_t until;               ///< this rank's tokens that have gone after it
    std::vector<Numbers> going;  ///< this rank's tokens for every rank
    Numbers recvs;
    Numbers pairs, rows;  ///< the pairs whose tokens arrive, and the received row of each
};

/// Divides the tokens of the ranks that are `late`; a rank's own do not travel.
std::vector<Remainder> remainders(const Headers& headers, Span token, const std::vector<Numbers>& tokens_of,
                                  const std::vector<bool>& late, int rank, size_t stride);

/// One of the exchanges in which rows go back.
struct Chunk {
    Numbers rows;  ///< the experts' rows that are sent, by rank
    Numbers sends, recvs;
    int64_t first, last;  ///< this rank's tokens that are complete after it
    Numbers places;       ///< per token and choice the received row; -1: none
};

/// Where the pairs of a dispatch went.
struct Route {
    Span order, source;
    Span sent, arrived;    ///< pairs for and from every rank
    Span tokens, choices;  ///< of every rank; empty: unknown, so that rows go back in one chunk
    Span token;            ///< of each pair that arrived, on its rank
};

/// Divides the return of rows of `row` bytes to `tokens` tokens with `k` choices, equally on every rank.
std::vector<Chunk> chunks(const Route& route, int64_t tokens, int64_t k, size_t row);

}  // namespace alltoallv::moe
