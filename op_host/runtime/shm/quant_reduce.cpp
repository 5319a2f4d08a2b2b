// Quantized reductions: small ones in one shot from the mailboxes, larger ones in two shots through scratch. Every
// piece is quantized directly into scratch, reduced directly from the peers' scratch, and decoded directly into the
// outputs.
#include <algorithm>
#include <cstring>
#include <optional>

#include "runtime/core/quant_terms.h"
#include "runtime/quantized/quant_grid.h"
#include "runtime/shm/two_shot.h"

namespace alltoallv {
namespace {

constexpr size_t flag_bytes = cache_line;  // after a reduced piece: 1 if a value of it did not fit

struct QuantStages {
    const QuantReduction& request;
    QuantCodec& codec;
    const QuantGrid& grid;
    Misfit& misfit;
    PeerWriter& writer;
    char* bounce;                             // memory for a piece
    const std::vector<const char*>& outputs;  // of all ranks, from which the peers take the results, or empty
    size_t me, bounds_at, flag_at;            // positions after a result
    bool scatters;

    void encode(size_t part, size_t step, char* slot) const {
        const QuantRange range = grid.range(part, step);
        if (range.count == 0) return;
        const size_t bytes = codec.slot_bytes(range.count);
        if (part == me) {
            writer.make_own(bytes, [&] { codec.encode(range, slot); });
        } else {
            writer.make(slot, bytes, bounce, [&](char* at) { codec.encode(range, at); });
        }
    }
    void reduce(size_t step, const std::vector<const char*>& slots, char* result) const {
        const QuantRange range = grid.range(me, step);
        bool fits = true;
        const bool in_output = scatters || !outputs.empty();
        char* const target = in_output ? output_at(request, grid, range) : result;
        const bool streams = !scatters && writer.streams();
        if (range.count > 0) fits = codec.reduce(range, slots, streams ? bounce : target);
        if (streams) writer.stream(target, bounce, codec.result_bytes(range.count));
        if (range.count > 0 && scatters) codec.keep_bounds(range);
        if (range.count > 0 && !scatters) codec.copy_bounds(result + bounds_at);
        const uint64_t flag = fits ? 0 : 1;
        std::memcpy(result + flag_at, &flag, sizeof flag);
    }
    void decode(size_t part, size_t step, const char* result) const {
        const QuantRange range = grid.range(part, step);
        if (range.count == 0) return;
        uint64_t flag = 0;
        std::memcpy(&flag, result + flag_at, sizeof flag);
        if (!scatters) codec.keep_bounds(range, result + bounds_at);
        const bool in_place = scatters || (!outputs.empty() && part == me);
        if (!outputs.empty()) result = outputs[part] + range.first * size_of(request.out_dtype);
        const bool fits = in_place || codec.decode(range, result, output_at(request, grid, range));
        if (flag != 0 || !fits) misfit.note(range);
    }
};

/// The sweep that measures the sums of cut groups.
struct MeasureStages {
    QuantCodec& codec;
    const QuantGrid& grid;
    size_t me;

