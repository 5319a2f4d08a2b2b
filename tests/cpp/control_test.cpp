// The control plane by itself: the segment's layout, digests, agreement, poison, the flight recorder.
#include "runtime/control/control.h"

#include <sys/mman.h>

#include <algorithm>
#include <random>
#include <utility>

#include "errors.h"
#include "runtime/base/unique_fd.h"

using namespace alltoallv;
using testing::check_contains, testing::fails;

namespace {

/// The control planes of all ranks of a domain, in this process.
struct Planes {
    std::shared_ptr<Mapping> memory;
    std::vector<std::unique_ptr<ControlPlane>> planes;

    explicit Planes(int size, double timeout = 20) {
        const Layout layout(size, 1024);
        const UniqueFd fd(memfd_create("control-test", MFD_CLOEXEC));
        CHECK(ftruncate(fd.get(), static_cast<off_t>(layout.total())) == 0);
        memory = std::make_shared<Mapping>(fd.get(), layout.total());
        for (int rank = 0; rank < size; ++rank) {
            CommunicatorOptions options;
            options.rank = rank;
            options.size = size;
            options.domain = "d\"1";
            options.timeout = timeout;
            planes.push_back(std::make_unique<ControlPlane>(options, 1024, memory));
        }
    }

    ControlPlane& operator[](int rank) { return *planes[static_cast<size_t>(rank)]; }
    int size() const { return static_cast<int>(planes.size()); }

