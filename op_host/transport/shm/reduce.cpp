// Reductions: small ones in one shot from the mailboxes, larger ones in two shots through scratch that stays in cache.
#include "op_kernel/cpu/reduce.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "op_kernel/cpu/copy.h"
#include "transport/shm/two_shot.h"

namespace alltoallv {
namespace {

/// Bytes up to which one shot of two ranks is faster than two: each computes all of the result.
constexpr size_t paired_to = size_t{512} << 10;

}  // namespace

uint64_t ShmCommunicator::reduce_in_turn(const Reduction& r, Row& mine) {
    announce(mine, rank(), r);
    if (!r.moves) {
        control_->publish(mine);
        control_->agree();
        return 0;
    }
    const size_t bytes = static_cast<size_t>(total_count(r)) * size_of(r.dtype);
    if (bytes <= paired_to && fits_ring(bytes)) return reduce_pair(r, mine);
    const bool small = allows(Path::inlined) && bytes <= options_.inline_bytes;
    return small ? reduce_small(r, mine) : reduce_two_shot(r, mine);
}

/// Returns the bytes of the vector that rank `j` gets.
ShmCommunicator::Part ShmCommunicator::result_part(const Reduction& r, int j) const {
    const size_t element = size_of(r.dtype);
    if (r.op != OpKind::reduce_scatter) {
        const bool gets = r.op != OpKind::reduce || r.root == j;
        return {0, gets ? static_cast<size_t>(total_count(r)) * element : 0};
    }
    const auto own = r.counts.begin() + j;
    const int64_t before = std::accumulate(r.counts.begin(), own, int64_t{0});
    return {static_cast<size_t>(before) * element, static_cast<size_t>(*own) * element};
}

/// Reduces this rank's part from `sources_`.
uint64_t ShmCommunicator::reduce_sources(const Reduction& r, const Part& part, Path path) {
    if (part.bytes == 0) return 0;
    kernel::reduce(r.dtype, r.reduce_op, r.output, sources_.data(), sources_.size(), part.bytes / size_of(r.dtype));
    count(path, part.bytes);
    return part.bytes;
}

uint64_t ShmCommunicator::reduce_small(const Reduction& r, Row& mine) {
    if (total_count(r) > 0)
        std::memcpy(control_->payload(mine), r.input, static_cast<size_t>(total_count(r)) * size_of(r.dtype));
    mine.flags |= row_inline;
    control_->publish(mine);
    control_->agree();
    const Part part = result_part(r, rank());
    sources_.clear();
    for (int j = 0; j < size(); ++j) sources_.push_back(control_->payload(control_->row(j)) + part.begin);
    return reduce_sources(r, part, Path::inlined);
}

/// Two ranks give each other their inputs before they agree.
uint64_t ShmCommunicator::reduce_pair(const Reduction& r, Row& mine) {
    const int peer = 1 - rank();
    const auto* input = static_cast<const char*>(r.input);
    const Part theirs = result_part(r, peer), own = result_part(r, rank());
    put_into_ring(input + theirs.begin, theirs.bytes);
    control_->publish(mine);
    control_->agree();
    settle_ring();
    take_from_ring(own.bytes, [&](const char* of_peer) {
        sources_ = {input + own.begin, of_peer};
        if (peer == 0) std::swap(sources_[0], sources_[1]);
        reduce_sources(r, own, Path::staged);
    });
    return own.bytes;
}

namespace {

/// Works on whole elements; pieces are cut at the same positions in every part. A rank's own part needs no slot: it is
/// reduced from the input itself.
struct ReduceStages {
    const Reduction& reduction;
    const std::vector<ShmCommunicator::Part>& parts;
    const std::vector<const char*>& inputs;   // of all ranks in place, or empty
    const std::vector<const char*>& outputs;  // the same, from which the peers take the results
    std::vector<const void*>& sources;
    PeerWriter& writer;
    size_t me, piece;
    bool gathers, streams, decodes;

    size_t at(size_t part, size_t step) const { return parts[part].begin + step * piece; }
    const char* input() const { return static_cast<const char*>(reduction.input); }
    char* output() const { return static_cast<char*>(reduction.output); }

