#include "runtime/core/request.h"

#include <algorithm>
#include <numeric>

#include "runtime/base/error.h"
#include "runtime/core/regions.h"
#include "runtime/core/shape_words.h"
#include "runtime/core/terms.h"

namespace alltoallv {
namespace {

std::string joined(std::span<const int64_t> values) {
    std::string text;
    for (size_t i = 0; i < values.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
    return text;
}

}  // namespace

void check_split(std::string_view name, std::string_view tensor, int64_t rows, std::span<int64_t> counts, bool none) {
    const auto size = static_cast<int64_t>(counts.size());
    if (none) {
        if (rows % size != 0)
            throw invalid_param(
                1080, std::string(tensor) + " has " + std::to_string(rows) + " rows in dimension 0, which " +
                          std::to_string(size) +
                          " ranks cannot share equally: give split sizes, or a multiple of the number of ranks");
        std::ranges::fill(counts, rows / size);
        return;
    }
    uint64_t sum = 0;
    bool fits = true;
    for (const int64_t count : counts) {
        fits = fits && count >= 0 && count <= rows;
        sum += static_cast<uint64_t>(count);
        fits = fits && sum <= static_cast<uint64_t>(rows);
    }
    if (!fits || sum != static_cast<uint64_t>(rows))
        throw invalid_param(1081, std::string(name) + " is " + list_text(counts) +
                                      ", expected entries >= 0 whose sum is " + std::to_string(rows) +
                                      ", dimension 0 of " + std::string(tensor));
}

void to_elements(std::span<int64_t> values, int64_t row) {
    const std::vector<int64_t> list(values.begin(), values.end());
    for (int64_t& value : values)
        if (__builtin_mul_overflow(value, row, &value))
            throw invalid_param(1082, "counts or displacements are " + list_text(list) + " rows of " +
                                          std::to_string(row) + " elements, expected at most 2**63 - 1");
}

Exchange Request::exchange(DType dtype, const void* input, void* output) const {
    Exchange result;
    result.op = op;
    result.dtype = dtype;
    result.input = input;
    result.output = output;
    result.send_counts = array(0);
    result.sdispls = array(1);
    if (!learns) {
        result.recv_counts = array(2);
        result.rdispls = array(3);
    }
    result.send_steps = send_steps;
    result.recv_steps = recv_steps;
    result.byte_displs = byte_displs;
    result.root = root;
    result.terms = terms;
    result.row = row;
    result.moves = row != 0;
    return result;
}

void Request::count_rows(Shape input, std::string_view name) {
    row = row_size(input, name);
    shape.assign(input.begin(), input.end());
}

void Request::settle(size_t first, bool packs) {
    if (row > 1) {
        to_elements(array(first), row);
        if (!packs) to_elements(array(first + 1), row);
    }
    if (packs) pack(array(first), array(first + 1));
}

int64_t Request::length(Shape tensor) const {
    return row == 0 ? tensor[0] : element_count(tensor);
}

void Request::check(int64_t numel_in, int64_t numel_out) {
    const int64_t unit = std::max<int64_t>(row, 1);
    check_send(numel_in, send_counts(), sdispls(), size(), unit);
    if (learns) return;
    const int64_t needed = check_receive(numel_out, recv_counts(), rdispls(), size(), unit);
    shape[0] = needed / unit;
    const auto covered = std::accumulate(recv_counts().begin(), recv_counts().end(), int64_t{0});
    has_gaps = covered < (numel_out < 0 ? needed : numel_out);
}

void Request::check_covers(int64_t numel_in) const {
    const auto covered = std::accumulate(send_counts().begin(), send_counts().end(), int64_t{0});
    if (covered == numel_in) return;
    const int64_t unit = std::max<int64_t>(row, 1);
    const char* const what = row == 1 && shape.size() < 2 ? "elements" : "rows";
    throw invalid_param(1083, "send_counts sum to ", covered / unit, ", expected ", numel_in / unit, ", the ", what,
                        " of the input: give sdispls to leave ", what, " out");
}

std::vector<int64_t> Request::shape_for(std::span<const int64_t> counts) const {
    std::vector<int64_t> result = shape;
    result[0] = std::accumulate(counts.begin(), counts.end(), int64_t{0}) / std::max<int64_t>(row, 1);
    return result;
}

Request gather_request(OpKind op, int size, int64_t numel) {
    Request request(op, size);
    std::ranges::fill(request.send_counts(), numel);
    std::ranges::fill(request.recv_counts(), numel);
    pack(request.recv_counts(), request.rdispls());
    return request;
}

void check_gathered(std::string_view name, int64_t numel, Shape input, int size) {
    const int64_t each = element_count(input);
    if (numel != size * each)
        throw invalid_tensor(2032, ErrorType::INVALID_TENSOR_SIZE,
                             std::string(name) + " has " + std::to_string(numel) + " elements, expected " +
                                 std::to_string(size) + " times the " + std::to_string(each) +
                                 " of an input of shape " + tuple_text(input));
}

void check_splits(Request& request, Shape output, Shape input, bool no_output_splits, bool no_input_splits,
                  const SplitNames& names) {
    request.count_rows(input, names.input);
    if (output.empty() || row_size(output) != request.row)
        throw invalid_tensor(2031, ErrorType::INVALID_TENSOR_DIM,
                             names.output + " has rows of shape " +
                                 tuple_text(output.subspan(std::min<size_t>(1, output.size()))) + ", expected " +
                                 tuple_text(input.subspan(1)) + ", as the input has");
    check_split(names.input_sizes, names.input, input[0], request.send_counts(), no_input_splits);
    check_split(names.output_sizes, names.output, output[0], request.recv_counts(), no_output_splits);
    request.settle_sends(true);
    request.settle_receives(true);
    request.shape.assign(output.begin(), output.end());
}

void pack(std::span<const int64_t> counts, std::span<int64_t> displs) {
    int64_t next = 0;
    for (size_t j = 0; j < counts.size(); ++j) {
        displs[j] = next;
        if (__builtin_add_overflow(next, counts[j], &next) && j + 1 < counts.size())
            throw invalid_param(
                1084, "the counts " + list_text(counts) + " sum to 2**63 or more, expected at most 2**63 - 1");
    }
}

std::vector<int64_t> even_parts(int64_t length, int size) {
    std::vector<int64_t> parts(static_cast<size_t>(size), length / size);
    for (int64_t j = 0; j < length % size; ++j) ++parts[static_cast<size_t>(j)];
    return parts;
}

int64_t row_size(Shape shape, std::string_view name) {
    if (shape.empty())
        throw invalid_tensor(2034, ErrorType::INVALID_TENSOR_DIM, name, " has shape (), expected at least 1 dimension");
    return element_count(shape.subspan(1));
}

void check_shape(std::string_view name, Shape shape, Shape expected) {
    if (!std::ranges::equal(shape, expected))
        throw invalid_tensor(2028, ErrorType::INVALID_TENSOR_DIM, name, " has shape ", tuple_text(shape), ", expected ",
                             tuple_text(expected));
}

void check_count(std::string_view name, int64_t count, int64_t expected) {
    if (count != expected)
        throw invalid_tensor(2024, ErrorType::INVALID_TENSOR_SIZE, name, " has ", count, " elements, expected ",
                             expected);
}

std::string list_text(std::span<const int64_t> values) {
    return "[" + joined(values) + "]";
}

std::string tuple_text(Shape values) {
    return "(" + joined(values) + (values.size() == 1 ? ",)" : ")");
}

void check_apart(ByteRange output, ByteRange input) {
    if (overlaps(output, input))
        throw invalid_param(1085, "output and input overlap in memory, expected separate memory");
}

void check_same_or_apart(ByteRange output, ByteRange input) {
    if (overlaps(output, input) && output.address != input.address)
        throw invalid_param(1048, "out and input overlap in memory without being the same, expected one or the other");
}

void check_outputs_apart(std::span<const ByteRange> outputs, std::string_view name) {
    std::vector<size_t> order(outputs.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::erase_if(order, [&](size_t j) { return outputs[j].bytes == 0; });
    std::ranges::sort(order, {}, [&](size_t j) { return outputs[j].address; });
    const auto entry = [&](size_t j) { return std::string(name) + "[" + std::to_string(j) + "]"; };
    for (size_t i = 1; i < order.size(); ++i)
        if (overlaps(outputs[order[i - 1]], outputs[order[i]]))
            throw invalid_param(1047, entry(order[i - 1]), " and ", entry(order[i]), " overlap in memory");
}

void check_own(std::string_view name, std::span<const ByteRange> regions, size_t bytes, size_t element, int rank) {
    const size_t own = regions[static_cast<size_t>(rank)].bytes;
    if (own != bytes)
        throw invalid_tensor(2025, ErrorType::INVALID_TENSOR_SIZE, "entry ", rank, " of ", name, " has ", own / element,
                             " elements, expected ", bytes / element, ", as this rank's tensor has");
}

void check_part(std::string_view name, size_t bytes, std::string_view others, size_t others_bytes, size_t element,
                int rank) {
    if (bytes != others_bytes)
        throw invalid_tensor(2027, ErrorType::INVALID_TENSOR_SIZE, name, " has ", bytes / element,
                             " elements, expected the ", others_bytes / element, " of entry ", rank, " of ", others);
}

void check_gather_apart(ByteRange output, ByteRange input, int rank) {
    if (input.address != output.address + static_cast<size_t>(rank) * input.bytes) check_apart(output, input);
}

std::vector<int64_t> contiguous_strides(Shape shape) {
    std::vector<int64_t> strides(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0; stride *= std::max<int64_t>(shape[i], 1)) strides[i] = stride;
    return strides;
}

std::optional<Steps> in_rows(Shape box, Shape strides) {
    if (std::ranges::find(box, 0) != box.end()) return Steps{0, 0};
    size_t i = box.size();
    int64_t row = 1;
    while (i > 0 && (box[i - 1] == 1 || strides[i - 1] == row)) row *= box[--i];
    if (i == 0) return Steps{0, 0};
    const Steps steps{row, strides[i - 1]};
    int64_t expected = steps.stride;
    for (; i > 0; --i) {
        if (box[i - 1] == 1) continue;
        if (strides[i - 1] != expected || expected < row) return std::nullopt;
        expected *= box[i - 1];
    }
    return steps;
}

std::optional<Request> swap_request(const Swap& swap, int rank, Shape input, Shape strides) {
    Request request(OpKind::all_to_all_nd, static_cast<int>(swap.scatter_sizes.size()));
    const auto own = static_cast<size_t>(rank);
    std::vector<int64_t> box(input.begin(), input.end()), others;
    for (size_t i = 0; i < box.size(); ++i)
        if (i != swap.scatter && i != swap.gather) others.push_back(box[i]);
    const DimensionTerms terms{swap.gather, swap.scatter, ShapeWords(others).digest};
    request.terms = word_of(terms);

    const auto place = [&](size_t dim, std::span<const int64_t> sizes, Shape distances, std::span<int64_t> counts,
                           std::span<int64_t> displs, std::vector<Steps>& steps) {
        int64_t begin = 0;
        for (size_t j = 0; j < sizes.size(); ++j) {
            box[dim] = sizes[j];
            const std::optional<Steps> rows = in_rows(box, distances);
            if (!rows) return false;
            counts[j] = element_count(box);
            displs[j] = begin * distances[dim];
            steps.push_back(*rows);
            begin += sizes[j];
        }
        box[dim] = begin;
        return true;
    };
    request.shape.assign(input.begin(), input.end());
    request.shape[swap.scatter] = swap.scatter_sizes[own];
    request.shape[swap.gather] = 0;
    bool fits = true;
    for (const int64_t size : swap.gather_sizes)
        fits = fits && !__builtin_add_overflow(request.shape[swap.gather], size, &request.shape[swap.gather]);
    int64_t product = 1;
    for (const int64_t length : request.shape)
        fits = fits && !__builtin_mul_overflow(product, std::max<int64_t>(length, 1), &product);
    if (!fits)
        throw invalid_param(1086, "gather_sizes is " + list_text(swap.gather_sizes) +
                                      ", expected an output of at most 2**63 - 1 elements");
    if (!place(swap.scatter, swap.scatter_sizes, strides, request.send_counts(), request.sdispls(), request.send_steps))
        return std::nullopt;
    box = request.shape;
    if (!place(swap.gather, swap.gather_sizes, contiguous_strides(request.shape), request.recv_counts(),
               request.rdispls(), request.recv_steps))
        return std::nullopt;
    return request;
}

}  // namespace alltoallv
