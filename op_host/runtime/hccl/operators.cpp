// The operators of the HCCL communicator: the steps around each, and the HCCL calls.
#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>

#include "op_kernel/ascendc/window.h"
#include "runtime/core/hooks.h"
#include "runtime/core/request.h"
#include "runtime/core/terms.h"
#include "runtime/hccl/hccl_communicator.h"
#include "runtime/hccl/wire_type.h"

namespace alltoallv {
namespace {

uint64_t bytes_of(std::span<const int64_t> counts, DType dtype) {
    return static_cast<uint64_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})) * size_of(dtype);
}

void check_wire_counts(const Exchange& x, int64_t per_element) {
    for (const auto& [name, counts] : {std::pair{"send_counts", x.send_counts}, {"recv_counts", x.recv_counts}})
        for (size_t j = 0; j < counts.size(); ++j)
            if (counts[j] > hccl_max_count / per_element)
                throw invalid_param(1104, name, "[", j, "] is ", counts[j], ", expected at most ",
                                    hccl_max_count / per_element, ", what HCCL moves of dtype ", name_of(x.dtype),
                                    " to one rank");
}

/// Returns the elements that every rank gives to all, if HcclAllGather can do it; else 0. Equal on all ranks: in an
/// all-gather they receive the same, and every front end places the parts in the same way.
uint64_t gathered_from_each(const Exchange& x) {
    if (x.op != OpKind::all_gather && x.op != OpKind::all_gather_into_tensor) return 0;
    const int64_t count = x.recv_counts[0], unit = x.byte_displs ? static_cast<int64_t>(size_of(x.dtype)) : 1;
    for (size_t j = 0; j < x.recv_counts.size(); ++j) {
        if (x.send_counts[j] != count || x.recv_counts[j] != count || x.sdispls[j] != x.sdispls[0]) return 0;
        if (x.rdispls[j] != x.rdispls[0] + static_cast<int64_t>(j) * count * unit) return 0;
    }
    return static_cast<uint64_t>(count);
}

}  // namespace

const char* HcclCommunicator::input_at(const Exchange& x, size_t rank) {
    return static_cast<const char*>(x.input) +
           static_cast<size_t>(x.sdispls[rank]) * (x.byte_displs ? 1 : size_of(x.dtype));
}

char* HcclCommunicator::output_at(const Exchange& x, size_t rank) {
    return static_cast<char*>(x.output) + static_cast<size_t>(x.rdispls[rank]) * (x.byte_displs ? 1 : size_of(x.dtype));
}

std::string HcclCommunicator::where(OpKind op) const {
    return "operator #" + std::to_string(seq_) + " " + std::string(name_of(op)) + " of domain '" + domain() + "'";
}

void HcclCommunicator::begin_launch(const OnStream& on) {
    if (!comm_) return;
    comm_->check_async_error(on.where);
    if (launches_.forget_completed(on.where) && kernels_) kernels_->check(on.where);
    launches_.follow_last(on);
}

