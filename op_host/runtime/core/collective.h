/// \file collective.h
/// \brief The request of a rank to a communicator: an exchange (data movement) or a reduction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/base/dtype.h"
#include "runtime/base/reduce_op.h"
#include "runtime/core/shape_words.h"

namespace alltoallv {

/// The kind of an operator: its rows count different things.
enum class Kind : uint8_t {
    exchange,   // data move: how many elements make a row
    reduction,  // whole vectors are added up: how many elements they have
    quantized,  // the same for vectors that travel quantized
};

// clang-format off
/// Operators, compared between peers and named in errors, since all ranks must call the same one: name, kind, and true
/// if it has a root. send and recv are here for their names: only two ranks take part, without an agreement of all.
/// handed_to_gloo announces what torch's own engine does, so that ranks that call another operator are found.
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
    X(scan, exchange, false) \
    X(all_to_all_nd, exchange, false)
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

/// Stands for an unknown operator that a broken peer may announce.
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

/// Returns one pair's part of a digest; 0 if the count is zero.
uint64_t pair_hash(int from, int to, int64_t count);

/// Returns one rank's contribution to a sum over all ranks, modulo 2^64, that is 0 if all pairs of counts agree: its
/// hashes of what it sends less the hashes of what it expects. Without receive counts no data are expected: the peers
/// announce the counts.
uint64_t pair_balance(int rank, std::span<const int64_t> send_counts, std::span<const int64_t> recv_counts);

/// Values that follow from one rank's counts and displacements alone; in bytes.
struct ExchangeSummary {
    uint64_t balance;                    // see pair_balance
    size_t input_extent, output_extent;  // one past the last byte of the regions
    size_t to_peers, from_peers;         // without what stays on this rank; regions for several peers count once
    size_t read, written;                // including what stays on this rank
};

/// How a region lies that is not in one piece: rows of `row` elements, each `stride` elements after the one before; the
/// last may be shorter.
struct Steps {
    int64_t row, stride;

    bool operator==(const Steps&) const = default;
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
    /// One per rank, or empty where all regions are in one piece. The elements of a region keep their order.
    std::span<const Steps> send_steps, recv_steps;
    /// Displacements are in bytes: the regions are separate tensors, addressed from the lowest one.
    bool byte_displs = false;
    int root = 0;       ///< of a rooted operator; equal on all ranks
    int64_t terms = 0;  ///< what else is equal on all ranks: of codes, of tokens or of chunks (core/terms.h)
    int64_t row = 1;    ///< elements per unit of the caller's counts, for error texts; equal on all ranks
    /// Set if `recv_counts` is empty: the peers announce the counts. Called once with these W counts; returns the
    /// output that holds the data packed in rank order (may be null if all counts are zero).
    std::function<void*(std::span<const int64_t>)> allocate;
    void* stream = nullptr;  ///< of a device: enqueue there and return; null: block until the data have arrived
    bool moves = true;       ///< false: only compare the ranks' rows
    const ExchangeSummary* summary = nullptr;  ///< kept by callers that run it often; null: computed for this call
};

ExchangeSummary summarize(const Exchange& exchange, int rank);

inline bool is_strided(const Exchange& x) {
    return !x.send_steps.empty() || !x.recv_steps.empty();
}

/// Reduction in the fixed rank order 0..W-1. `counts[j]` elements belong to rank j, parts packed in rank order.
/// all_reduce: input and output hold sum(counts) elements; reduce_scatter: output holds counts[rank]; reduce: like
/// all_reduce on the root, and no output elsewhere.
struct Reduction {
    OpKind op = OpKind::all_reduce;
    DType dtype = DType::float32;
    ReduceOp reduce_op = ReduceOp::sum;
    const void* input = nullptr;
    void* output = nullptr;
    std::span<const int64_t> counts;
    int root = 0;          ///< of a reduce
    bool ordered = false;  ///< on a device: adds in the order of ranks, as host memory always does; equal on all ranks
    bool exclusive = false;  ///< of a scan; equal on all ranks
    /// Of an all_reduce: if not 0, every rank's input holds leaves / W vectors, one after the other, and all are
    /// combined by a tree over their number (kernel::Order::tree): the bits do not depend on W. Equal on all ranks.
    int64_t leaves = 0;
    ShapeWords shape;        ///< of the input
    void* stream = nullptr;  ///< as in Exchange
    bool moves = true;       ///< as in Exchange
};

inline int64_t total_count(const Reduction& reduction) {
    return std::accumulate(reduction.counts.begin(), reduction.counts.end(), int64_t{0});
}

/// Returns how many vectors each rank's input holds.
inline size_t inputs_per_rank(const Reduction& reduction) {
    return reduction.leaves == 0 ? 1 : static_cast<size_t>(reduction.leaves) / reduction.counts.size();
}

/// A part of a reduced vector, in bytes.
struct Part {
    size_t begin, bytes;

    /// Length of piece number `step`, at most `piece` bytes.
    size_t piece_bytes(size_t step, size_t piece) const {
        const size_t at = step * piece;
        return at >= bytes ? 0 : std::min(piece, bytes - at);
    }
};

/// Returns the part that each rank reduces: the one that it keeps of a reduce_scatter, else equal ones of whole cache
/// lines, except for the last that is not empty.
std::vector<Part> parts_of(const Reduction& reduction);

/// Returns the part of the result that rank `rank` gets.
Part result_part(const Reduction& reduction, int rank);

/// One side of a message between two ranks: the n-th send and the n-th recv of a pair and a tag match.
struct PeerMessage {
    /// A recv that only finds a message and leaves it there: it waits for one, or ends at once without.
    enum class Looks : uint8_t { no, until_found, once };

    OpKind op = OpKind::send;  // or recv
    DType dtype = DType::uint8;
    void* data = nullptr;  // read by a send
    int64_t count = 0;     // elements; below 0: of a recv that takes any number and gets memory for them
    int peer = any_rank;
    int32_t tag = 0;
    bool at_most = false;  // of a recv: a message of fewer elements will do
    Looks looks = Looks::no;

    static constexpr int any_rank = -1;                                      // of a recv: the first sender
    static constexpr int32_t any_tag = std::numeric_limits<int32_t>::min();  // of a recv: any tag that is not negative

    bool accepts(int32_t sent_tag) const { return tag == any_tag ? sent_tag >= 0 : sent_tag == tag; }
    bool accepts(int64_t sent_count, DType sent_dtype) const {
        if (sent_dtype != dtype || sent_count < 0) return false;
        return count < 0 || (at_most ? sent_count <= count : sent_count == count);
    }
};

}  // namespace alltoallv