    void encode(size_t part, size_t step, char* slot) const {
        const size_t n = parts[part].piece_bytes(step, piece);
        if (n > 0 && part != me) writer.copy(slot, input() + at(part, step), n);
    }
    void reduce(size_t step, const std::vector<const char*>& slots, char* result) const {
        const size_t n = parts[me].piece_bytes(step, piece);
        if (n == 0) return;
        sources.clear();
        for (size_t j = 0; j < slots.size(); ++j)
            sources.push_back(j == me ? input() + at(me, step) : inputs.empty() ? slots[j] : inputs[j] + at(me, step));
        if (!gathers) result = output() + step * piece;
        char* const shared = gathers && !outputs.empty() ? output() + at(me, step) : nullptr;
        const bool bounce = shared != nullptr && writer.streams();  // scratch that no peer reads
        if (shared != nullptr && !bounce) result = shared;
        kernel::reduce(reduction.dtype, reduction.reduce_op, result, sources.data(), sources.size(),
                       n / size_of(reduction.dtype));
        if (bounce) writer.stream(shared, result, n);
    }
    void decode(size_t part, size_t step, const char* result) const {
        const size_t n = parts[part].piece_bytes(step, piece);
        if (n == 0 || !decodes || (!outputs.empty() && part == me)) return;
        kernel::copy(output() + at(part, step), outputs.empty() ? result : outputs[part] + at(part, step), n, streams);
    }
};

}  // namespace

uint64_t ShmCommunicator::reduce_two_shot(const Reduction& r, Row& mine) {
    const size_t element = size_of(r.dtype);
    const size_t bytes = static_cast<size_t>(total_count(r)) * element;
    const auto ranks = static_cast<size_t>(size());
    const bool gathers = r.op != OpKind::reduce_scatter;
    mine.input = Arena::instance().locate(r.input, bytes);
    if (gathers && r.op != OpKind::reduce) mine.output = Arena::instance().locate(r.output, bytes);
    control_->publish(mine);
    control_->agree();
    moving_ = true;

    if (gathers) {
        cut_parts(bytes, std::max(cache_line, element));
    } else {
        parts_.clear();
        size_t begin = 0;
        for (const int64_t n : r.counts) {
            parts_.push_back({begin, static_cast<size_t>(n) * element});
            begin += parts_.back().bytes;
        }
    }
    // Peers read inputs and results in place if all of them lie in arenas, else a copy in scratch.
    const bool in_place = find_all(inputs_, &Row::input, bytes);
    const bool shares_results = gathers && find_all(outputs_, &Row::output, bytes);

    const size_t piece = TwoShotShape::piece_bytes(ranks);
    size_t longest = 0;
    for (const Part& part : parts_) longest = std::max(longest, part.bytes);
    ReduceStages stages{r,
                        parts_,
                        inputs_,
                        outputs_,
                        sources_,
                        scratch_writer_,
                        static_cast<size_t>(rank()),
                        piece,
                        gathers,
                        outgrows_caches(2 * bytes),
                        has_result(r)};
    two_shot(stages, {.steps = (longest + piece - 1) / piece,
                      .slot_bytes = piece,
                      .result_bytes = piece,
                      .stages_input = !in_place,
                      .gathers = gathers,
                      .shares_results = shares_results});
    const size_t moved = gathers && has_result(r) ? bytes : parts_[static_cast<size_t>(rank())].bytes;
    count(in_place ? Path::pull : Path::staged, moved);
    return moved;
}

/// After agreement: finds this memory of every rank; clears `addresses` and returns false if any is out of reach.
bool ShmCommunicator::find_all(std::vector<const char*>& addresses, Location Row::* where, size_t bytes) {
    addresses.clear();
    const auto location_of = [&](int j) { return read_once(control_->row(j).*where); };
    bool reachable = allows(Path::pull);
    for (int j = 0; j < size(); ++j) reachable &= location_of(j).segment() != 0;
    for (int j = 0; reachable && j < size(); ++j) addresses.push_back(address_of(j, location_of(j), 0, bytes));
    return reachable;
}

/// Makes equal parts of `total`, each a multiple of `unit`, except for the last that is not empty.
void ShmCommunicator::cut_parts(size_t total, size_t unit) {
    const auto ranks = static_cast<size_t>(size());
    const size_t share = round_up((total + ranks - 1) / ranks, unit);
    parts_.clear();
    for (size_t j = 0; j < ranks; ++j) {
        const size_t begin = std::min(j * share, total);
        parts_.push_back({begin, std::min(begin + share, total) - begin});
    }
}

}  // namespace alltoallv
