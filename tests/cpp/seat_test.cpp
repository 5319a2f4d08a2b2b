/// \file seat_test.cpp
/// \brief Who moves where when ranks outnumber processors, and that a move leaves the affinity mask alone.
#include "control/seat.h"

#include <sched.h>

#include <algorithm>
#include <random>

#include "check.h"

using namespace alltoallv;

namespace {

using Seats = std::vector<uint16_t>;

CpuSet first_cpus(int n) {
    CpuSet set{};
    for (int cpu = 0; cpu < n; ++cpu) set[static_cast<size_t>(cpu) / 64] |= uint64_t{1} << cpu % 64;
    return set;
}

std::vector<int> moves(const Seats& seats, const CpuSet& allowed) {
    std::vector<int> targets;
    for (size_t j = 0; j < seats.size(); ++j) targets.push_back(better_seat(static_cast<int>(j), seats, allowed));
    return targets;
}

void the_last_ones_move() {
    const CpuSet two = first_cpus(2);
    CHECK(moves({0, 1, 0, 1}, two) == (std::vector{-1, -1, -1, -1}));
    CHECK(moves({0, 1, 0}, two) == (std::vector{-1, -1, -1}));
    CHECK(moves({0, 0, 0, 1}, two) == (std::vector{-1, -1, 1, -1}));
    CHECK(moves({1, 1, 1, 1}, two) == (std::vector{-1, -1, 0, 0}));
    CHECK(moves({0, 0, 0, 0}, first_cpus(1)) == (std::vector{-1, -1, -1, -1}));
    CHECK(moves({0, 0, 0, 0}, first_cpus(4)) == (std::vector{-1, 3, 2, 1}));
}

/// Whatever the seats: all ranks move at once, and then no processor has two more than another.
void one_round_is_enough() {
    std::mt19937 random(1);
    for (int round = 0; round < 200; ++round) {
        const int cpus = 1 + static_cast<int>(random() % 70), ranks = 1 + static_cast<int>(random() % 200);
        Seats seats;
        for (int j = 0; j < ranks; ++j)
            seats.push_back(static_cast<uint16_t>(random() % static_cast<unsigned>(1 + random() % unsigned(cpus))));
        const std::vector<int> targets = moves(seats, first_cpus(cpus));
        std::vector<int> ranks_at(static_cast<size_t>(cpus));
        for (size_t j = 0; j < seats.size(); ++j)
            ++ranks_at[static_cast<size_t>(targets[j] < 0 ? seats[j] : targets[j])];
        const auto [fewest, most] = std::minmax_element(ranks_at.begin(), ranks_at.end());
        CHECK(*most - *fewest < 2);
    }
}

std::vector<int> usable() {
    const CpuSet mask = affinity();
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if ((mask[static_cast<size_t>(cpu) / 64] >> cpu % 64 & 1) != 0) cpus.push_back(cpu);
    return cpus;
}

void moves_the_thread() {
    const std::vector<int> cpus = usable();
    if (cpus.size() < 2) {
        std::printf("seat_test: one processor only: moving is not checked\n");
        return;
    }
    const CpuSet mask = affinity();
    int moved = 0;
    for (int round = 0; round < 50; ++round) {  // the kernel may move it once more, but not every time
        const uint16_t here = Seat::current();
        const auto target = static_cast<uint16_t>(here == cpus[0] ? cpus[1] : cpus[0]);
        CpuSet both{};
        for (const uint16_t cpu : {here, target}) both[cpu / 64u] |= uint64_t{1} << cpu % 64;
        Seat seat;
        const auto now = Clock::now();
        CHECK(seat.due(now));
        seat.level(1, Seats{here, here}, both, now);
        moved += Seat::current() == target ? 1 : 0;
        CHECK(affinity() == mask);
        CHECK(!seat.due(now));
        CHECK(seat.due(now + std::chrono::seconds(1)));
    }
    CHECK(moved > 25);
}

void stays_within_its_own_mask() {
    const std::vector<int> cpus = usable();
    if (cpus.size() < 2) {
        std::printf("seat_test: one processor only: not checked\n");
        return;
    }
    cpu_set_t before, one;
    CHECK_EQ(sched_getaffinity(0, sizeof before, &before), 0);
    CPU_ZERO(&one);
    CPU_SET(cpus[0], &one);
    CHECK_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    CpuSet both{};
    for (const int cpu : {cpus[0], cpus[1]}) both[static_cast<size_t>(cpu) / 64] |= uint64_t{1} << cpu % 64;
    const auto here = static_cast<uint16_t>(cpus[0]);
    Seat().level(1, Seats{here, here}, both, Clock::now());
    CHECK_EQ(Seat::current(), here);
    CHECK_EQ(usable().size(), size_t{1});
    CHECK_EQ(sched_setaffinity(0, sizeof before, &before), 0);
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_all(argc, argv,
                            {{"the last ones move", the_last_ones_move},
                             {"one round is enough", one_round_is_enough},
                             {"moves the thread", moves_the_thread},
                             {"stays within its own mask", stays_within_its_own_mask}});
}
