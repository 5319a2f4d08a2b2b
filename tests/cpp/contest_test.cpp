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

void both_are_tried_at_first() {
    Contest contest;
    CHECK(run(contest, 3, 10, 5) == 0);
    CHECK(run(contest, 3, 10, 5) == 3);
}

void the_quicker_is_taken() {
    Contest slow, quick;
    run(slow, 6, 10, 20);
    run(quick, 6, 10, 5);
    CHECK(run(slow, 640, 10, 20) == 30);
    CHECK(run(quick, 640, 10, 5) == 610);
}

void a_change_is_noticed() {
    Contest contest;
    run(contest, 100, 10, 20);
    const int others = run(contest, 640, 10, 5);  // found out with the next trial
    CHECK(others > 640 - 64 - 30);
    CHECK(run(contest, 640, 10, 20) < 64);  // with the calls themselves
}

void one_slow_call_is_none() {
    Contest contest;
    run(contest, 6, 10, 20);
    for (int i = 0; i < 30; ++i) {
        CHECK(run(contest, 1, 10, 20) == 0);
        CHECK(run(contest, 1, 1000, 20) == 0);
    }
}

void sizes_are_told_apart() {
    Contest contest;
    run(contest, 100, 10, 20);
    CHECK(run(contest, 3, 100, 50, 4 * size) == 0);
    run(contest, 3, 100, 50, 4 * size);
    CHECK(run(contest, 50, 100, 50, 4 * size) == 50);
    CHECK(run(contest, 20, 10, 20) == 0);
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_all(argc, argv,
                            {{"both are tried at first", both_are_tried_at_first},
                             {"the quicker is taken", the_quicker_is_taken},
                             {"a change is noticed", a_change_is_noticed},
                             {"one slow call is none", one_slow_call_is_none},
                             {"sizes are told apart", sizes_are_told_apart}});
}
