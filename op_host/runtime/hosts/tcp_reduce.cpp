// Reductions between hosts: small ones travel with the rows, larger ones take two steps: every rank reduces its part of
// all ranks' vectors, in the order of ranks, and sends the result to all. The bits equal those over shared memory.
#include <cstring>
#include <numeric>

#include "op_kernel/cpu/reduce.h"
#include "runtime/hosts/tcp_communicator.h"

namespace alltoallv {
namespace {

void reduce_into(const Reduction& r, char* out, const std::vector<const void*>& sources, size_t bytes) {
    const kernel::Order order = r.leaves == 0 ? kernel::Order::sequence : kernel::Order::tree;
    if (bytes > 0)
        kernel::reduce(r.dtype, r.reduce_op, out, sources.data(), sources.size(), bytes / size_of(r.dtype), order);
}

/// Returns the bytes of one of a rank's inputs.
size_t input_bytes(const Reduction& r) {
    return static_cast<size_t>(total_count(r)) * size_of(r.dtype);
}

}  // namespace

void TcpCommunicator::reduce(const Reduction& r, double timeout) {
    run(r.op, r.dtype, timeout, r.moves, [&](OwnRow& own_row) {
        announce(own_row, rank(), r);
        const size_t bytes = input_bytes(r) * inputs_per_rank(r);
        const bool small = bytes <= tcp_payload_bytes;
        if (r.moves && small) {
            if (bytes > 0) std::memcpy(control_->payload(own_row), r.input, bytes);
            own_row.input.bits = bytes;
            own_row.flags |= row_inline;
        }
        control_->publish();
        control_->agree();
        if (!r.moves) return;
        if (small)
            reduce_small(r);
        else
            reduce_in_parts(r);
    });
}

void TcpCommunicator::reduce_small(const Reduction& r) {
    const Part part = result_part(r, rank());
    std::vector<const void*> sources;
    for (int j = 0; j < size(); ++j) {
        if (part.bytes > 0 && !control_->has_brought(j)) throw control_->broken(j, "it brings no data");
        for (size_t i = 0; i < inputs_per_rank(r); ++i)
            sources.push_back(control_->payload(control_->row(j)) + part.begin + i * input_bytes(r));
    }
    reduce_into(r, static_cast<char*>(r.output), sources, part.bytes);
}

void TcpCommunicator::reduce_in_parts(const Reduction& r) {
    start_moving();
    const std::vector<Part> parts = parts_of(r);
    const auto me = static_cast<size_t>(rank()), root = static_cast<size_t>(r.root);
    const Part own = parts[me];
    const auto* const input = static_cast<const char*>(r.input);
    auto* const output = static_cast<char*>(r.output);

    // A rank's several inputs are sent part by part, for which they are copied behind slots and result.
    const size_t n = inputs_per_rank(r), bytes = input_bytes(r), slots_bytes = own.bytes * n * parts.size();
    scratch_.resize(slots_bytes + own.bytes + (n > 1 ? bytes * n : 0));
    Pieces inputs(size());
    std::vector<const void*> sources;
    char* packed = scratch_.data() + slots_bytes + own.bytes;
    for (size_t j = 0; j < parts.size(); ++j) {
        char* const slot = scratch_.data() + j * own.bytes * n;
        for (size_t i = 0; i < n; ++i)
            sources.push_back(j == me ? input + i * bytes + own.begin : slot + i * own.bytes);
        if (j == me) continue;
        inputs.out[j] = {n > 1 ? packed : input + parts[j].begin, parts[j].bytes * n};
        inputs.in[j] = {slot, own.bytes * n};
        for (size_t i = 0; i < n && n > 1; ++i, packed += parts[j].bytes)
            if (parts[j].bytes > 0) std::memcpy(packed, input + i * bytes + parts[j].begin, parts[j].bytes);
    }
    move(inputs, true);

    const bool keeps = r.op == OpKind::reduce && root != me;  // another rank gets the result
    char* const result = r.op == OpKind::reduce_scatter ? output
                         : keeps                        ? scratch_.data() + slots_bytes
                                                        : output + own.begin;
    reduce_into(r, result, sources, own.bytes);
    if (r.op == OpKind::reduce_scatter) return;
    Pieces results(size());
    for (size_t j = 0; j < parts.size(); ++j) {
        if (j == me) continue;
        if (r.op != OpKind::reduce || j == root) results.out[j] = {result, own.bytes};
        if (!keeps) results.in[j] = {output + parts[j].begin, parts[j].bytes};
    }
    if (r.op == OpKind::all_reduce)
        share(results);
    else
        move(results, true);
}

}  // namespace alltoallv
