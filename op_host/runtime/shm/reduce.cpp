// Reductions: small ones in one shot from the mailboxes, larger ones in two shots through scratch that stays in cache.
#include "op_kernel/cpu/reduce.h"

#include <algorithm>
#include <cstring>

#include "op_kernel/cpu/copy.h"
#include "runtime/shm/two_shot.h"

namespace alltoallv {
namespace {

/// Bytes up to which one shot of two ranks is faster than two: each computes all of the result.
constexpr size_t paired_to = size_t{512} << 10;

kernel::Order order_of(const Reduction& r) {
    return r.leaves == 0 ? kernel::Order::sequence : kernel::Order::tree;
}

/// Appends the addresses of one rank's inputs, which follow each other `stride` bytes apart.
void add_sources(std::vector<const void*>& sources, const Reduction& r, const char* first, size_t stride) {
    for (size_t i = 0; i < inputs_per_rank(r); ++i) sources.push_back(first + i * stride);
}

}  // namespace

uint64_t ShmCommunicator::reduce_in_turn(const Reduction& r, OwnRow& own_row) {
    if (!kernel::reduces(r.dtype, r.reduce_op))
        throw invalid_param(1044, "op '", name_of(r.reduce_op), "' is not defined for dtype ", name_of(r.dtype),
                            ", expected ", dtypes_listed(r.reduce_op));
    announce(own_row, rank(), r);
    if (!r.moves) {
        control_->publish();
        control_->agree();
        return 0;
    }
    const size_t bytes = static_cast<size_t>(total_count(r)) * size_of(r.dtype) * inputs_per_rank(r);
    if (bytes <= paired_to && fits_ring(bytes)) return reduce_pair(r);
    const bool small = allows(Path::inlined) && bytes <= options_.inline_bytes;
    return small ? reduce_small(r, own_row) : reduce_two_shot(r, own_row);
}

/// Reduces this rank's part from `sources_`.
uint64_t ShmCommunicator::reduce_sources(const Reduction& r, const Part& part, Path path) {
    if (part.bytes == 0) return 0;
    kernel::reduce(r.dtype, r.reduce_op, r.output, sources_.data(), sources_.size(), part.bytes / size_of(r.dtype),
                   order_of(r));
    count(path, part.bytes);
    return part.bytes;
}

uint64_t ShmCommunicator::reduce_small(const Reduction& r, OwnRow& own_row) {
    const size_t bytes = static_cast<size_t>(total_count(r)) * size_of(r.dtype);
    if (bytes > 0) std::memcpy(control_->payload(own_row), r.input, bytes * inputs_per_rank(r));
    own_row.flags |= row_inline;
    control_->publish();
    control_->agree();
    const Part part = result_part(r, rank());
    sources_.clear();
    for (int j = 0; j < size(); ++j) add_sources(sources_, r, control_->payload(control_->row(j)) + part.begin, bytes);
    return reduce_sources(r, part, Path::inlined);
}

/// Two ranks give each other their inputs before they agree.
uint64_t ShmCommunicator::reduce_pair(const Reduction& r) {
    const int peer = 1 - rank();
    const auto* input = static_cast<const char*>(r.input);
    const Part theirs = result_part(r, peer), own = result_part(r, rank());
    const size_t n = inputs_per_rank(r);  // 1 where a rank gets a part
    put_into_ring({const_cast<char*>(input + theirs.begin)}, theirs.bytes * n);
    control_->publish();
    control_->agree();
    moving_ = true;
    settle_ring();
    take_from_ring(own.bytes * n, [&](const char* of_peer) {
        sources_.clear();
        for (const int j : {0, 1}) add_sources(sources_, r, j == peer ? of_peer : input + own.begin, own.bytes);
        reduce_sources(r, own, Path::staged);
    });
    return own.bytes;
}

namespace {

/// Works on whole elements; pieces are cut at the same positions in every part. A rank's own part needs no slot: it is
/// reduced from the input itself.
struct ReduceStages {
    const Reduction& reduction;
    const std::vector<Part>& parts;
    const std::vector<const char*>& inputs;   // of all ranks in place, or empty
    const std::vector<const char*>& outputs;  // the same, from which the peers take the results
    std::vector<const void*>& sources;
    PeerWriter& writer;
    size_t me, piece, bytes;
    bool gathers, streams, decodes;

