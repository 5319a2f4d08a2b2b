// The operators of the HCCL communicator: the steps around each, and the HCCL calls.
#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "transport/hccl/hccl_communicator.h"
#include "transport/hccl/wire_type.h"

namespace alltoallv {
namespace {

uint64_t bytes_of(std::span<const int64_t> counts, DType dtype) {
    return static_cast<uint64_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})) * size_of(dtype);
}

void check_wire_counts(const Exchange& x, int64_t per_element) {
    for (const auto& [name, counts] : {std::pair{"send_counts", x.send_counts}, {"recv_counts", x.recv_counts}})
        for (size_t j = 0; j < counts.size(); ++j)
            if (counts[j] > hccl_max_count / per_element)
                throw invalid_param(std::string(name) + "[" + std::to_string(j) + "] is " + std::to_string(counts[j]) +
                                    ", expected at most " + std::to_string(hccl_max_count / per_element) +
                                    ", what HCCL moves of dtype " + std::string(name_of(x.dtype)) + " to one rank");
}

/// Returns the elements that every rank gives to all, if HcclAllGather can do it; else 0. Equal on all ranks: in an
/// all-gather they receive the same, and every front end places the parts in the same way.
uint64_t gathered_from_each(const Exchange& x, std::span<const int64_t> recv_counts, std::span<const int64_t> rdispls) {
    if (x.op != OpKind::all_gather && x.op != OpKind::all_gather_into_tensor) return 0;
    const int64_t count = recv_counts[0], unit = x.byte_displs ? static_cast<int64_t>(size_of(x.dtype)) : 1;
    for (size_t j = 0; j < recv_counts.size(); ++j) {
        if (x.send_counts[j] != count || recv_counts[j] != count || x.sdispls[j] != x.sdispls[0]) return 0;
        if (rdispls[j] != rdispls[0] + static_cast<int64_t>(j) * count * unit) return 0;
    }
    return static_cast<uint64_t>(count);
}

}  // namespace

std::string HcclCommunicator::where(OpKind op) const {
    return "operator #" + std::to_string(seq_) + " " + std::string(name_of(op)) + " of domain '" + domain() + "'";
}

void HcclCommunicator::begin_launch(aclrtStream stream, const std::string& where) {
    if (!comm_) return;
    comm_->check_async_error(where);
    launches_.forget_completed(where);
    launches_.follow_last(stream, where);
}

template <class Agree, class Body>
void HcclCommunicator::run(OpKind op, DType dtype, Agree&& agree, Body&& body) {
    check_usable();
    const CallQueue::Turn turn(*queue_);
    check_usable();
    device_->bind();
    ++seq_;
    {
        const std::lock_guard lock(records_);
        flight_.push_back({seq_, op, dtype, FlightState::running, 0, flight_ns(), 0});
        if (flight_.size() > flight_length) flight_.pop_front();
    }
    const auto record = [&](FlightState state, uint64_t bytes) {
        const std::lock_guard lock(records_);
        flight_.back().state = state;
        flight_.back().bytes = bytes;
        flight_.back().end_ns = flight_ns();
    };
    bool launching = false;
    try {
        agree();
        launching = true;
        const uint64_t bytes = body(where(op));
        record(FlightState::done, bytes);
        bytes_.fetch_add(bytes, std::memory_order_relaxed);
        operators_.fetch_add(1, std::memory_order_relaxed);
    } catch (const Error& error) {
        failed_.fetch_add(1, std::memory_order_relaxed);
        record(FlightState::failed, 0);
        if (launching) end(error);
        throw;
    } catch (...) {
        failed_.fetch_add(1, std::memory_order_relaxed);
        record(FlightState::failed, 0);
        abort("it was interrupted in " + where(op));
        throw;
    }
}

void HcclCommunicator::exchange(const Exchange& x, double timeout) {
    std::vector<int64_t> learnt, packed;
    run(
        x.op, x.dtype,
        [&] {
            const bool learns = x.recv_counts.empty();
            if (learns && !control_)
                throw invalid_param(where(x.op) + " learns its receive counts, expected them to be given where the " +
                                    "ranks have no communicator in host memory");
            if (size() == 1 && !learns && x.send_counts[0] != x.recv_counts[0])
                throw peer_mismatch(where(x.op) + ": rank 0 sends " + std::to_string(x.send_counts[0]) +
                                    " elements to itself and expects " + std::to_string(x.recv_counts[0]));
            if (!learns && !agrees(seq_)) return look_at_control();
            Exchange announced = x;
            announced.input = nullptr;
            announced.output = nullptr;
            announced.stream = nullptr;
            announced.moves = false;
            announced.allocate = [&](std::span<const int64_t> counts) -> void* {
                learnt.assign(counts.begin(), counts.end());
                return nullptr;
            };
            control_->exchange(announced, timeout);
            agreed_.fetch_add(1, std::memory_order_relaxed);
        },
        [&](const std::string& where) -> uint64_t {
            if (!x.moves) {
                if (x.recv_counts.empty()) x.allocate(learnt);
                return 0;
            }
            std::span<const int64_t> recv_counts = x.recv_counts, rdispls = x.rdispls;
            void* output = x.output;
            if (recv_counts.empty()) {
                int64_t end = 0;
                for (const int64_t count : learnt) {
                    packed.push_back(end);
                    end += count;
                }
                recv_counts = learnt;
                rdispls = packed;
                output = x.allocate(learnt);
            }
            const Clock::time_point limit = deadline(timeout);
            aclrtStream stream = x.stream != nullptr ? x.stream : device_->stream();
            begin_launch(stream, where);
            move(x, output, recv_counts, rdispls, stream, limit, where);
            if (x.stream == nullptr) wait("exchange-wait", stream, limit, where);
            return bytes_of(recv_counts, x.dtype);
        });
}

