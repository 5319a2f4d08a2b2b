// Quantized reductions between hosts, in pieces: while one travels, this rank encodes the next and sums the one before.
// Two shots: every rank sums its part of all vectors and sends the result to all. One shot, if that moves fewer bytes
// or only a few: all codes go to all ranks, and every rank sums everything. Both give the same bits.
#include <array>
#include <cstring>
#include <exception>
#include <functional>

#include "runtime/base/quiet_thread.h"
#include "runtime/hosts/tcp_communicator.h"
#include "runtime/quantized/quant_grid.h"

namespace alltoallv {
namespace {

constexpr size_t pieces_of_part = 4, smallest_piece = size_t{1} << 18, largest_piece = size_t{1} << 20;  // elements
constexpr size_t few_bytes = size_t{1} << 16;   // that a rank receives: then one shot, which has fewer steps
constexpr size_t even_bytes = size_t{1} << 19;  // of codes: up to here one shot is no worse if it moves as much
constexpr size_t flag_bytes = sizeof(uint64_t);

/// Runs `compute`, if there is anything, on its own thread while `transfer` runs here.
template <class Transfer>
void overlap(const std::function<void()>& compute, Transfer&& transfer) {
    if (!compute) return transfer();
    std::exception_ptr failure;
    std::thread worker = quiet_thread("alltoallv-quant", "a quantized reduction", [&] {
        try {
            compute();
        } catch (...) {
            failure = std::current_exception();
        }
    });
    try {
        transfer();
    } catch (...) {
        worker.join();
        throw;
    }
    worker.join();
    if (failure) std::rethrow_exception(failure);
}

size_t whole_lines(size_t bytes) {
    return round_up(bytes, cache_line);
}

}  // namespace

/// A piece that is under way. There are four: the first is decoded while the last is encoded.
struct TcpCommunicator::QuantPiece {
    std::vector<char> memory;
    std::vector<const char*> slots;  // the codes of the ranks
    Pieces codes, results;

    explicit QuantPiece(int ranks) : codes(ranks), results(ranks) {}
};

/// A reduction on this rank.
struct TcpCommunicator::QuantRun {
    TcpCommunicator& self;
    const QuantReduction& q;
    QuantCodec& codec;
    const QuantGrid& grid;
    size_t me, ranks;
    Misfit misfit = {};
    std::vector<QuantPiece> pieces = {};

    QuantPiece& piece(size_t step) { return pieces[step % pieces.size()]; }
    size_t slot_bytes(size_t part, size_t step) const {
        const size_t count = grid.range(part, step).count;
        return count > 0 ? whole_lines(codec.slot_bytes(count)) : 0;
    }
    size_t result_bytes(size_t part, size_t step) const {
        const size_t count = grid.range(part, step).count;
        return bounds_at(part, step) + (scatters() || count == 0 ? 0 : whole_lines(codec.bound_bytes(count))) +
               flag_bytes;
    }
    size_t bounds_at(size_t part, size_t step) const {
        const size_t count = grid.range(part, step).count;
        return scatters() || count == 0 ? 0 : whole_lines(codec.result_bytes(count));
    }
    bool scatters() const { return q.op == OpKind::quantized_reduce_scatter; }
    bool tells() const { return !scatters() || q.overflow == Overflow::raise; }

    bool in_one_shot() const {
        if (scatters() || q.gather_feeds_back) return false;
        const size_t count = grid.longest();
        const size_t sent = ranks * codec.slot_bytes(count), gathered = ranks * codec.result_bytes(count);
        const size_t received = ranks * sent, in_two = sent + gathered;
        return received <= few_bytes || received < in_two || (received == in_two && sent <= even_bytes);
    }

