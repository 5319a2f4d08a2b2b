// Reductions between hosts: small ones travel with the rows, larger ones take two steps: every rank reduces its part of
// all ranks' vectors, in the order of ranks, and sends the result to all. The bits equal those over shared memory.
#include <cstring>
#include <numeric>

#include "op_kernel/cpu/reduce.h"
#include "transport/tcp/tcp_communicator.h"

namespace alltoallv {
namespace {

struct Part {
    size_t begin, bytes;
};

/// Returns equal parts of whole cache lines, or those that a reduce_scatter names.
std::vector<Part> parts_of(const Reduction& r, size_t total) {
    std::vector<Part> parts;
    const size_t element = size_of(r.dtype), ranks = r.counts.size();
    const size_t share = round_up((total + ranks - 1) / ranks, std::max(cache_line, element));
    for (size_t j = 0; j < ranks; ++j) {
        const size_t begin = r.op != OpKind::reduce_scatter ? std::min(j * share, total)
                             : parts.empty()                ? 0
                                                            : parts.back().begin + parts.back().bytes;
        parts.push_back({begin, r.op == OpKind::reduce_scatter ? static_cast<size_t>(r.counts[j]) * element
                                                               : std::min(begin + share, total) - begin});
    }
    return parts;
}

void reduce_into(const Reduction& r, char* out, const std::vector<const void*>& sources, size_t bytes) {
    if (bytes > 0) kernel::reduce(r.dtype, r.reduce_op, out, sources.data(), sources.size(), bytes / size_of(r.dtype));
}

}  // namespace

void TcpCommunicator::reduce(const Reduction& r, double timeout) {
    run(r.op, r.dtype, timeout, [&](Row& mine) {
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
    const std::vector<Part> parts = parts_of(r, static_cast<size_t>(total_count(r)) * size_of(r.dtype));
    const Part part = r.op == OpKind::reduce_scatter ? parts[static_cast<size_t>(rank())]
                                                     : Part{0, parts.back().begin + parts.back().bytes};
    if (r.op == OpKind::reduce && r.root != rank()) return;
    std::vector<const void*> sources;
    for (int j = 0; j < size(); ++j) sources.push_back(control_->payload(control_->row(j)) + part.begin);
    reduce_into(r, static_cast<char*>(r.output), sources, part.bytes);
}

void TcpCommunicator::reduce_in_parts(const Reduction& r) {
    const std::vector<Part> parts = parts_of(r, static_cast<size_t>(total_count(r)) * size_of(r.dtype));
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
        inputs.out[j] = input + parts[j].begin;
        inputs.out_bytes[j] = parts[j].bytes;
        inputs.in[j] = slot;
        inputs.in_bytes[j] = own.bytes;
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
        if (r.op != OpKind::reduce || j == root) {
            results.out[j] = result;
            results.out_bytes[j] = own.bytes;
        }
        if (!keeps) {
            results.in[j] = output + parts[j].begin;
            results.in_bytes[j] = parts[j].bytes;
        }
    }
    if (r.op == OpKind::all_reduce)
        share(results);
    else
        move(results, true);
}

}  // namespace alltoallv
