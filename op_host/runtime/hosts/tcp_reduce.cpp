// Reductions between hosts: small ones travel with the rows, larger ones take two steps: every rank reduces its part of
// all ranks' vectors, in the order of ranks, and sends the result to all. The bits equal those over shared memory.
#include <cstring>
#include <numeric>

#include "op_kernel/cpu/reduce.h"
#include "runtime/hosts/tcp_communicator.h"

namespace alltoallv {
namespace {

void reduce_into(const Reduction& r, char* out, const std::vector<const void*>& sources, size_t bytes) {
    if (bytes > 0) kernel::reduce(r.dtype, r.reduce_op, out, sources.data(), sources.size(), bytes / size_of(r.dtype));
}

}  // namespace

void TcpCommunicator::reduce(const Reduction& r, double timeout) {
    run(r.op, r.dtype, timeout, r.moves, [&](Row& mine) {
        announce(mine, rank(), r);
        const size_t bytes = static_cast<size_t>(total_count(r)) * size_of(r.dtype);
        const bool small = bytes <= tcp_payload_bytes;
        if (r.moves && small) {
            if (bytes > 0) std::memcpy(control_->payload(mine), r.input, bytes);
            mine.input.bits = bytes;
            mine.flags |= row_inline;
        }
        control_->publish(mine);
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
    for (int j = 0; j < size(); ++j) sources.push_back(control_->payload(control_->row(j)) + part.begin);
    reduce_into(r, static_cast<char*>(r.output), sources, part.bytes);
}

void TcpCommunicator::reduce_in_parts(const Reduction& r) {
    start_moving();
    const std::vector<Part> parts = parts_of(r);
    const auto me = static_cast<size_t>(rank()), root = static_cast<size_t>(r.root);
    const Part own = parts[me];
    const auto* const input = static_cast<const char*>(r.input);
    auto* const output = static_cast<char*>(r.output);

    scratch_.resize(own.bytes * (parts.size() + 1));
    Pieces inputs(size());
    std::vector<const void*> sources;
    for (size_t j = 0; j < parts.size(); ++j) {
        char* const slot = scratch_.data() + j * own.bytes;
        sources.push_back(j == me ? input + own.begin : slot);
        if (j == me) continue;
        inputs.out[j] = {input + parts[j].begin, parts[j].bytes};
        inputs.in[j] = {slot, own.bytes};
    }
    move(inputs, true);

    const bool keeps = r.op == OpKind::reduce && root != me;  // another rank gets the result
    char* const result = r.op == OpKind::reduce_scatter ? output
                         : keeps                        ? scratch_.data() + parts.size() * own.bytes
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
