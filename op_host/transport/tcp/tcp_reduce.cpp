// Reductions between hosts: small ones travel with the rows, larger ones in two steps: every rank reduces its part of
// all ranks' vectors, in the order of ranks, and hands the result to all. The same bits as over shared memory.
#include <cstring>
#include <numeric>

#include "op_kernel/cpu/reduce.h"
#include "quantized/quant_grid.h"
#include "transport/tcp/tcp_operator.h"

namespace alltoallv {
namespace {

struct Part {
    size_t begin, bytes;
};

/// Equal parts of whole cache lines, and what a reduce_scatter names.
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
    if (bytes > 0)
        kernel::reduce(r.dtype, static_cast<kernel::Reduce>(r.reduce_op), out, sources.data(), sources.size(),
                       bytes / size_of(r.dtype));
}

}  // namespace

void TcpCommunicator::reduce(const Reduction& r, double timeout) {
    run(r.op, r.dtype, timeout, [&](Row& mine) {
        announce(mine, rank(), r);
        const size_t bytes = static_cast<size_t>(mine.count) * size_of(r.dtype);
        if (r.moves && bytes <= tcp_payload_bytes) {
            if (bytes > 0) std::memcpy(control_->payload(mine), r.input, bytes);
            mine.input.bits = bytes;
            mine.flags |= row_inline;
        }
        control_->publish(mine);
        control_->agree();
        if (!r.moves) return;
        if ((mine.flags & row_inline) != 0)
            reduce_small(r, mine);
        else
            reduce_in_parts(r, mine);
    });
}

void TcpCommunicator::reduce_small(const Reduction& r, Row& mine) {
    const std::vector<Part> parts = parts_of(r, static_cast<size_t>(mine.count) * size_of(r.dtype));
    const Part part = r.op == OpKind::reduce_scatter ? parts[static_cast<size_t>(rank())]
                                                     : Part{0, parts.back().begin + parts.back().bytes};
    if (r.op == OpKind::reduce && r.root != rank()) return;
    std::vector<const void*> sources;
    for (int j = 0; j < size(); ++j) sources.push_back(control_->payload(control_->row(j)) + part.begin);
    reduce_into(r, static_cast<char*>(r.output), sources, part.bytes);
}

void TcpCommunicator::reduce_in_parts(const Reduction& r, Row& mine) {
    const std::vector<Part> parts = parts_of(r, static_cast<size_t>(mine.count) * size_of(r.dtype));
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

void TcpCommunicator::quant_reduce(const QuantReduction& q, double timeout) {
    try {
        check(q);
    } catch (const Error& error) {
        fail(q.op, error);
        throw;
    }
    run(q.op, q.dtype, timeout, [&](Row& mine) {
        announce(mine, control_->payload(mine), rank(), q);
        control_->publish(mine);
        control_->agree();
        if (q.moves) quant_reduce_in_parts(q);
    });
}

void TcpCommunicator::quant_reduce_in_parts(const QuantReduction& q) {
    const auto me = static_cast<size_t>(rank()), ranks = static_cast<size_t>(size());
    const bool scatters = q.op == OpKind::quantized_reduce_scatter;
    QuantGrid grid{alltoallv::parts_of(q, size())};
    grid.piece = std::max<size_t>(grid.longest(), 1);
    Misfit misfit;
    with_codec(q, grid.parts, [&](QuantCodec& codec) {
        codec.keep_whole();
        codec.find_scales();
        const auto bytes_of = [&](size_t part) {
            return round_up(codec.slot_bytes(grid.range(part, 0).count), cache_line);
        };
        const auto result_of = [&](size_t part) {
            return scatters ? 0 : round_up(codec.result_bytes(grid.range(part, 0).count), cache_line);
        };
        const size_t flag_bytes = sizeof(uint64_t);
        size_t sent = 0, results = 0;
        for (size_t j = 0; j < ranks; ++j) {
            sent += bytes_of(j);
            results += result_of(j) + flag_bytes;
        }
        scratch_.resize(sent + ranks * bytes_of(me) + results);
        char *encoded = scratch_.data(), *slot = encoded + sent, *result = slot + ranks * bytes_of(me);
        Pieces codes(size()), sums(size());
        std::vector<const char*> slots;
        for (size_t j = 0; j < ranks; ++j) {
            if (grid.parts[j].count > 0) codec.encode(grid.range(j, 0), encoded);
            slots.push_back(j == me ? encoded : slot + j * bytes_of(me));
            if (j != me) {
                codes.out[j] = encoded;
                codes.out_bytes[j] = bytes_of(j);
                codes.in[j] = slot + j * bytes_of(me);
                codes.in_bytes[j] = bytes_of(me);
            }
            sums.in[j] = result;
            result += sums.in_bytes[j] = result_of(j) + flag_bytes;
            encoded += bytes_of(j);
        }
        move(codes, true);

        char* const own = sums.in[me];
        const QuantRange range = grid.range(me, 0);
        bool fits = true;
        if (range.count > 0) fits = codec.reduce(range, slots, scatters ? output_at(q, grid, range) : own);
        const uint64_t flag = fits ? 0 : 1;
        std::memcpy(own + result_of(me), &flag, sizeof flag);
        for (size_t j = 0; j < ranks; ++j) {
            sums.out[j] = own;
            sums.out_bytes[j] = j == me ? 0 : sums.in_bytes[me];
        }
        const size_t own_bytes = std::exchange(sums.in_bytes[me], 0);
        if (!scatters || q.overflow == Overflow::raise) share(sums);
        sums.in_bytes[me] = own_bytes;
        for (size_t j = 0; j < ranks; ++j) {
            const QuantRange part = grid.range(j, 0);
            if (part.count == 0) continue;
            uint64_t other = 0;
            if (!scatters || q.overflow == Overflow::raise || j == me)
                std::memcpy(&other, sums.in[j] + result_of(j), sizeof other);
            const bool decoded = scatters || codec.decode(part, sums.in[j], output_at(q, grid, part));
            if (other != 0 || !decoded) misfit.note(part);
        }
    });
    moving_ = false;  // everybody is done: an error that all ranks raise leaves the communicator usable
    misfit.raise(q, control_->describe_op());
}

}  // namespace alltoallv
