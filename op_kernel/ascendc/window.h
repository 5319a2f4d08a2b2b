// Where things lie in a window: the memory of one rank that its peers can read and write. Plain numbers, for kernels
// and for the host.
//
// Kernels that communicate run as many cores on every rank as the communicator has lanes. Lane k of a rank works with
// lane k of its peers alone, so that no core waits for another core of its own rank. All places depend on the lane and
// on the communicator, never on a call: ranks may be at different calls, and a place that moved with a call's size
// would be written while a slower peer still reads what lay there before.
//
//     sequence[lane]                 the number of the last round, kept by the lane for its next call
//     flag[phase][lane][from]        written by the peers: number of the round, then an error and whom it names
//     announcement[half][lane]       what a rank tells its peers about a call of all_to_all_v
//     data[half][lane]               two halves, by the parity of the round
#pragma once

#include <cstdint>

namespace alltoallv_kernels {

constexpr uint32_t most_ranks = 64, most_lanes = 48, phases = 2;
constexpr uint32_t cell_bytes = 32;  // what a core writes at once

constexpr uint32_t announcement_bytes = (2 * most_ranks + 8) * 8;
constexpr uint32_t sequence_place = 0;
constexpr uint32_t flag_place = 4096;
constexpr uint32_t announcement_place = 256 << 10;
constexpr uint32_t data_place = 512 << 10;
static_assert(sequence_place + most_lanes * cell_bytes <= flag_place);
static_assert(flag_place + phases * most_lanes * most_ranks * cell_bytes <= announcement_place);
static_assert(announcement_place + 2 * most_lanes * announcement_bytes <= data_place);

/// What a kernel needs of a communicator. `lane_bytes` is the size of one half of one lane's data.
struct WindowTiling {
    uint32_t rank, size, lanes;
    uint32_t wait_us;  ///< the limit of one wait
    uint64_t lane_bytes;
    uint64_t windows[most_ranks];  ///< addresses on this device
};

/// What a lane leaves for the host: 8 words, of which 4 are used.
enum class LaneStatus : int32_t {
    done = 0,
    late = 1,        ///< `rank` did not come to round `sequence` in time
    told = 2,        ///< a peer has ended its wait: `rank` is the one that it waited for
    broken = 3,      ///< an earlier call of this communicator has failed; it can do nothing more
    overflow = 4,    ///< `rank` receives more rows than its output has; nothing was written anywhere
    bad_counts = 5,  ///< `rank` has a negative count or rows outside of its input; nothing was written anywhere
    mismatch = 6,    ///< `rank` has rows of another size than rank 0; nothing was written anywhere
    unexpected = 7,  ///< `rank` receives other counts than it expects; nothing was written anywhere
};
constexpr uint32_t status_words = 8;  // code, rank, sequence, phase

/// Returns the bytes of one half of a lane's data in windows of that size; 0 if they are too small.
constexpr uint64_t lane_bytes_of(uint64_t window_bytes, uint32_t lanes) {
    return window_bytes <= data_place ? 0 : (window_bytes - data_place) / (2ull * lanes) / 512 * 512;
}

}  // namespace alltoallv_kernels