template <class Agree, class Body>
void HcclCommunicator::run(OpKind op, DType dtype, Agree&& agree, Body&& body) {
    check_usable();
    const CallQueue::Slot slot(*queue_);
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
    const auto agrees_now = [&] {
        try {
            agree();
            return true;
        } catch (const UnmetFailure&) {  // one of the calls that the ranks count
            ++seq_;
            const std::lock_guard lock(records_);
            flight_.back().seq = seq_;
            return false;
        }
    };
    bool launching = false;
    try {
        while (!agrees_now()) {
        }
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
    if (is_strided(x))
        throw invalid_param(1105, where(x.op), " has regions in rows, expected them in one piece on a device");
    std::vector<int64_t> learnt, packed;
    run(
        x.op, x.dtype,
        [&] {
            const bool learns = x.recv_counts.empty();
            if (learns && !control_)
                throw invalid_param(1106, where(x.op),
                                    " learns its receive counts, expected them to be given where the "
                                    "ranks have no communicator in host memory");
            if (size() == 1 && !learns && x.send_counts[0] != x.recv_counts[0])
                throw peer_mismatch(3012, where(x.op), ": rank 0 sends ", x.send_counts[0],
                                    " elements to itself and expects ", x.recv_counts[0]);
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
            Exchange known_exchange = x;
            if (x.recv_counts.empty()) {
                packed.resize(learnt.size());
                pack(learnt, packed);
                known_exchange.recv_counts = learnt;
                known_exchange.rdispls = packed;
                known_exchange.output = x.allocate(learnt);
            }
            const OnStream on{x.stream != nullptr ? x.stream : device_->stream(), deadline(timeout), where};
            begin_launch(on);
            move(known_exchange, on);
            if (x.stream == nullptr) wait("exchange-wait", on);
            return bytes_of(known_exchange.recv_counts, x.dtype);
        });
}

void HcclCommunicator::move(const Exchange& x, const OnStream& on) {
    if (size() == 1)  // HCCL would copy from the start of both buffers, ignoring the displacements
        return Device::copy_async(output_at(x, 0), input_at(x, 0), bytes_of(x.send_counts, x.dtype), on);
    WireType wire = wire_type(x.dtype);
    if (gathered_from_each(x) > 0) {
        check_wire_counts(x, wire.per_element);
        comm_->all_gather(input_at(x, 0), output_at(x, 0), static_cast<uint64_t>(x.send_counts[0] * wire.per_element),
                          wire.type, on);
        return launches_.add(nullptr, on);
    }
    if (falls_back_) return gather_and_slice(x, on);
    // Byte displacements need not be multiples of the element size.
    if (x.byte_displs) wire = {HCCL_DATA_TYPE_UINT8, static_cast<int64_t>(size_of(x.dtype))};
    check_wire_counts(x, wire.per_element);
    const int64_t displ_unit = x.byte_displs ? 1 : wire.per_element;
    auto layout = std::make_unique<WireLayout>();
    layout->reserve(4 * x.send_counts.size());
    const auto append = [&](std::span<const int64_t> values, int64_t unit) {
        for (const int64_t value : values) layout->push_back(static_cast<uint64_t>(value * unit));
    };
    append(x.send_counts, wire.per_element);
    append(x.sdispls, displ_unit);
    append(x.recv_counts, wire.per_element);
    append(x.rdispls, displ_unit);
    comm_->all_to_all_v(x.input, x.output, *layout, wire.type, on);
    launches_.add(std::move(layout), on);
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
    if (r.leaves != 0) {
        const Error error =
            invalid_param(1107, "leaves is ", r.leaves, ", expected None: HCCL adds in an order of its own");
        fail(r.op, error, true);
        throw error;
    }
    if (!type || !op || r.op == OpKind::reduce || (r.op == OpKind::reduce_scatter && !even)) {
        const Error error = invalid_param(
            1108, name_of(r.op), " with op '", name_of(r.reduce_op), "' on dtype ", name_of(r.dtype),
            even ? "" : " and unequal counts",
            " is not supported by HCCL, expected sum, min, max or prod of int8, int16, int32, int64, float16, "
            "bfloat16 or float32, and equal counts");
        fail(r.op, error, true);
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
            const OnStream on{stream, deadline(timeout), where};
            const size_t bytes = bytes_of(r.counts, r.dtype);
            const int64_t count = r.op == OpKind::reduce_scatter ? r.counts[0] : total_count(r);
            begin_launch(on);
            if (size() == 1)
                Device::copy_async(r.output, r.input, bytes, on);
            else if (bytes > 0)
                comm_->reduce(r.op, r.input, r.output, static_cast<uint64_t>(count), *type, *op, on);
            launches_.add(nullptr, on);
            if (r.stream == nullptr) wait("reduction-wait", on);
            return bytes;
        });
}

void HcclCommunicator::quant_reduce(const QuantReduction& q, double timeout) {
    if (q.moves && q.launched == nullptr) return Communicator::quant_reduce(q, timeout);
    bool serves = false;
    run(
        q.op, q.dtype,
        [&] {
            if (agrees(seq_)) {
                QuantReduction announced = q;
                announced.moves = false;
                announced.launched = nullptr;
                control_->quant_reduce(announced, timeout);
                agreed_.fetch_add(1, std::memory_order_relaxed);
            } else {
                look_at_control();
            }
            serves = q.moves && why_no_kernel(q).empty() && decide_on_kernels(where(q.op)).empty() &&
                     kernels_->fits(q, size());
        },
        [&](const std::string& where) -> uint64_t {
            if (q.launched != nullptr) *q.launched = serves;
            if (!serves) return 0;
            const OnStream on{q.stream, deadline(timeout), where};
            begin_launch(on);
            kernels_->quant_all_reduce(q, on);
            launches_.add(nullptr, on);
            kernel_calls_.fetch_add(1, std::memory_order_relaxed);
            const int64_t elements = total_count(q);  // codes out, results in
            return static_cast<uint64_t>(elements) * (1 + size_of(q.out_dtype));
        });
}

