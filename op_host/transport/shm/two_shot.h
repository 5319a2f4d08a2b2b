/// \file two_shot.h
/// \brief The pipeline of every reduction of large vectors: scratch that stays in cache, filled, reduced, copied out.
///
/// The vector is cut into one part per rank and the parts into pieces; step i handles piece i of every part. In each
/// step a rank lays its pieces out in its own scratch (encode), reduces its own part's piece from everybody's scratch
/// (reduce), and takes the other parts' results from their owners' scratch (decode). Scratch has two buffers, used in
/// turn, so a rank is at most one step ahead of the slowest.
#pragma once

#include <vector>

#include "transport/shm/shm_communicator.h"

namespace alltoallv {

/// Sizes of the pipeline, equal on all ranks.
struct TwoShotShape {
    size_t steps = 0;
    size_t slot_bytes = 0;     ///< of one encoded piece
    size_t result_bytes = 0;   ///< of one reduced piece
    bool stages_input = true;  ///< false: `reduce` reads the inputs of the peers in place
    bool gathers = true;       ///< false: every rank keeps its own part only, and `decode` is not called
    /// `reduce` leaves results in the outputs, where the peers' `decode` finds them.
    bool shares_results = false;
    bool reads_scratch = true;  ///< false: `decode` reads none

    /// Largest piece such that two buffers of `ranks` slots and one result fit the scratch, with `extra` bytes to
    /// spare in each of them.
    static size_t piece_bytes(size_t ranks, size_t extra = 0) {
        const size_t slot = Layout::scratch_bytes / 2 / (ranks + 1) / cache_line * cache_line;
        return slot > extra ? slot - extra : 0;
    }
};

/// `Stages` has, for a part number and a step:
///     void encode(size_t part, size_t step, char* slot);
///     void reduce(size_t step, const std::vector<const char*>& slots, char* result);  // of this rank's own part
///     void decode(size_t part, size_t step, const char* result);
template <class Stages>
void ShmCommunicator::two_shot(Stages& stages, const TwoShotShape& shape) {
    const auto ranks = static_cast<size_t>(size());
    const auto me = static_cast<size_t>(rank());
    const size_t buffer_bytes = ranks * shape.slot_bytes + shape.result_bytes;
    const auto buffer = [&](size_t owner, uint64_t step) {
        return control_->scratch(static_cast<int>(owner)) + (step & 1) * buffer_bytes;
    };
    const auto all = [](int) { return true; };
    const auto staged = [](Flags& f) -> Flag& { return f.staged; };
    const auto reduced = [](Flags& f) -> Flag& { return f.reduced; };
    const auto copied = [](Flags& f) -> Flag& { return f.copied; };
    Flags& mine = control_->my_flags();
    slots_.resize(ranks);

    for (size_t i = 0; i < shape.steps; ++i) {
        const uint64_t step = steps_ + i;
        if (shape.stages_input) {
            if (step >= 2) control_->wait_flags(reduced, step - 1, all);  // nobody reads this buffer any more
            // Its own part comes last, for which no peer waits.
            for (size_t k = 1; k <= ranks; ++k) {
                if (k == ranks) control_->signal(mine.staged, step + 1);
                const size_t part = (me + k) % ranks;
                stages.encode(part, i, buffer(me, step) + part * shape.slot_bytes);
            }
            control_->wait_flags(staged, step + 1, all);
        }
        if (shape.gathers && shape.reads_scratch && step >= 2) control_->wait_flags(copied, step - 1, all);
        for (size_t j = 0; j < ranks; ++j) slots_[j] = buffer(j, step) + me * shape.slot_bytes;
        stages.reduce(i, slots_, buffer(me, step) + ranks * shape.slot_bytes);
        if (!shape.stages_input) control_->throw_if_poisoned();  // a peer that gave up may have changed its input
        control_->signal(mine.reduced, step + 1);
        for (size_t k = 0; shape.gathers && k < ranks; ++k) {  // its own part first, which is there
            if (k == 1) control_->wait_flags(reduced, step + 1, all);
            const size_t part = (me + k) % ranks;
            stages.decode(part, i, buffer(part, step) + ranks * shape.slot_bytes);
        }
        control_->signal(mine.copied, step + 1);
    }
    if (shape.shares_results && shape.steps > 0) {
        control_->throw_if_poisoned();                            // a peer that gave up may have changed its output
        control_->wait_flags(copied, steps_ + shape.steps, all);  // peers are done with my output
    } else if (!shape.stages_input && shape.steps > 0) {
        control_->wait_flags(reduced, steps_ + shape.steps, all);  // peers are done with my input
    }
    steps_ += shape.steps;
}

}  // namespace alltoallv