    void encode(size_t part, size_t step, char* slot) const {
        const QuantRange range = grid.range(part, step);
        if (range.count > 0) codec.encode_for_measure(range, slot);
    }
    void reduce(size_t step, const std::vector<const char*>& slots, char*) const {
        const QuantRange range = grid.range(me, step);
        if (range.count > 0) codec.measure(range, slots);
    }
    void decode(size_t, size_t, const char*) const {}
};

TwoShotShape shape_of(const QuantCodec& codec, size_t piece) {
    TwoShotShape shape;
    shape.slot_bytes = round_up(codec.slot_bytes(piece), cache_line);
    shape.result_bytes =
        round_up(codec.result_bytes(piece), cache_line) + round_up(codec.bound_bytes(piece), cache_line) + flag_bytes;
    return shape;
}

/// Returns the largest piece that fits the scratch, in elements; 0 if not even one unit does.
size_t largest_piece(const QuantCodec& codec, size_t ranks) {
    const auto fits = [&](size_t units) {
        const TwoShotShape shape = shape_of(codec, units * codec.unit());
        const size_t bounce = std::max(shape.slot_bytes, shape.result_bytes);
        return shape.bytes(ranks) + bounce <= Layout::scratch_bytes;
    };
    size_t most = 0;
    for (size_t step = Layout::scratch_bytes; step > 0; step /= 2)
        if (most + step <= Layout::scratch_bytes / codec.unit() && fits(most + step)) most += step;
    return most * codec.unit();
}

}  // namespace

void ShmCommunicator::quant_reduce(const QuantReduction& q, double timeout) {
    run(q.op, q.dtype, timeout, q.moves, [&](OwnRow& own_row) { return quant_reduce_in_turn(q, own_row); });
}

uint64_t ShmCommunicator::quant_reduce_in_turn(const QuantReduction& q, OwnRow& own_row) {
    check(q);
    const bool scatters = q.op == OpKind::quantized_reduce_scatter;
    announce(own_row, *control_, q);
    if (!q.moves) {
        control_->publish();
        control_->agree();
        return 0;
    }

    const std::vector<QuantPart> parts = parts_of(q, size());
    const int64_t kept = scatters ? parts[static_cast<size_t>(rank())].count : total_count(q);
    with_codec(q, parts, [&](QuantCodec& codec) { quant_reduce_by(q, codec, parts, own_row); });
    return static_cast<uint64_t>(kept) * size_of(q.out_dtype);
}

void ShmCommunicator::quant_reduce_by(const QuantReduction& q, QuantCodec& codec, std::vector<QuantPart> parts,
                                      OwnRow& own_row) {
    codec.streams = exceeds_cache(static_cast<size_t>(total_count(q)) * (size_of(q.dtype) + size_of(q.out_dtype)));
    size_t bytes = sizeof(QuantTerms);
    for (const QuantPart& part : parts)
        bytes += round_up(codec.slot_bytes(static_cast<size_t>(part.count)), cache_line);
    // Only the owner of a part knows the second quantization's feedback.
    const bool small =
        allows(Path::inlined) && bytes <= options_.inline_bytes && codec.span() == 0 && !q.gather_feeds_back;
    if (small)
        quant_reduce_small(q, codec, parts, own_row);
    else
        quant_reduce_two_shot(q, codec, std::move(parts), own_row);
}

void ShmCommunicator::quant_reduce_small(const QuantReduction& q, QuantCodec& codec,
                                         const std::vector<QuantPart>& parts, OwnRow& own_row) {
    const bool scatters = q.op == OpKind::quantized_reduce_scatter;
    QuantGrid grid{parts};
    grid.piece = std::max<size_t>(grid.longest(), 1);
    std::vector<size_t> places{sizeof(QuantTerms)};
    for (size_t p = 0; p < parts.size(); ++p)
        places.push_back(places.back() + round_up(codec.slot_bytes(grid.range(p, 0).count), cache_line));
    codec.defer_feedback();
    codec.find_scales();
    for (size_t p = 0; p < parts.size(); ++p)
        if (parts[p].count > 0) codec.encode(grid.range(p, 0), control_->payload(own_row) + places[p]);
    own_row.flags |= row_inline;
    control_->publish();
    control_->agree();
    codec.commit_feedback();

    Misfit misfit;
    slots_.resize(parts.size());
    for (size_t p = 0; p < parts.size(); ++p) {
        const bool mine_alone = scatters && p != static_cast<size_t>(rank());
        if (parts[p].count == 0 || (mine_alone && q.overflow != Overflow::raise)) continue;
        for (int j = 0; j < size(); ++j)
            slots_[static_cast<size_t>(j)] = control_->payload(control_->row(j)) + places[p];
        const QuantRange range = grid.range(p, 0);
        result_.resize(std::max(codec.result_bytes(range.count), range.count * size_of(q.out_dtype)));
        char* out = output_at(q, grid, range);
        bool fits = codec.reduce(range, slots_, scatters && !mine_alone ? out : result_.data());
        if (!scatters) fits &= codec.decode(range, result_.data(), out);
        if (!mine_alone) codec.keep_bounds(range);
        if (!fits) misfit.note(range);
    }
    const auto n = static_cast<size_t>(scatters ? parts[static_cast<size_t>(rank())].count : total_count(q));
    count(Path::inlined, n * size_of(q.out_dtype));
    misfit.raise(q, control_->describe_op());
}

void ShmCommunicator::quant_reduce_two_shot(const QuantReduction& q, QuantCodec& codec, std::vector<QuantPart> parts,
                                            OwnRow& own_row) {
    const auto ranks = static_cast<size_t>(size());
    const auto me = static_cast<size_t>(rank());
    const bool scatters = q.op == OpKind::quantized_reduce_scatter;
    const size_t in_bytes = static_cast<size_t>(total_count(q)) * size_of(q.dtype);
    const size_t out_bytes = static_cast<size_t>(total_count(q)) * size_of(q.out_dtype);
    if (codec.reads_inputs()) own_row.input = give(Arena::instance().locate(q.input, in_bytes), {});
    if (!scatters) own_row.output = give(Arena::instance().locate(q.output, out_bytes), {});
    control_->publish();
    control_->agree();
    moving_ = true;

    const bool in_place = find_all(codec.inputs, &Row::input, in_bytes);
    outputs_.clear();
    const bool shares_results = !scatters && codec.gathers_elements() && find_all(outputs_, &Row::output, out_bytes);

    QuantGrid grid{std::move(parts)};
    grid.piece = largest_piece(codec, ranks);
    if (grid.piece == 0) {
        codec.cut();
        grid.piece = largest_piece(codec, ranks);
    }
    grid.span = codec.span();
    codec.find_scales();
    TwoShotShape shape = shape_of(codec, grid.piece);
    shape.steps = grid.steps();
    if (scatters) shape.result_bytes = flag_bytes;
    shape.stages_input = !in_place;
    if (codec.measures_sums()) {
        MeasureStages measure{codec, grid, me};
        shape.gathers = false;
        two_shot(measure, shape);  // the next one starts with the other buffer, while peers may still read the last one
    }
    Misfit misfit;
    shape.gathers = !scatters || q.overflow == Overflow::raise;
    shape.shares_results = shares_results;
    char* bounce = control_->scratch(rank()) + shape.bytes(ranks);
    const size_t flag_at = shape.result_bytes - flag_bytes;
    const size_t bounds_at = flag_at - (scatters ? 0 : round_up(codec.bound_bytes(grid.piece), cache_line));
    QuantStages stages{q, codec, grid, misfit, codes_writer_, bounce, outputs_, me, bounds_at, flag_at, scatters};
    two_shot(stages, shape);
    moving_ = false;  // all ranks are done: an error that all ranks raise leaves the communicator usable
    const auto n = static_cast<size_t>(scatters ? grid.parts[me].count : total_count(q));
    count(in_place ? Path::pull : Path::staged, n * size_of(q.out_dtype));
    misfit.raise(q, control_->describe_op());
}

}  // namespace alltoallv
