#include "runtime/core/collective.h"

#include <algorithm>
#include <numeric>

#include "runtime/base/sizes.h"
#include "runtime/core/strided_region.h"

namespace alltoallv {

uint64_t pair_hash(int from, int to, int64_t count) {
    if (count == 0) return 0;
    uint64_t x = static_cast<uint64_t>(count) * 0x9e3779b97f4a7c15u;
    x ^= (static_cast<uint64_t>(static_cast<uint32_t>(from)) << 32 | static_cast<uint32_t>(to)) + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

uint64_t pair_balance(int rank, std::span<const int64_t> send_counts, std::span<const int64_t> recv_counts) {
    uint64_t balance = 0;
    for (size_t j = 0; j < send_counts.size(); ++j) balance += pair_hash(rank, static_cast<int>(j), send_counts[j]);
    for (size_t j = 0; j < recv_counts.size(); ++j) balance -= pair_hash(static_cast<int>(j), rank, recv_counts[j]);
    return balance;
}

std::vector<Part> parts_of(const Reduction& r) {
    const size_t element = size_of(r.dtype), ranks = r.counts.size();
    const size_t total = static_cast<size_t>(total_count(r)) * element;
    const size_t share = round_up((total + ranks - 1) / ranks, std::max(cache_line, element));
    std::vector<Part> parts;
    size_t end = 0;
    for (const int64_t count : r.counts) {
        const size_t begin = end;
        end = r.op == OpKind::reduce_scatter ? begin + static_cast<size_t>(count) * element
                                             : std::min(begin + share, total);
        parts.push_back({begin, end - begin});
    }
    return parts;
}

Part result_part(const Reduction& r, int rank) {
    const size_t element = size_of(r.dtype);
    if (r.op != OpKind::reduce_scatter) {
        const bool gets = r.op != OpKind::reduce || r.root == rank;
        return {0, gets ? static_cast<size_t>(total_count(r)) * element : 0};
    }
    const auto own = r.counts.begin() + rank;
    const int64_t before = std::accumulate(r.counts.begin(), own, int64_t{0});
    return {static_cast<size_t>(before) * element, static_cast<size_t>(*own) * element};
}

ExchangeSummary summarize(const Exchange& x, int rank) {
    const auto element = static_cast<int64_t>(size_of(x.dtype)), unit = x.byte_displs ? 1 : element;
    const bool learns = x.recv_counts.empty();
    ExchangeSummary all{};
    all.balance = pair_balance(rank, x.send_counts, x.recv_counts);
    const auto reach = [&](size_t& extent, int64_t displ, int64_t count, std::span<const Steps> steps, size_t i) {
        if (count == 0) return;
        const StridedRegion region = region_of(nullptr, element, steps, i);
        extent =
            std::max(extent, static_cast<size_t>(displ * unit) + region.extent(static_cast<size_t>(count * element)));
    };
    const size_t none = x.send_counts.size();
    size_t last = none, last_peer = none;  // the last regions that are not empty
    const auto repeats = [&](size_t i, size_t j) {
        return j != none && x.sdispls[i] == x.sdispls[j] && x.send_counts[i] == x.send_counts[j] &&
               (x.send_steps.empty() || x.send_steps[i] == x.send_steps[j]);
    };
    for (size_t i = 0; i < x.send_counts.size(); ++i) {
        const bool own = static_cast<int>(i) == rank;
        if (const int64_t count = x.send_counts[i]; count > 0) {
            const auto bytes = static_cast<size_t>(count * element);
            reach(all.input_extent, x.sdispls[i], count, x.send_steps, i);
            if (!repeats(i, last)) all.read += bytes;
            if (!own && !repeats(i, last_peer)) all.to_peers += bytes;
            last = i;
            if (!own) last_peer = i;
        }
        if (learns) continue;
        const int64_t count = x.recv_counts[i];
        reach(all.output_extent, x.rdispls[i], count, x.recv_steps, i);
        all.written += static_cast<size_t>(count * element);
        if (!own) all.from_peers += static_cast<size_t>(count * element);
    }
    return all;
}

}  // namespace alltoallv