void HcclCommunicator::move(const Exchange& x, void* output, std::span<const int64_t> recv_counts,
                            std::span<const int64_t> rdispls, aclrtStream stream, Clock::time_point limit,
                            const std::string& where) {
    if (size() == 1) return copy_own(x, output, stream, where);
    if (gathered_from_each(x, recv_counts, rdispls) > 0) return gather(x, output, rdispls, stream, where);
    if (falls_back_) return gather_and_slice(x, output, recv_counts, rdispls, stream, limit, where);
    // Byte displacements need not be multiples of the element size.
    const WireType wire =
        x.byte_displs ? WireType{HCCL_DATA_TYPE_UINT8, static_cast<int64_t>(size_of(x.dtype))} : wire_type(x.dtype);
    check_wire_counts(x, wire.per_element);
    const int64_t displ_unit = x.byte_displs ? 1 : wire.per_element;
    auto layout = std::make_unique<WireLayout>();
    layout->reserve(4 * x.send_counts.size());
    const auto append = [&](std::span<const int64_t> values, int64_t unit) {
        for (const int64_t value : values) layout->push_back(static_cast<uint64_t>(value * unit));
    };
    append(x.send_counts, wire.per_element);
    append(x.sdispls, displ_unit);
    append(recv_counts, wire.per_element);
    append(rdispls, displ_unit);
    comm_->all_to_all_v(x.input, output, *layout, wire.type, stream, where);
    launches_.add(std::move(layout), stream, where);
}

void HcclCommunicator::gather(const Exchange& x, void* output, std::span<const int64_t> rdispls, aclrtStream stream,
                              const std::string& where) {
    const WireType wire = wire_type(x.dtype);
    check_wire_counts(x, wire.per_element);
    const size_t unit = x.byte_displs ? 1 : size_of(x.dtype);
    comm_->all_gather(static_cast<const char*>(x.input) + static_cast<size_t>(x.sdispls[0]) * unit,
                      static_cast<char*>(output) + static_cast<size_t>(rdispls[0]) * unit,
                      static_cast<uint64_t>(x.send_counts[0] * wire.per_element), wire.type, stream, where);
    launches_.add(nullptr, stream, where);
}

/// Copies for a single rank: HCCL would copy from the start of both buffers, ignoring the displacements.
void HcclCommunicator::copy_own(const Exchange& x, void* output, aclrtStream stream, const std::string& where) {
    const size_t element = size_of(x.dtype), unit = x.byte_displs ? 1 : element;
    const size_t target = x.rdispls.empty() ? 0 : static_cast<size_t>(x.rdispls[0]) * unit;
    Device::copy_async(static_cast<char*>(output) + target,
                       static_cast<const char*>(x.input) + static_cast<size_t>(x.sdispls[0]) * unit,
                       static_cast<size_t>(x.send_counts[0]) * element, stream, where);
}

void HcclCommunicator::reduce(const Reduction& r, double timeout) {
    const auto agree = [&] {
        if (!agrees(seq_)) return look_at_control();
        Reduction announced = r;
        announced.stream = nullptr;
        announced.moves = false;
        control_->reduce(announced, timeout);
        agreed_.fetch_add(1, std::memory_order_relaxed);
    };
    if (!r.moves) return run(r.op, r.dtype, agree, [](const std::string&) { return uint64_t{0}; });
    const auto type = reduction_type(r.dtype);
    const auto op = reduction_of(r.reduce_op);
    const bool even = std::adjacent_find(r.counts.begin(), r.counts.end(), std::not_equal_to<>()) == r.counts.end();
    if (!type || !op || r.op == OpKind::reduce || (r.op == OpKind::reduce_scatter && !even)) {
        const Error error = invalid_param(
            std::string(name_of(r.op)) + " with op '" + std::string(name_of(r.reduce_op)) + "' on dtype " +
            std::string(name_of(r.dtype)) + (even ? "" : " and unequal counts") +
            " is nothing that HCCL does, expected sum, min, max or prod of int8, int16, int32, int64, float16, "
            "bfloat16 or float32, and equal counts");
        fail(r.op, error);
        throw error;
    }
    aclrtStream stream = r.stream;
    run(
        r.op, r.dtype,
        [&] {
            agree();
            if (stream == nullptr) stream = device_->stream();
            check_reduction(r.op, stream);
        },
        [&](const std::string& where) {
            const Clock::time_point limit = deadline(timeout);
            const size_t bytes = bytes_of(r.counts, r.dtype);
            const auto total = static_cast<uint64_t>(bytes / size_of(r.dtype));
            begin_launch(stream, where);
            if (size() == 1)
                Device::copy_async(r.output, r.input, bytes, stream, where);
            else if (total > 0 && r.op == OpKind::reduce_scatter)
                comm_->reduce_scatter(r.input, r.output, static_cast<uint64_t>(r.counts[0]), *type, *op, stream, where);
            else if (total > 0)
                comm_->all_reduce(r.input, r.output, total, *type, *op, stream, where);
            launches_.add(nullptr, stream, where);
            if (r.stream == nullptr) wait("reduction-wait", stream, limit, where);
            return bytes;
        });
}

void HcclCommunicator::quant_reduce(const QuantReduction& q, double timeout) {
    if (q.moves) return Communicator::quant_reduce(q, timeout);
    run(
        q.op, q.dtype,
        [&] {
            if (!agrees(seq_)) return look_at_control();
            control_->quant_reduce(q, timeout);
            agreed_.fetch_add(1, std::memory_order_relaxed);
        },
        [](const std::string&) { return uint64_t{0}; });
}

}  // namespace alltoallv
