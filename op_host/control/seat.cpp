#include "control/seat.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <vector>

namespace alltoallv {

int better_seat(int rank, std::span<const uint16_t> seats, const CpuSet& allowed) {
    struct Processor {
        int cpu, ranks;
    };
    std::vector<Processor> processors;  // by number
    for (size_t word = 0; word < allowed.size(); ++word)
        for (uint64_t rest = allowed[word]; rest != 0; rest &= rest - 1)
            processors.push_back({static_cast<int>(word) * 64 + std::countr_zero(rest), 0});
    const auto processor_of = [&](uint16_t cpu) {
        const auto at = std::ranges::lower_bound(processors, int{cpu}, {}, &Processor::cpu);
        return at != processors.end() && at->cpu == cpu ? at : processors.insert(at, {cpu, 0});
    };
    for (const uint16_t cpu : seats) ++processor_of(cpu)->ranks;
    const auto [fewest, most] = std::ranges::minmax_element(processors, {}, &Processor::ranks);
    if (most->ranks - fewest->ranks < 2) return -1;  // nearly always
    for (int j = static_cast<int>(seats.size()) - 1; j >= 0; --j) {
        const auto here = processor_of(seats[static_cast<size_t>(j)]);
        const auto emptiest = std::ranges::min_element(processors, {}, &Processor::ranks);
        if (here->ranks - emptiest->ranks < 2) continue;
        if (j == rank) return emptiest->cpu;
        --here->ranks;
        ++emptiest->ranks;
    }
    return -1;
}

uint16_t Seat::current() {
    return static_cast<uint16_t>(sched_getcpu());
}

void Seat::level(int rank, std::span<const uint16_t> seats, const CpuSet& allowed, Clock::time_point now) {
    next_look_ = now + between_looks;
    const int target = better_seat(rank, seats, allowed);
    cpu_set_t mask, one;
    if (target < 0 || target >= CPU_SETSIZE || sched_getaffinity(0, sizeof mask, &mask) != 0) return;
    if (!CPU_ISSET(target, &mask)) return;
    CPU_ZERO(&one);
    CPU_SET(target, &one);
    if (sched_setaffinity(0, sizeof one, &one) == 0) (void)sched_setaffinity(0, sizeof mask, &mask);
    next_look_ = now + after_a_move;
}

}  // namespace alltoallv
