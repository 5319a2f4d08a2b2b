/// \file collective.h
/// \brief What a rank asks of a communicator: an exchange (data movement) or a reduction.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <numeric>
#include <span>
#include <string_view>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace alltoallv {

/// What rows of an operator count.
enum class Kind : uint8_t {
    exchange,   // data move: how many elements make a row
    reduction,  // whole vectors are added up: how many elements they have
    quantized,  // the same, of vectors that travel quantized
};

// clang-format off
/// Operators as peers compare them and as errors name them, two ranks must issue the same one: name, kind, and whether
/// one rank is its root. send and recv are here for their names: two ranks alone take part, with no agreement of all.
/// handed_to_gloo announces what torch's own engine does, so that ranks which call something else are found.
#define ALLTOALLV_COLLECTIVES(X) \
    X(none, exchange, false) \
    X(all_to_all_v, exchange, false) \
    X(all_to_all_single, exchange, false) \
    X(all_to_all, exchange, false) \
    X(exchange_counts, exchange, false) \
    X(all_gather, exchange, false) \
    X(all_gather_into_tensor, exchange, false) \
    X(broadcast, exchange, true) \
    X(gather, exchange, true) \
    X(scatter, exchange, true) \
    X(global_scatter, exchange, false) \
    X(global_gather, exchange, false) \
    X(barrier, exchange, false) \
    X(send, exchange, false) \
    X(recv, exchange, false) \
    X(handed_to_gloo, exchange, false) \
    X(all_reduce, reduction, false) \
    X(reduce_scatter, reduction, false) \
    X(reduce, reduction, true) \
    X(quantized_all_reduce, quantized, false) \
    X(quantized_reduce_scatter, quantized, false) \
    X(quantized_all_to_all, exchange, false) \
    X(scan, exchange, false)
// clang-format on

enum class OpKind : uint16_t {
#define X(name, kind, rooted) name,
    ALLTOALLV_COLLECTIVES(X)
#undef X
};

struct OpInfo {
    std::string_view name;
    Kind kind;
    bool rooted;
};

inline constexpr OpInfo op_table[] = {
#define X(name, kind, rooted) {#name, Kind::kind, rooted},
    ALLTOALLV_COLLECTIVES(X)
#undef X
};

/// What a broken peer may have in place of an operator.
inline constexpr OpInfo no_op{"unknown", Kind::exchange, false};

constexpr const OpInfo& info(OpKind op) {
    const auto row = static_cast<size_t>(op);
    return row < std::size(op_table) ? op_table[row] : no_op;
}
constexpr std::string_view name_of(OpKind op) {
    return info(op).name;
}
constexpr bool is_quantized_reduction(OpKind op) {
    return info(op).kind == Kind::quantized;
}
constexpr bool is_reduction(OpKind op) {
    return info(op).kind != Kind::exchange;
}

/// One pair's part of a digest; nothing for a count of zero.
uint64_t pair_hash(int from, int to, int64_t count);

/// What one rank's counts add to the sums over all ranks, which are equal exactly when all pairs agree.
struct PairDigests {
    uint64_t sent = 0, expected = 0;
};

/// Without receive counts nothing is expected: they are learnt.
PairDigests digest_pairs(int rank, std::span<const int64_t> send_counts, std::span<const int64_t> recv_counts);

/// What follows from an exchange's counts and displacements alone, on one rank; in bytes.
struct ExchangeSummary {
    PairDigests digests;
    size_t input_extent, output_extent;  // one past the last byte that the regions cover
    size_t to_peers, from_peers;         // regions that several peers get count once
    size_t read, written;                // the same with what stays on this rank
};

/// Data movement. Every array has one entry per rank, in elements of `dtype`:
///     out_r[rdispls[j] : +recv_counts[j]] = x_j[sdispls_j[r] : +send_counts_j[r]]
/// The caller has checked signs and bounds (core/regions.h); the spans outlive the call.
struct Exchange {
    OpKind op = OpKind::all_to_all_v;
    DType dtype = DType::uint8;
    const void* input = nullptr;
    void* output = nullptr;
    std::span<const int64_t> send_counts, sdispls, recv_counts, rdispls;
    /// Displacements count bytes instead: the regions are tensors of their own, seen from the lowest address.
    bool byte_displs = false;
    /// Of a rooted operator, or what makes rows of quantized_all_to_all codes, or a scan's ReduceOp; equal on all
    /// ranks.
    int64_t root = 0;
    int64_t row = 1;  // elements per unit of the caller's counts, for messages; equal on all ranks
    /// Set when `recv_counts` is empty: learn them from the peers. Called once with the W counts learnt; returns
    /// the output that holds them packed in rank order (may be null when all are zero).
    std::function<void*(std::span<const int64_t>)> allocate;
    void* stream = nullptr;  ///< of a device: enqueue there and return; null: block until the data have arrived
    bool moves = true;       ///< false: compare the ranks' rows, and no more
    const ExchangeSummary* summary = nullptr;  ///< kept by who runs it often; null: made anew
};

ExchangeSummary summarize(const Exchange& exchange, int rank);

/// Reduction in the fixed rank order 0..W-1. `counts[j]` elements belong to rank j, parts packed in rank order.
/// all_reduce: input and output hold sum(counts) elements; reduce_scatter: output holds counts[rank]; reduce: as
/// all_reduce on the root, and no output elsewhere.
struct Reduction {
    OpKind op = OpKind::all_reduce;
    DType dtype = DType::float32;
    ReduceOp reduce_op = ReduceOp::sum;
    const void* input = nullptr;
    void* output = nullptr;
    std::span<const int64_t> counts;
    int64_t root = 0;        ///< of a reduce
    void* stream = nullptr;  ///< as in Exchange
    bool moves = true;       ///< as in Exchange
};

inline int64_t total_count(const Reduction& reduction) {
    return std::accumulate(reduction.counts.begin(), reduction.counts.end(), int64_t{0});
}

/// One side of a message between two ranks: the n-th send and the n-th recv of a pair and a tag belong together.
struct PeerMessage {
    OpKind op = OpKind::send;  // or recv
    DType dtype = DType::uint8;
    void* data = nullptr;  // read by a send
    int64_t count = 0;     // elements
    int peer = any_rank;
    int32_t tag = 0;

    static constexpr int any_rank = -1;  // of a recv: whoever sends first
};

}  // namespace alltoallv