    /// Runs `body` for every rank in a thread of its own.
    void each(const std::function<void(ControlPlane&)>& body) {
        testing::all_pass(testing::run_threads(size(), [&](int rank) { body((*this)[rank]); }));
    }
};

/// Announces counts[j] for every rank j and expects expected[j] from it, then agrees.
void agree(ControlPlane& control, const std::vector<int64_t>& counts, const std::vector<int64_t>& expected) {
    try {
        OwnRow& own_row = control.open(OpKind::all_to_all_v, DType::float32, -1);
        own_row.count = 1;
        for (int j = 0; j < control.size(); ++j) {
            const auto i = static_cast<size_t>(j);
            own_row.pairs()[j] = {counts[i], 0, expected[i], 0};
        }
        own_row.balance = pair_balance(control.rank(), counts, expected);
        control.publish();
        control.agree();
    } catch (const Error&) {
        control.close(false, 0);
        throw;
    }
    control.close(true, 4);
}

void agree(ControlPlane& control) {
    const std::vector<int64_t> ones(static_cast<size_t>(control.size()), 1);
    agree(control, ones, ones);
}

/// No two parts of the segment overlap, and what atomics live in is aligned, for every size.
TEST(layout) {
    for (const int size : {1, 2, 3, 7, 8, 48, 384}) {
        for (const size_t inline_bytes : {size_t{0}, size_t{1000}, size_t{16384}}) {
            const Layout layout(size, inline_bytes);
            std::vector<std::pair<size_t, size_t>> parts{{0, sizeof(ControlHeader)}};
            void* const reserved = mmap(nullptr, layout.total(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(reserved != MAP_FAILED);
            char* const base = static_cast<char*>(reserved);
            const auto add = [&](const void* begin, size_t bytes) {
                const auto at = static_cast<size_t>(static_cast<const char*>(begin) - base);
                CHECK_EQ(at % cache_line, size_t{0});
                parts.emplace_back(at, bytes);
            };
            const size_t pairs = static_cast<size_t>(size) * sizeof(Pair);
            for (int rank = 0; rank < size; ++rank) {
                add(&layout.flags(base, rank), sizeof(Flags));
                add(&layout.status(base, rank), sizeof(RankStatus));
                add(layout.scratch(base, rank), Layout::scratch_bytes);
                for (const uint64_t seq : {4u, 5u}) {
                    Row& row = layout.row(base, rank, seq);
                    CHECK(&layout.row(base, rank, seq + 2) == &row);
                    add(&row, sizeof(Row) + pairs);
                    add(layout.payload(row), layout.inline_bytes());
                    add(layout.steps(row), static_cast<size_t>(size) * sizeof(PairSteps));
                }
                if (size > 48) continue;
                for (int to = 0; to < size; ++to)
                    add(&layout.ring(base, rank, to), sizeof(RingHeader) + layout.ring_bytes());
            }
            munmap(reserved, layout.total());
            std::sort(parts.begin(), parts.end());
            for (size_t i = 1; i < parts.size(); ++i) CHECK(parts[i - 1].first + parts[i - 1].second <= parts[i].first);
            CHECK(parts.back().first + parts.back().second <= layout.total());
            CHECK(layout.inline_bytes() >= inline_bytes && layout.inline_bytes() >= sizeof(ErrorText));
        }
    }
}

/// Over all ranks the sum is 0 when all pairs agree, and another with every single count that differs.
TEST(balance) {
    CHECK_EQ(pair_hash(3, 5, 0), uint64_t{0});
    CHECK(pair_hash(3, 5, 7) != pair_hash(5, 3, 7));
    std::mt19937_64 random(1);
    for (int round = 0; round < 2000; ++round) {
        const int size = 1 + static_cast<int>(random() % 12);
        const auto ranks = static_cast<size_t>(size);
        std::vector<std::vector<int64_t>> sends(ranks), recvs(ranks);
        for (size_t i = 0; i < ranks; ++i)
            for (size_t j = 0; j < ranks; ++j) {
                const auto count = static_cast<int64_t>(random() % 3 == 0 ? 0 : random() >> (random() % 40 + 20));
                sends[i].push_back(count);
                recvs[j].push_back(count);
            }
        uint64_t sum = 0;
        for (size_t i = 0; i < ranks; ++i) sum += pair_balance(static_cast<int>(i), sends[i], recvs[i]);
        CHECK_EQ(sum, uint64_t{0});
        const int from = static_cast<int>(random() % static_cast<unsigned>(size)), to = (from + 1) % size;
        const auto a = static_cast<int64_t>(random() % 100), b = a + 1 + static_cast<int64_t>(random() % 3);
        CHECK(pair_hash(from, to, a) != pair_hash(from, to, b));
        if (from == to) continue;  // counts that have changed places
        CHECK(pair_hash(from, to, a) + pair_hash(to, from, b) != pair_hash(from, to, b) + pair_hash(to, from, a));
    }
}

TEST(agreement) {
    Planes planes(3);
    planes.each([](ControlPlane& control) {
        const auto rank = static_cast<size_t>(control.rank());
        const std::vector<std::vector<int64_t>> sends{{0, 1, 2}, {3, 4, 5}, {6, 7, 8}};
        const std::vector<int64_t> receives{sends[0][rank], sends[1][rank], sends[2][rank]};
        for (int i = 0; i < 50; ++i) agree(control, sends[rank], receives);
        std::vector<int64_t> wrong = receives;
        if (rank == 1) ++wrong[2];
        fails(ErrorClass::peer_mismatch,
              "operator #51 all_to_all_v of domain 'd\"1': rank 2 sends 7 elements to rank 1, which expects 8",
              [&] { agree(control, sends[rank], wrong); });
        agree(control, sends[rank], receives);
        if (rank == 2) {
            control.fail(OpKind::all_gather, invalid_param(1000, std::string(2000, 'x')), false);
        } else {
            fails(ErrorClass::invalid_param, "operator #53 all_gather of domain 'd\"1' failed on rank 2: xxxx",
                  [&] { agree(control); });
        }
        agree(control);
        CHECK_EQ(control.seq(), uint64_t{54});
    });
}

TEST(timeouts) {
    Planes planes(2, 0.2);
    const std::string text = fails(ErrorClass::comm_timeout, "rank 0 waited ", [&] { agree(planes[0]); });
    check_contains(text, " s in operator #1 all_to_all_v of domain 'd\"1' for rank 1 (pid ");
    check_contains(text, "running, no operator yet)");
    CHECK_EQ(planes[1].status(0).acked.load(), uint64_t{1});  // rank 0 has met the poison, rank 1 not yet
    CHECK_EQ(planes[0].status(1).acked.load(), uint64_t{0});
    CHECK_EQ(fails(ErrorClass::comm_timeout, text, [&] { agree(planes[1]); }), text);  // the late one meets the same
    CHECK_EQ(planes[0].status(1).acked.load(), uint64_t{1});
}

/// However many poison it at once, one cause wins and every rank tells that one.
TEST(first_poison_wins) {
    for (int round = 0; round < 50; ++round) {
        Planes planes(4);
        std::vector<std::string> texts(4);
        std::atomic<int> calls = 0;
        for (int rank = 0; rank < 4; ++rank) planes[rank].on_poison = [&] { ++calls; };
        planes.each([&](ControlPlane& control) {
            const std::string name = "cause " + std::to_string(control.rank());
            control.poison(PoisonKind::aborted, name);
            control.poison(PoisonKind::timeout, "a second thought");
            texts[static_cast<size_t>(control.rank())] = fails(ErrorClass::peer_lost, "", [&] { agree(control); });
        });
        CHECK_EQ(calls.load(), 1);
        for (const std::string& text : texts) CHECK_EQ(text, texts[0]);
        check_contains(texts[0], "operator #1 all_to_all_v of domain 'd\"1': cause ");
    }
}

/// Also if a rank publishes it, and aborts, between this one's looks at whom it waits for and at how the ranks are.
TEST(what_was_published_before_an_abort_counts) {
    Planes planes(2);
    bool published = false;
    const auto missing = [&] {
        std::vector<int> found;
        if (!std::exchange(published, true)) {
            found.push_back(1);
            planes[1].poison(PoisonKind::aborted, "afterwards");
        }
        return found;
    };
    planes[0].wait([&] { return published; }, missing);
    fails(ErrorClass::peer_lost, "afterwards", [&] { agree(planes[0]); });
}

/// Of two ranks that die at once, only the one that all tell of counts as lost, wherever both are heard of.
TEST(first_loss_wins) {
    Planes planes(4);
    const auto check = [&](const char* text) {
        const ControlPlane::Poison poison = planes[0].received_poison();
        CHECK_EQ(poison.lost, 3);
        CHECK_EQ(poison.process, planes[0].process_of(3));
        check_contains(poison.reason, text);
        fails(ErrorClass::peer_lost, text, [&] { agree(planes[0]); });
    };
    planes[2].lost(3, "it is gone");
    check("rank 3 was lost: it is gone");
    planes[0].lost(1, "it is also gone");
    planes[2].receive_poison(PoisonKind::lost, 0, 1, "rank 1 was lost: another host tells");
    check("rank 3 was lost: it is gone");
}

/// Whoever meets the end of a part, which another process has set, has told the whole before it fails: no rank that
/// lives is taken for the cause.
TEST(a_whole_ends_before_its_part_throws) {
    Planes whole(2), part(2);
    part[0].become_part_of(whole[0]);
    part[0].share_poison([&](const ControlPlane::Poison& poison) { whole[0].receive_poison(poison); });
    part[1].poison(PoisonKind::lost, "rank 1 was lost: it is gone");
    CHECK(!whole[0].poisoned());
    fails(ErrorClass::peer_lost, "rank 1 was lost: it is gone", [&] { agree(part[0]); });
    CHECK(whole[0].poisoned());
    CHECK_EQ(whole[0].received_poison().reason, std::string("rank 1 was lost: it is gone"));
}

TEST(acknowledges_when_idle) {
    Planes planes(2);
    planes[1].acknowledge_if_idle();
    CHECK_EQ(planes[0].status(1).acked.load(), uint64_t{0});  // nothing is wrong
    planes[1].open(OpKind::barrier, DType::uint8, -1);
    planes[1].publish();
    planes[0].poison(PoisonKind::aborted, "enough");
    planes[1].acknowledge_if_idle();
    CHECK_EQ(planes[0].status(1).acked.load(), uint64_t{0});  // it is in an operator
    planes[1].close(false, 0);
    CHECK_EQ(planes[0].status(1).acked.load(), uint64_t{1});
    planes[0].acknowledge_if_idle();
    CHECK_EQ(planes[1].status(0).acked.load(), uint64_t{1});
}

/// Who is told of a deadlock in one domain, and leaves others at once, explains why there; but not after further
/// operators.
TEST(deadlocks_are_not_hidden) {
    Planes first(2), second(2), used(2);
    first[1].poison(PoisonKind::deadlock, "ranks wait for each other");
    (void)fails(ErrorClass::deadlock, "ranks wait for each other", [&] { agree(first[0]); });
    used.each([](ControlPlane& control) { agree(control); });
    second[0].leave();
    used[0].leave();
    (void)fails(ErrorClass::deadlock, "ranks wait for each other", [&] { agree(second[1]); });
    CHECK(!used[1].poisoned());
}

/// A sleeper is woken, long before its slice of sleep is over would tell: 200 hand-overs.
TEST(doorbell) {
    Planes planes(2);
    const auto start = Clock::now();
    planes.each([](ControlPlane& control) {
        Doorbell bell(reinterpret_cast<ControlHeader*>(control.memory()->data())->bell);
        for (uint64_t i = 1; i <= 200; ++i) {
            const auto ready = [&] {
                const Flag& theirs = control.flags(1 - control.rank()).done;
                return theirs.value.load(std::memory_order_acquire) >= i - (control.rank() == 0 ? 1 : 0);
            };
            while (!ready()) bell.sleep(ready, 1000);
            control.signal(control.my_flags().done, i);
        }
    });
    CHECK(seconds_since(start) < 20);
}

TEST(flight_recorder) {
    Planes planes(2);
    planes.each([](ControlPlane& control) {
        for (size_t i = 0; i < flight_length + 5; ++i) agree(control);
        fails(ErrorClass::peer_mismatch, "",
              [&] { agree(control, {1, 1}, {1, control.rank() == 0 ? int64_t{2} : int64_t{1}}); });
    });
    (void)planes[1].open(OpKind::barrier, DType::uint8, -1);
    const std::string record = planes[0].flight_record();
    check_contains(record, "{\"domain\": \"d\\\"1\", \"rank\": 0, \"size\": 2, \"ranks\": [{\"rank\": 0, \"pid\": " +
                               std::to_string(getpid()) + ", \"left\": false, \"operators\": [{\"seq\": 7, ");
    check_contains(record,
                   "{\"seq\": 69, \"operator\": \"all_to_all_v\", \"dtype\": \"float32\", \"state\": \"done\", "
                   "\"bytes\": 4, \"start_ns\": ");
    check_contains(record,
                   "{\"seq\": 70, \"operator\": \"all_to_all_v\", \"dtype\": \"float32\", \"state\": "
                   "\"failed\", \"bytes\": 0, ");
    check_contains(record, "{\"seq\": 71, \"operator\": \"barrier\", \"dtype\": \"uint8\", \"state\": \"running\", ");
    CHECK(record.find("\"seq\": 6,") == std::string::npos);
    planes[1].close(false, 0);
    planes[1].leave();
    check_contains(planes[0].flight_record(), "\"left\": true");
    check_contains(planes[0].describe_rank(1), ", left, last operator #71 barrier)");
}

}  // namespace
