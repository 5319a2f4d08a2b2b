/// \file two_shot.h
/// \brief The pipeline for reductions of large vectors: scratch that stays in cache, filled, reduced, copied out.
///
/// The vector is cut into one part per rank and the parts into pieces; step i handles piece i of every part. A rank
/// lays its pieces out in its own scratch (encode), reduces its own part's piece from everybody's scratch (reduce), and
/// takes the other parts' results from their owners' scratch (decode). Three steps are under way at once, so that a
/// round of one, the next and the one after takes a single wait: in round k a rank encodes step k, reduces step k - 1
/// and decodes step k - 2, and nobody is more than a round ahead. Scratch has two buffers for what is encoded and three
/// for results.
#pragma once

#include <vector>

#include "runtime/shm/shm_communicator.h"

namespace alltoallv {

/// Sizes of the pipeline, equal on all ranks.
struct TwoShotShape {
    static constexpr size_t slot_buffers = 2, result_buffers = 3;

    size_t steps = 0;
    size_t slot_bytes = 0;     ///< of one encoded piece
    size_t result_bytes = 0;   ///< of one reduced piece
    bool stages_input = true;  ///< false: `reduce` reads the inputs of the peers in place
    bool gathers = true;       ///< false: every rank keeps only its own part, and `decode` is not called
    /// `reduce` leaves results in the outputs, where the peers' `decode` finds them.
    bool shares_results = false;

    /// Returns the scratch bytes that are used.
    size_t bytes(size_t ranks) const { return slot_buffers * ranks * slot_bytes + result_buffers * result_bytes; }
    /// Returns the largest piece whose slots and results, of the same size, fit the scratch.
    static size_t piece_bytes(size_t ranks) {
        return Layout::scratch_bytes / (slot_buffers * ranks + result_buffers) / cache_line * cache_line;
    }
};

/// `Stages` has, for a part number and a step:
///     void encode(size_t part, size_t step, char* slot);
///     void reduce(size_t step, const std::vector<const char*>& slots, char* result);  // of this rank's own part
///     void decode(size_t part, size_t step, const char* result);
template <class Stages>
void ShmCommunicator::two_shot(Stages& stages, const TwoShotShape& shape) {
    if (shape.steps == 0) return;
    const auto ranks = static_cast<size_t>(size());
    const auto me = static_cast<size_t>(rank());
    const auto slot = [&](size_t owner, size_t step, size_t part) {
        // The buffers also alternate across operators: writing lines that a peer has just read is slow.
        return control_->scratch(static_cast<int>(owner)) +
               ((steps_ + step) % TwoShotShape::slot_buffers * ranks + part) * shape.slot_bytes;
    };
    const auto result = [&](size_t owner, size_t step) {
        return control_->scratch(static_cast<int>(owner)) + TwoShotShape::slot_buffers * ranks * shape.slot_bytes +
               step % TwoShotShape::result_buffers * shape.result_bytes;
    };
    const auto finish_round = [&] {
        control_->throw_if_poisoned();  // a peer that has given up may have changed what was read in place
        control_->signal(control_->my_flags().rounds, ++rounds_);
    };
    const auto await_round = [&] {
        control_->wait_flags([](Flags& flags) -> Flag& { return flags.rounds; }, rounds_, [](int) { return true; });
    };
    slots_.resize(ranks);

    const size_t last = shape.steps + (shape.gathers ? 1 : 0);
    for (size_t round = shape.stages_input ? 0 : 1; round <= last; ++round) {
        const bool encodes = shape.stages_input && round < shape.steps;
        const bool reduces = round >= 1 && round <= shape.steps;
        const bool decodes = shape.gathers && round >= 2;
        for (size_t k = 1; encodes && k < ranks; ++k) {
            const size_t part = (me + k) % ranks;
            stages.encode(part, round, slot(me, round, part));
        }
        if (reduces) {
            for (size_t j = 0; j < ranks; ++j) slots_[j] = slot(j, round - 1, me);
            stages.reduce(round - 1, slots_, result(me, round - 1));
        }
        // The peers need no more of this round: this rank handles its own part, and takes theirs, while it waits for
        // them.
        if (round < last) finish_round();
        if (encodes) stages.encode(me, round, slot(me, round, me));
        if (reduces && shape.gathers) stages.decode(me, round - 1, result(me, round - 1));
        for (size_t k = 1; decodes && k < ranks; ++k) {
            const size_t part = (me + k) % ranks;
            stages.decode(part, round - 2, result(part, round - 2));
        }
        if (round < last) await_round();
    }
    if (shape.shares_results || !shape.stages_input) {  // until peers are done with this rank's output and input
        finish_round();
        await_round();
    }
    steps_ += shape.steps;
}

}  // namespace alltoallv
