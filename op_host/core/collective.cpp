#include "core/collective.h"

#include <algorithm>

namespace alltoallv {

uint64_t pair_hash(int from, int to, int64_t count) {
    if (count == 0) return 0;
    uint64_t x = static_cast<uint64_t>(count) * 0x9e3779b97f4a7c15u;
    x ^= (static_cast<uint64_t>(static_cast<uint32_t>(from)) << 32 | static_cast<uint32_t>(to)) + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

PairDigests digest_pairs(int rank, std::span<const int64_t> send_counts, std::span<const int64_t> recv_counts) {
    PairDigests digests;
    for (size_t j = 0; j < send_counts.size(); ++j)
        digests.sent += pair_hash(rank, static_cast<int>(j), send_counts[j]);
    for (size_t j = 0; j < recv_counts.size(); ++j)
        digests.expected += pair_hash(static_cast<int>(j), rank, recv_counts[j]);
    return digests;
}

ExchangeSummary summarize(const Exchange& x, int rank) {
    const auto element = static_cast<int64_t>(size_of(x.dtype)), unit = x.byte_displs ? 1 : element;
    const bool learns = x.recv_counts.empty();
    ExchangeSummary all{};
    all.digests = digest_pairs(rank, x.send_counts, x.recv_counts);
    const auto reach = [&](size_t& extent, int64_t displ, int64_t count) {
        if (count > 0) extent = std::max(extent, static_cast<size_t>(displ * unit + count * element));
    };
    const size_t none = x.send_counts.size();
    size_t last = none, last_peer = none;  // the last regions that are not empty
    const auto repeats = [&](size_t i, size_t j) {
        return j != none && x.sdispls[i] == x.sdispls[j] && x.send_counts[i] == x.send_counts[j];
    };
    for (size_t i = 0; i < x.send_counts.size(); ++i) {
        const bool own = static_cast<int>(i) == rank;
        if (const int64_t count = x.send_counts[i]; count > 0) {
            const auto bytes = static_cast<size_t>(count * element);
            reach(all.input_extent, x.sdispls[i], count);
            if (!repeats(i, last)) all.read += bytes;
            if (!own && !repeats(i, last_peer)) all.to_peers += bytes;
            last = i;
            if (!own) last_peer = i;
        }
        if (learns) continue;
        const int64_t count = x.recv_counts[i];
        reach(all.output_extent, x.rdispls[i], count);
        all.written += static_cast<size_t>(count * element);
        if (!own) all.from_peers += static_cast<size_t>(count * element);
    }
    return all;
}

}  // namespace alltoallv
