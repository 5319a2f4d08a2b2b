// Both ways are tried, the quicker one is taken, and what changes is noticed.
#include "runtime/shm/algorithm_selector.h"

#include "check.h"

using namespace alltoallv;

namespace {

constexpr size_t size = 100000;

/// Runs operators, whose times by either way are given; counts those that went the other way.
struct Runs {
    int run(int operators, double usual, double other, size_t bytes = size) {
        int others = 0;
        for (int i = 0; i < operators; ++i) {
            const AlgorithmSelector::Choice choice = selector.choose(bytes, expected);
            const bool is_other = choice.way == AlgorithmSelector::other;
            others += is_other;
            if (choice.timed) selector.note(bytes, choice.way, is_other ? other : usual);
        }
        return others;
    }

    AlgorithmSelector selector;
    AlgorithmSelector::Way expected = AlgorithmSelector::usual;
};

TEST(the_quicker_is_taken_until_it_is_not) {
    Runs runs;
    const int tried = runs.run(128, 10, 13);
    CHECK(0 < tried && tried < 30);
    CHECK(runs.run(1024, 10, 5) > 800);
    CHECK(runs.run(2048, 10, 13) < 500);
}

TEST(what_is_much_slower_is_tried_seldom) {
    Runs runs;
    runs.run(64, 10, 20);
    const int tried = runs.run(1024, 10, 20);
    CHECK(0 < tried && tried < 10);
    CHECK(runs.run(4096, 10, 5) > 2000);
}

TEST(slow_operators_of_one_trial_are_no_change) {
    Runs runs;
    runs.run(256, 10, 13);
    CHECK(runs.run(6, 1000, 13) == 3);
    CHECK(runs.run(58, 10, 13) == 0);
}

TEST(a_little_quicker_is_not_worth_it) {
    Runs runs;
    runs.run(64, 10, 9.5);
    CHECK(runs.run(58, 10, 9.5) <= 3);
}

TEST(what_is_expected_is_taken_first) {
    Runs runs;
    runs.expected = AlgorithmSelector::other;
    CHECK(runs.run(7, 10, 20) == 7);
    CHECK(runs.run(3, 10, 20) == 0);
    runs.run(70, 10, 20);
    CHECK(runs.run(48, 10, 20) == 0);
}

TEST(sizes_are_told_apart) {
    Runs runs;
    runs.run(128, 10, 20);
    CHECK(runs.run(256, 100, 50, 4 * size) > 50);
    CHECK(runs.run(58, 10, 20) < 4);
}

TEST(other_sizes_between_do_not_matter) {
    for (const int between : {1, 2, 5, 63, 255, 256}) {
        Runs runs;
        int others = 0;
        for (int i = 0; i < 40; ++i) {
            others += runs.run(1, 10, 5);
            runs.run(between, 10, 20, 8 * size);
        }
        CHECK(others > 20);
    }
}

TEST(one_operator_by_each_way_may_do) {
    Runs runs;
    runs.selector = AlgorithmSelector(1);
    CHECK_EQ(runs.run(5, 10, 5), 0);
    CHECK_EQ(runs.run(11, 10, 5), 11);
}

TEST(ranks_take_the_same_way_when_it_is_timed) {
    AlgorithmSelector one, two;
    for (uint64_t number = 0; number < 1000; ++number) {
        const auto mine = one.choose(size), peers = two.choose(7 * size);
        CHECK(mine.timed == peers.timed && mine.way == peers.way);
        if (!mine.timed) continue;
        one.note(size, mine.way, 10 + 0.1 * static_cast<double>(number % 10));
        two.note(7 * size, peers.way, 10);
    }
}

}  // namespace
