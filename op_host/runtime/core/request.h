/// \file request.h
/// \brief The counts and displacements of one rank's exchange, read by a front end and checked here.
#pragma once

#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/core/collective.h"

namespace alltoallv {

using Shape = std::span<const int64_t>;

/// One entry per rank in each of four arrays, in elements once the counts have been converted.
class Request {
  public:
    Request(OpKind kind, int size) : op(kind), size_(static_cast<size_t>(size)), values_(4 * size_) {}

    OpKind op;
    int root = 0;  ///< as in Exchange, as `terms`
    int64_t terms = 0;
    /// Elements per unit of the caller's counts. 0 for empty rows: the counts stay rows, which the ranks compare, and
    /// nothing moves.
    int64_t row = 1;
    bool byte_displs = false;                   ///< as in Exchange
    std::vector<Steps> send_steps, recv_steps;  ///< as in Exchange
    bool learns = false;                        ///< the peers announce the receive counts

    /// The shape of the output, given or to be made; without the first dimension if counts are rows.
    std::vector<int64_t> shape{0};
    bool has_gaps = false;  ///< the output has elements outside all regions

    int size() const { return static_cast<int>(size_); }
    std::span<int64_t> send_counts() { return array(0); }
    std::span<int64_t> sdispls() { return array(1); }
    std::span<int64_t> recv_counts() { return array(2); }
    std::span<int64_t> rdispls() { return array(3); }
    std::span<const int64_t> send_counts() const { return array(0); }
    std::span<const int64_t> values() const { return values_; }

    /// Returns the elements of a tensor, or its rows where these are empty: what the counts count.
    int64_t length(Shape tensor) const;

    /// Returns the values in elements: zeros where they count empty rows.
    std::vector<int64_t> in_elements() const { return row == 0 ? std::vector<int64_t>(values_.size()) : values_; }

    /// Returns an Exchange that refers to this request, which must outlive it.
    Exchange exchange(DType dtype, const void* input, void* output) const;

    /// Makes the counts rows of an input of that shape. Throws invalid_tensor if it has no dimensions.
    void count_rows(Shape input, std::string_view name = "input");

    /// Converts from the caller's units to elements; `packs` sets `displs` for regions packed in rank order.
    void settle_sends(bool packs) { settle(0, packs); }
    void settle_receives(bool packs) { settle(2, packs); }

    /// Checks bounds and overlaps, in elements or in empty rows. `numel_out` is -1 if the output must be made. Sets
    /// `shape` and `has_gaps`.
    void check(int64_t numel_in, int64_t numel_out);

    /// Throws invalid_param unless the packed send regions, which `check` has seen, cover the whole input.
    void check_covers(int64_t numel_in) const;

    /// Returns the output's shape for the receive counts that the peers have announced.
    std::vector<int64_t> shape_for(std::span<const int64_t> recv_counts) const;

  private:
    std::span<int64_t> array(size_t i) { return {values_.data() + i * size_, size_}; }
    std::span<const int64_t> array(size_t i) const { return {values_.data() + i * size_, size_}; }
    void settle(size_t first, bool packs);

    size_t size_;
    std::vector<int64_t> values_;
};

/// Every rank sends the same `numel` elements to all ranks and receives all ranks' elements, packed.
Request gather_request(OpKind op, int size, int64_t numel);

/// Throws invalid_tensor unless the `numel` elements of output `name` are as many as all ranks' inputs of that shape
/// have.
void check_gathered(std::string_view name, int64_t numel, Shape input, int size);

/// Checks that the `rows` of a tensor's dimension 0 are divided into these counts; sets equal ones if there are `none`.
void check_split(std::string_view name, std::string_view tensor, int64_t rows, std::span<int64_t> counts, bool none);

/// Converts rows of `row` elements to elements. Throws invalid_param beyond 64 bits.
void to_elements(std::span<int64_t> values, int64_t row);

/// The front end's names for the arguments of an all_to_all_single.
struct SplitNames {
    std::string output = "output", input = "input", output_sizes = "output_split_sizes",
                input_sizes = "input_split_sizes";
};

/// Checks the parts of dimension 0 of two tensors, whose split sizes are or will be in the request's counts: equal
/// parts without split sizes. Throws if rows have different shapes, or sizes do not add up.
void check_splits(Request& request, Shape output, Shape input, bool no_output_splits, bool no_input_splits,
                  const SplitNames& names);

/// Computes displacements of regions that follow each other in rank order. Throws invalid_param beyond 64 bits.
void pack(std::span<const int64_t> counts, std::span<int64_t> displs);

/// Returns parts that are as equal as possible, the larger ones first.
std::vector<int64_t> even_parts(int64_t length, int size);

inline int64_t element_count(Shape shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

/// An exchange of one dimension of a tensor for another (all_to_all_nd): rank r sends the parts of `scatter` and puts
/// the parts of `gather` together, of which the ranks have these sizes, in order.
struct Swap {
    size_t scatter, gather;
    std::span<const int64_t> scatter_sizes, gather_sizes;
};

/// Returns its request for an input of that shape and these strides, in elements, and a contiguous output; nothing
/// where what goes to a rank does not lie in rows at one distance. Throws invalid_param for an output beyond 64 bits.
std::optional<Request> swap_request(const Swap& swap, int rank, Shape input, Shape strides);

/// Returns the rows in which a box lies that has these strides: zeros if it is in one piece, nothing if it is not in
/// rows at one distance, in the order of its elements.
std::optional<Steps> in_rows(Shape box, Shape strides);

/// Returns the strides of a contiguous tensor.
std::vector<int64_t> contiguous_strides(Shape shape);

/// Returns the elements of a row of dimension 0. Throws invalid_tensor for a shape without dimensions.
int64_t row_size(Shape shape, std::string_view name = "input");

/// Throw invalid_tensor unless a tensor has that shape, or as many elements.
void check_shape(std::string_view name, Shape shape, Shape expected);
void check_count(std::string_view name, int64_t count, int64_t expected);

/// Formats values as Python writes lists and tuples.
std::string list_text(std::span<const int64_t> values);
std::string tuple_text(Shape values);

/// The bytes of one tensor, as a range of addresses.
struct ByteRange {
    uintptr_t address;
    size_t bytes;
};

inline bool overlaps(ByteRange a, ByteRange b) {
    return a.bytes != 0 && b.bytes != 0 && a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

/// Throws invalid_param if the two overlap.
void check_apart(ByteRange output, ByteRange input);

/// Throws invalid_param if the two overlap without beginning at one place.
void check_same_or_apart(ByteRange output, ByteRange input);

/// Throws invalid_param if two regions of an output list overlap.
void check_outputs_apart(std::span<const ByteRange> outputs, std::string_view name);

/// Throws invalid_tensor unless the entry for `rank` of a root's list is as large as the root's own tensor.
void check_own(std::string_view name, std::span<const ByteRange> regions, size_t bytes, size_t element, int rank);

/// Throws invalid_tensor unless a tensor is as large as the entry for `rank` of a list of the other side.
void check_part(std::string_view name, size_t bytes, std::string_view others, size_t others_bytes, size_t element,
                int rank);

/// Checks the same for a gather, whose input may be this rank's part of the output.
void check_gather_apart(ByteRange output, ByteRange input, int rank);

}  // namespace alltoallv
