// What a summary says of an exchange's counts and displacements, against numbers worked out by hand.
#include "core/collective.h"

#include <vector>

#include "check.h"

using namespace alltoallv;

namespace {

using Counts = std::vector<int64_t>;

Exchange exchange(const Counts& sends, const Counts& sdispls, const Counts& recvs, const Counts& rdispls) {
    Exchange x;
    x.dtype = DType::int32;  // 4 bytes
    x.send_counts = sends;
    x.sdispls = sdispls;
    x.recv_counts = recvs;
    x.rdispls = rdispls;
    return x;
}

TEST(regions_apart) {
    const Counts sends{2, 0, 5}, sdispls{1, 90, 10}, recvs{0, 3, 4}, rdispls{70, 8, 0};
    const ExchangeSummary all = summarize(exchange(sends, sdispls, recvs, rdispls), 2);
    CHECK_EQ(all.input_extent, 4u * 15);
    CHECK_EQ(all.output_extent, 4u * 11);  // empty regions reach nowhere
    CHECK_EQ(all.read, 4u * 7);
    CHECK_EQ(all.to_peers, 4u * 2);
    CHECK_EQ(all.written, 4u * 7);
    CHECK_EQ(all.from_peers, 4u * 3);
    CHECK_EQ(all.digests.sent, pair_hash(2, 0, 2) + pair_hash(2, 2, 5));
    CHECK_EQ(all.digests.expected, pair_hash(1, 2, 3) + pair_hash(2, 2, 4));
}

/// As all_gather has it: they are read once, by whoever.
TEST(one_region_for_all) {
    const Counts sends{3, 3, 3, 3}, sdispls(4, 0), recvs{3, 3, 3, 3}, rdispls{0, 3, 6, 9};
    for (int rank = 0; rank < 4; ++rank) {
        const ExchangeSummary all = summarize(exchange(sends, sdispls, recvs, rdispls), rank);
        CHECK_EQ(all.read, 12u);
        CHECK_EQ(all.to_peers, 12u);
        CHECK_EQ(all.written, 48u);
        CHECK_EQ(all.from_peers, 36u);
    }
    const Counts skipping{3, 0, 3, 3};
    CHECK_EQ(summarize(exchange(skipping, sdispls, recvs, rdispls), 3).to_peers, 12u);
}

TEST(learnt_counts_and_bytes) {
    const Counts sends{2, 1}, sdispls{100, 6};
    Exchange x = exchange(sends, sdispls, {}, {});
    x.byte_displs = true;
    const ExchangeSummary all = summarize(x, 0);
    CHECK_EQ(all.input_extent, 108u);
    CHECK_EQ(all.digests.expected, 0u);
    CHECK_EQ(all.written + all.from_peers + all.output_extent, 0u);
}

TEST(types_that_only_move) {
    const auto type = moving_dtype("12 bytes #0a3f");
    CHECK(type && only_moves(*type));
    CHECK_EQ(size_of(*type), 12u);
    CHECK(name_of(*type) == "12 bytes #0a3f");
    CHECK(info(*type).arithmetic == Arithmetic::none);
    CHECK(!moving_dtype("float32") && !moving_dtype("0 bytes #0000") && !moving_dtype("65536 bytes #0000"));
    const Counts counts{2, 1}, displs{0, 2};
    Exchange x = exchange(counts, displs, counts, displs);
    x.dtype = *type;
    CHECK_EQ(summarize(x, 0).input_extent, 36u);
}

}  // namespace
