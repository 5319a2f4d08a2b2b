// Both ways are tried, the quicker one is taken, and what changes is noticed.
#include "runtime/shm/algorithm_selector.h"

#include "check.h"

using namespace alltoallv;

namespace {

constexpr size_t size = 100000;

/// Runs `calls` calls, whose times by either way are given; returns how many went the other way.
int run(AlgorithmSelector& selector, int calls, double usual, double other, size_t bytes = size) {
    int others = 0;
    for (int i = 0; i < calls; ++i) {
        const AlgorithmSelector::Way way = selector.choose(bytes);
        others += way == AlgorithmSelector::other;
        selector.note(bytes, way, way == AlgorithmSelector::other ? other : usual);
    }
    return others;
}

TEST(the_quicker_is_taken_until_it_is_not) {
    AlgorithmSelector selector;
    const int tried = run(selector, 100, 10, 20);
    CHECK(0 < tried && tried < 50);
    CHECK(run(selector, 1000, 10, 5) > 500);
    CHECK(run(selector, 1000, 10, 20) < 500);
}

TEST(one_slow_call_is_no_change) {
    AlgorithmSelector selector;
    run(selector, 10, 10, 20);
    CHECK(run(selector, 1, 1000, 20) == 0);
    CHECK(run(selector, 20, 10, 20) < 10);
}

TEST(sizes_are_told_apart) {
    AlgorithmSelector selector;
    run(selector, 100, 10, 20);
    CHECK(run(selector, 100, 100, 50, 4 * size) > 50);
    CHECK(run(selector, 20, 10, 20) < 10);
}

}  // namespace