void HcclCommunicator::exchange_counted_on_device(const CountedOnDevice& call) {
    constexpr OpKind op = OpKind::all_to_all_v;
    constexpr uint32_t digest = 0xc0407ed;  // an all_to_all_v with counts in host memory has other terms
    run(
        op, call.dtype,
        [&] {
            if (agrees(seq_)) {
                Request request(op, size());
                request.terms = word_of(TokenTerms(call.dtype, call.row, digest));
                request.row = call.row;
                Exchange announced = request.exchange(call.dtype, nullptr, nullptr);
                announced.moves = false;
                control_->exchange(announced, -1);
                agreed_.fetch_add(1, std::memory_order_relaxed);
            } else {
                look_at_control();
            }
            const std::string& reason = decide_on_kernels(where(op));
            if (!reason.empty())
                throw backend_unavailable(5021,
                                          "all_to_all_v with a capacity needs the kernels in Ascend C, which do not "
                                          "serve domain '",
                                          domain(), "': ", reason,
                                          "; without a capacity HCCL serves, by counts in "
                                          "host memory");
        },
        [&](const std::string& where) -> uint64_t {
            const OnStream on{call.stream, deadline(-1), where};
            begin_launch(on);
            kernels_->all_to_all_v(call, on);
            launches_.add(nullptr, on);
            kernel_calls_.fetch_add(1, std::memory_order_relaxed);
            return 0;  // only the device knows
        });
}

std::string HcclCommunicator::why_no_kernels() {
    check_usable();
    const CallQueue::Slot slot(*queue_);
    device_->bind();
    return decide_on_kernels("domain '" + domain() + "'");
}

bool HcclCommunicator::kernel_serves(const QuantReduction& q) {
    return why_no_kernels().empty() && why_no_kernel(q).empty() && kernels_->fits(q, size());
}

/// Decides once, on all ranks alike. All of them come here in the same call.
const std::string& HcclCommunicator::decide_on_kernels(const std::string& where) {
    if (no_kernels_) return *no_kernels_;
    if (!comm_ || size() == 1) return no_kernels_.emplace("it has one rank");
    if (!control_) return no_kernels_.emplace("its ranks have no communicator in host memory to agree over");
    if (control_->backend() != "shm") return no_kernels_.emplace("its ranks are on more than one server");
    if (size() > static_cast<int>(alltoallv_kernels::most_ranks))
        return no_kernels_.emplace("it has more than " + std::to_string(alltoallv_kernels::most_ranks) + " ranks");
    std::string reason = reasons(kernels_missing());
    if (reason.empty()) {
        std::string own_reason;
        try {
            const auto highest = [this](uint32_t own) {
                std::vector<uint32_t> all(static_cast<size_t>(size()));
                gather_on_host(&own, all.data(), sizeof own);
                return *std::max_element(all.begin(), all.end());
            };
            kernels_ = std::make_unique<Kernels>(comm_->name(), rank(), highest, where);
        } catch (const Error& error) {
            own_reason = error.what();
        }
        reason = reasons(own_reason);
        if (!reason.empty()) kernels_.reset();
        if (!reason.empty() && hooks().warn)
            hooks().warn("domain '" + domain() + "': HCCL's calls serve instead of kernels in Ascend C, since " +
                         reason);
    }
    return no_kernels_.emplace(std::move(reason));
}

void HcclCommunicator::gather_on_host(const void* own, void* all, size_t bytes) {
    const Request request = gather_request(OpKind::all_gather, size(), bytes);
    control_->exchange(request.exchange(DType::uint8, own, all), options_.timeout);
}

/// Returns the texts of the ranks that have one, the same on all.
std::string HcclCommunicator::reasons(const std::string& own_reason) {
    constexpr size_t bytes = 512;
    std::string text = own_reason.substr(0, bytes), all(static_cast<size_t>(size()) * bytes, '\0');
    text.resize(bytes);
    gather_on_host(text.data(), all.data(), bytes);
    std::string joined;
    for (int j = 0; j < size(); ++j) {
        const char* const reason = all.data() + static_cast<size_t>(j) * bytes;
        if (*reason == '\0') continue;
        joined += (joined.empty() ? "rank " : "; rank ") + std::to_string(j) + ": ";
        joined.append(reason, strnlen(reason, bytes));
    }
    return joined;
}

}  // namespace alltoallv
