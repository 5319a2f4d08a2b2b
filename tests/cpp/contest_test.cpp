/// \file contest_test.cpp
/// \brief Both ways are tried, the quicker one is taken, and what changes is noticed.
#include "transport/shm/contest.h"

#include "check.h"

using namespace alltoallv;

namespace {

constexpr size_t size = 100000;

/// Runs `calls` calls, whose times by either way are given; returns how many went the other way.
int run(Contest& contest, int calls, double usual, double other, size_t bytes = size) {
    int others = 0;
    for (int i = 0; i < calls; ++i) {
        const Contest::Way way = contest.choose(bytes);
        others += way == Contest::other;
        contest.note(bytes, way, way == Contest::other ? other : usual);
    }
    return others;
}

void the_quicker_is_taken_until_it_is_not() {
    Contest contest;
    const int tried = run(contest, 100, 10, 20);
    CHECK(0 < tried && tried < 50);
    CHECK(run(contest, 1000, 10, 5) > 500);
    CHECK(run(contest, 1000, 10, 20) < 500);
}

void one_slow_call_is_no_change() {
    Contest contest;
    run(contest, 10, 10, 20);
    CHECK(run(contest, 1, 1000, 20) == 0);
    CHECK(run(contest, 20, 10, 20) < 10);
}

void sizes_are_told_apart() {
    Contest contest;
    run(contest, 100, 10, 20);
    CHECK(run(contest, 100, 100, 50, 4 * size) > 50);
    CHECK(run(contest, 20, 10, 20) < 10);
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_all(argc, argv,
                            {{"the quicker is taken until it is not", the_quicker_is_taken_until_it_is_not},
                             {"one slow call is no change", one_slow_call_is_no_change},
                             {"sizes are told apart", sizes_are_told_apart}});
}