    void encode_parts(size_t step, char* at) {
        for (size_t j = 0; j < ranks; ++j) {
            const QuantRange range = grid.range(j, step);
            if (range.count > 0) codec.encode(range, at);
            at += slot_bytes(j, step);
        }
    }
    void run_in_two_shots();
    void encode(size_t step);
    void reduce(size_t step);
    void decode(size_t step);
    void run_in_one_shot();
    void encode_for_all(size_t step);
    void sum_all(size_t step);
};

void TcpCommunicator::quant_reduce(const QuantReduction& q, double timeout) {
    run(q.op, q.dtype, timeout, q.moves, [&](OwnRow& own_row) {
        check(q);
        announce(own_row, *control_, q);
        control_->publish();
        control_->agree();
        if (q.moves) quant_reduce_in_pieces(q);
    });
}

void TcpCommunicator::quant_reduce_in_pieces(const QuantReduction& q) {
    start_moving();
    QuantGrid grid{alltoallv::parts_of(q, size())};
    with_codec(q, grid.parts, [&](QuantCodec& codec) {
        codec.keep_whole();
        codec.find_scales();
        const size_t share = std::min(std::max(grid.longest() / pieces_of_part, smallest_piece), largest_piece);
        grid.piece = std::max(share / codec.unit(), size_t{1}) * codec.unit();
        QuantRun run{*this, q, codec, grid, static_cast<size_t>(rank()), static_cast<size_t>(size())};
        for (size_t i = 0; i < std::min(grid.steps(), size_t{4}); ++i) run.pieces.emplace_back(size());
        run.in_one_shot() ? run.run_in_one_shot() : run.run_in_two_shots();
        moving_ = false;  // all ranks are done: an error that all ranks raise leaves the communicator usable
        run.misfit.raise(q, control_->describe_op());
    });
}

void TcpCommunicator::QuantRun::run_in_two_shots() {
    const size_t steps = grid.steps();
    if (steps > 0) encode(0);
    for (size_t step = 0; step <= steps && steps > 0; ++step) {
        std::function<void()> beside;
        if (step > 0 || step + 1 < steps)
            beside = [&] {
                if (step > 0) reduce(step - 1);
                if (step + 1 < steps) encode(step + 1);
            };
        if (step == steps)
            beside();
        else
            overlap(beside, [&] { self.move(piece(step).codes, true); });
        if (step == 0) continue;
        beside = nullptr;
        if (step > 1) beside = [&] { decode(step - 2); };
        overlap(beside, [&] {
            if (tells()) self.share(piece(step - 1).results);
        });
    }
    if (steps > 0) decode(steps - 1);
}

void TcpCommunicator::QuantRun::encode(size_t step) {
    QuantPiece& p = piece(step);
    size_t sent = 0, results = 0;
    for (size_t j = 0; j < ranks; ++j) {
        sent += slot_bytes(j, step);
        results += result_bytes(j, step);
    }
    const size_t own = slot_bytes(me, step);
    p.memory.resize(sent + ranks * own + results);
    char *encoded = p.memory.data(), *slot = encoded + sent, *result = slot + ranks * own;
    encode_parts(step, encoded);
    p.slots.clear();
    for (size_t j = 0; j < ranks; ++j) {
        p.slots.push_back(j == me ? encoded : slot + j * own);
        p.codes.out[j] = {encoded, j == me ? 0 : slot_bytes(j, step)};
        p.codes.in[j] = {slot + j * own, j == me ? 0 : own};
        p.results.in[j] = {result, j == me ? 0 : result_bytes(j, step)};
        encoded += slot_bytes(j, step);
        result += result_bytes(j, step);
    }
    for (size_t j = 0; j < ranks; ++j)
        if (j != me) p.results.out[j] = {p.results.in[me].data(), result_bytes(me, step)};
}

void TcpCommunicator::QuantRun::reduce(size_t step) {
    QuantPiece& p = piece(step);
    const QuantRange range = grid.range(me, step);
    char* const own = p.results.in[me].data();
    bool fits = true;
    if (range.count > 0) fits = codec.reduce(range, p.slots, scatters() ? output_at(q, grid, range) : own);
    if (range.count > 0 && scatters()) codec.keep_bounds(range);
    if (range.count > 0 && !scatters()) codec.copy_bounds(own + bounds_at(me, step));
    const uint64_t flag = fits ? 0 : 1;
    std::memcpy(own + result_bytes(me, step) - flag_bytes, &flag, sizeof flag);
}

void TcpCommunicator::QuantRun::decode(size_t step) {
    QuantPiece& p = piece(step);
    for (size_t j = 0; j < ranks; ++j) {
        const QuantRange range = grid.range(j, step);
        if (range.count == 0) continue;
        const char* const result = p.results.in[j].data();
        uint64_t flag = 0;
        if (tells() || j == me) std::memcpy(&flag, result + result_bytes(j, step) - flag_bytes, sizeof flag);
        if (!scatters()) codec.keep_bounds(range, result + bounds_at(j, step));
        const bool decoded = scatters() || codec.decode(range, result, output_at(q, grid, range));
        if (flag != 0 || !decoded) misfit.note(range);
    }
}

void TcpCommunicator::QuantRun::run_in_one_shot() {
    const size_t steps = grid.steps();
    if (steps > 0) encode_for_all(0);
    for (size_t step = 0; step < steps; ++step) {
        std::function<void()> beside;
        if (step > 0 || step + 1 < steps)
            beside = [&] {
                if (step > 0) sum_all(step - 1);
                if (step + 1 < steps) encode_for_all(step + 1);
            };
        overlap(beside, [&] { self.share(piece(step).codes); });
    }
    if (steps > 0) sum_all(steps - 1);
}

void TcpCommunicator::QuantRun::encode_for_all(size_t step) {
    QuantPiece& p = piece(step);
    size_t bytes = 0;
    for (size_t j = 0; j < ranks; ++j) bytes += slot_bytes(j, step);
    p.memory.resize(ranks * bytes);
    char* const own = p.memory.data() + me * bytes;
    encode_parts(step, own);
    for (size_t j = 0; j < ranks; ++j) {
        p.codes.out[j] = {own, j == me ? 0 : bytes};
        p.codes.in[j] = {p.memory.data() + j * bytes, j == me ? 0 : bytes};
    }
}

void TcpCommunicator::QuantRun::sum_all(size_t step) {
    QuantPiece& p = piece(step);
    size_t offset = 0;
    std::vector<char> result;
    for (size_t part = 0; part < ranks; ++part) {
        const QuantRange range = grid.range(part, step);
        if (range.count == 0) continue;
        p.slots.clear();
        for (size_t j = 0; j < ranks; ++j) p.slots.push_back(p.codes.in[j].data() + offset);
        offset += slot_bytes(part, step);
        char* const out = output_at(q, grid, range);
        const bool elements = codec.gathers_elements();
        if (!elements) result.resize(codec.result_bytes(range.count));
        bool fits = codec.reduce(range, p.slots, elements ? out : result.data());
        if (!elements) fits &= codec.decode(range, result.data(), out);
        codec.keep_bounds(range);
        if (!fits) misfit.note(range);
    }
}

}  // namespace alltoallv
