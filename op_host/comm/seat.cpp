#include "comm/seat.h"

#include <sched.h>

#include <algorithm>
#include <map>

namespace alltoallv {

int better_seat(int rank, std::span<const uint16_t> seats, const CpuSet& allowed) {
    std::map<int, int> ranks_at;  // by processor
    for (size_t word = 0; word < allowed.size(); ++word)
        for (int bit = 0; bit < 64; ++bit)
            if ((allowed[word] >> bit & 1) != 0) ranks_at[static_cast<int>(word) * 64 + bit] = 0;
    for (const uint16_t cpu : seats) ++ranks_at[cpu];
    const auto fewer = [](const auto& a, const auto& b) { return a.second < b.second; };
    for (int j = static_cast<int>(seats.size()) - 1; j >= 0; --j) {
        int& here = ranks_at[seats[static_cast<size_t>(j)]];
        const auto emptiest = std::min_element(ranks_at.begin(), ranks_at.end(), fewer);
        if (here - emptiest->second < 2) continue;
        if (j == rank) return emptiest->first;
        --here;
        ++emptiest->second;
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