    size_t at(size_t part, size_t step) const { return parts[part].begin + step * piece; }
    const char* input() const { return static_cast<const char*>(reduction.input); }
    char* output() const { return static_cast<char*>(reduction.output); }

    void encode(size_t part, size_t step, char* slot) const {
        const size_t n = parts[part].piece_bytes(step, piece);
        for (size_t i = 0; i < inputs_per_rank(reduction) && n > 0 && part != me; ++i)
            writer.copy(slot + i * piece, input() + i * bytes + at(part, step), n);
    }
    void reduce(size_t step, const std::vector<const char*>& slots, char* result) const {
        const size_t n = parts[me].piece_bytes(step, piece);
        if (n == 0) return;
        sources.clear();
        for (size_t j = 0; j < slots.size(); ++j) {
            const bool staged = j != me && inputs.empty();
            const char* const first = staged ? slots[j] : (j == me ? input() : inputs[j]) + at(me, step);
            add_sources(sources, reduction, first, staged ? piece : bytes);
        }
        if (!gathers) result = output() + step * piece;
        char* const shared = gathers && !outputs.empty() ? output() + at(me, step) : nullptr;
        const bool bounce = shared != nullptr && writer.streams();  // scratch that no peer reads
        if (shared != nullptr && !bounce) result = shared;
        kernel::reduce(reduction.dtype, reduction.reduce_op, result, sources.data(), sources.size(),
                       n / size_of(reduction.dtype), order_of(reduction));
        if (bounce) writer.stream(shared, result, n);
    }
    void decode(size_t part, size_t step, const char* result) const {
        const size_t n = parts[part].piece_bytes(step, piece);
        if (n == 0 || !decodes || (!outputs.empty() && part == me)) return;
        kernel::copy(output() + at(part, step), outputs.empty() ? result : outputs[part] + at(part, step), n, streams);
    }
};

}  // namespace

uint64_t ShmCommunicator::reduce_two_shot(const Reduction& r, OwnRow& own_row) {
    const size_t bytes = static_cast<size_t>(total_count(r)) * size_of(r.dtype);
    const size_t n = inputs_per_rank(r), ranks = static_cast<size_t>(size());
    const bool gathers = r.op != OpKind::reduce_scatter;
    own_row.input = give(Arena::instance().locate(r.input, bytes * n), {});
    if (gathers && r.op != OpKind::reduce) own_row.output = give(Arena::instance().locate(r.output, bytes), {});
    control_->publish();
    control_->agree();
    moving_ = true;

    const std::vector<Part> parts = parts_of(r);
    // Peers read inputs and results in place if all of them lie in arenas, else a copy in scratch.
    const bool in_place = find_all(inputs_, &Row::input, bytes * n);
    const bool shares_results = gathers && find_all(outputs_, &Row::output, bytes);

    const size_t piece = TwoShotShape::piece_bytes(ranks * n);
    size_t longest = 0;
    for (const Part& part : parts) longest = std::max(longest, part.bytes);
    ReduceStages stages{r,
                        parts,
                        inputs_,
                        outputs_,
                        sources_,
                        scratch_writer_,
                        static_cast<size_t>(rank()),
                        piece,
                        bytes,
                        gathers,
                        exceeds_cache((n + 1) * bytes),
                        has_result(r)};
    two_shot(stages, {.steps = (longest + piece - 1) / piece,
                      .slot_bytes = piece * n,
                      .result_bytes = piece,
                      .stages_input = !in_place,
                      .gathers = gathers,
                      .shares_results = shares_results});
    const size_t moved = gathers && has_result(r) ? bytes : parts[static_cast<size_t>(rank())].bytes;
    count(in_place ? Path::pull : Path::staged, moved);
    return moved;
}

/// After agreement: finds this memory of every rank; clears `addresses` and returns false if any is out of reach.
bool ShmCommunicator::find_all(std::vector<const char*>& addresses, Location Row::* where, size_t bytes) {
    addresses.clear();
    const auto location_of = [&](int j) { return read_once(control_->row(j).*where); };
    bool reachable = allows(Path::pull);
    for (int j = 0; j < size(); ++j) reachable &= location_of(j).segment() != 0;
    for (int j = 0; reachable && j < size(); ++j)
        addresses.push_back(address_of(j, where, location_of(j), 0, bytes, {}));
    return reachable;
}

}  // namespace alltoallv
