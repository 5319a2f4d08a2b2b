#include "transport/hccl/hccl_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <utility>

#include "base/abandon.h"
#include "comm/hooks.h"
#include "transport/hccl/library.h"
#include "transport/hccl/result.h"
#include "transport/hccl/synchronization.h"
#include "transport/hccl/wire_type.h"

namespace alltoallv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t first_calls = 8;  ///< that check="first" compares
constexpr size_t flight_length = 64;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

size_t bytes_of(std::span<const int64_t> counts, DType dtype) {
    return static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})) * size_of(dtype);
}

void check_wire_counts(const Exchange& x, int64_t per_element) {
    for (const auto& [name, counts] : {std::pair{"send_counts", x.send_counts}, {"recv_counts", x.recv_counts}})
        for (size_t j = 0; j < counts.size(); ++j)
            if (counts[j] > hccl_max_count / per_element)
                throw invalid_param(std::string(name) + "[" + std::to_string(j) + "] is " + std::to_string(counts[j]) +
                                    ", expected at most " + std::to_string(hccl_max_count / per_element) +
                                    ", what HCCL moves of dtype " + std::string(name_of(x.dtype)) + " to one rank");
}

/// Elements that every rank gives to all, where HcclAllGather can do it; else 0. Equal on all ranks: what they receive
/// is equal in an all-gather, and no front end places the parts of one rank otherwise than those of another.
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

HcclCommunicator::HcclCommunicator(HcclOptions options, CommunicatorPtr control, const Meet& meet)
    : options_(std::move(options)),
      control_(std::move(control)),
      pid_(getpid()),
      device_(std::make_unique<Device>(options_.device)) {
    check_rank(options_.rank, options_.size);
    if (options_.size == 1 && options_.comm == nullptr) return;
    const std::string joining = "rank " + std::to_string(rank()) + " joining domain '" + domain() + "'";
    if (options_.comm == nullptr && options_.rank_table.empty() && options_.root_info.empty()) share_root_info();
    try {
        comm_ = std::make_unique<HcclGroup>(options_, *device_, [this] {
            look_at_control();
            if (options_.poll) options_.poll();
        });
        options_.poll = nullptr;
        wait_for_owner(joining);
        if (options_.size > 1 && meet) find_control(meet);
        if (options_.size > 1) check_data_path();
    } catch (const Error& error) {
        if (control_) control_->abort(joining + " failed: " + error.what());
        throw;
    }
}

HcclCommunicator::~HcclCommunicator() {
    if (pid_ != getpid()) {
        abandon(std::move(comm_));
        abandon(std::move(device_));
        abandon(std::move(queue_));
        return;
    }
    destroy_quietly();
}

/// Rank 0 makes it; the control communicator carries it.
void HcclCommunicator::share_root_info() {
    if (!control_)
        throw invalid_param("domain '" + domain() + "' has neither root_info nor a communicator in host memory, " +
                            "expected one of them, a rank table or an HcclGroup");
    std::string info(hccl_root_info_bytes, '\0');
    if (rank() == 0) {
        try {
            info = make_root_info();
        } catch (const Error& error) {
            control_->fail(OpKind::broadcast, error);
            control_->fail(OpKind::broadcast, error);  // comes after all have met the first, so that none finds us gone
            throw;
        }
    }
    const auto bytes = static_cast<int64_t>(info.size());
    const std::vector<int64_t> places(static_cast<size_t>(size()), 0);
    std::vector<int64_t> sends(places), recvs(places);
    if (rank() == 0) std::fill(sends.begin(), sends.end(), bytes);
    recvs[0] = bytes;
    std::string heard(info.size(), '\0');
    Exchange exchange;
    exchange.op = OpKind::broadcast;
    exchange.input = info.data();
    exchange.output = heard.data();
    exchange.send_counts = sends;
    exchange.recv_counts = recvs;
    exchange.sdispls = exchange.rdispls = places;
    control_->exchange(exchange, options_.timeout);
    options_.root_info = heard;
}

/// Over HcclAllGather, where the ranks have nothing else in common.
void HcclCommunicator::find_control(const Meet& meet) {
    const std::string where = "the ranks of domain '" + domain() + "' meeting";
    const auto gather = [&](const std::string& mine) {
        const size_t bytes = mine.size(), ranks = static_cast<size_t>(size());
        std::string all(ranks * bytes, '\0');
        const DeviceMemory input(bytes, where), output(ranks * bytes, where);
        Device::copy(input.data(), mine.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE, where);
        Device::copy(output.data(), all.data(), all.size(), ACL_MEMCPY_HOST_TO_DEVICE, where);
        comm_->all_gather(input.data(), output.data(), bytes, HCCL_DATA_TYPE_UINT8, device_->stream(), where);
        wait("meeting-wait", device_->stream(), deadline(-1), where);
        Device::copy(all.data(), output.data(), all.size(), ACL_MEMCPY_DEVICE_TO_HOST, where);
        std::vector<std::string> parts;
        for (size_t j = 0; j < ranks; ++j) parts.push_back(all.substr(j * bytes, bytes));
        return parts;
    };
    std::string failure;
    control_ = meet(gather, failure);
    if (!control_ && hooks().warn)
        hooks().warn(where + ": no connection to rank 0 (" + failure +
                     "); calls are not compared, and a rank's failure reaches the others as HCCL's timeout");
}

void HcclCommunicator::check_usable() const {
    if (pid_ != getpid()) throw inherited();
    if (destroyed_.load(std::memory_order_acquire)) throw destroyed();
    const std::lock_guard lock(records_);
    if (ended_) throw *ended_;
}

bool HcclCommunicator::usable() const {
    if (pid_ != getpid() || destroyed_.load(std::memory_order_acquire)) return false;
    if (control_ && !control_->usable()) return false;
    const std::lock_guard lock(records_);
    return !ended_;
}

/// Whether the ranks compare call number `seq`.
bool HcclCommunicator::agrees(uint64_t seq) const {
    if (!control_ || options_.check == "off" || !synchronizes("agreement")) return false;
    return options_.check == "always" || seq <= first_calls;
}

std::string HcclCommunicator::where(OpKind op) const {
    return "operator #" + std::to_string(seq_) + " " + std::string(name_of(op)) + " of domain '" + domain() + "'";
}

/// Throws what has ended the control communicator, if anything has: a peer's loss, an abort, its failure.
void HcclCommunicator::look_at_control() const {
    if (hooks().poll) hooks().poll();
    if (!control_ || control_->usable()) return;
    const std::vector<int64_t> nothing(static_cast<size_t>(size()), 0);
    Exchange exchange;
    exchange.op = OpKind::barrier;
    exchange.moves = false;
    exchange.send_counts = exchange.recv_counts = exchange.sdispls = exchange.rdispls = nothing;
    control_->exchange(exchange, 0);
}

void HcclCommunicator::poll(const std::string& where) const {
    look_at_control();
    if (comm_) comm_->check_async_error(where);
}

HcclCommunicator::TimePoint HcclCommunicator::deadline(double timeout) const {
    const double seconds = timeout < 0 ? options_.timeout : timeout;
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void HcclCommunicator::wait(const char* name, aclrtStream stream, TimePoint deadline, const std::string& where) {
    if (!synchronizes(name)) return;
    const auto begin = Clock::now();
    try {
        if (Device::wait(stream, deadline, where, [&] { poll(where); })) return;
    } catch (const Error&) {
        device_->abandon(stream);
        if (comm_) comm_->check_async_error(where);  // HCCL knows more than the stream
        throw;
    } catch (...) {
        device_->abandon(stream);
        throw;
    }
    device_->abandon(stream);
    const double waited = std::chrono::duration<double>(Clock::now() - begin).count();
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", waited);
    throw comm_timeout(where + ": the device was not done after " + text +
                       ": a rank is late or gone; HCCL itself waits for HCCL_EXEC_TIMEOUT seconds");
}

/// Before a call of ours on our own stream: what the owner of a borrowed HcclComm has enqueued comes first.
void HcclCommunicator::wait_for_owner(const std::string& where) {
    if (options_.comm == nullptr || !synchronizes("owner-wait")) return;
    if (!Device::wait_for_all(deadline(-1), where, [&] { poll(where); }))
        throw comm_timeout(where + ": what was on the device before was not done in time");
}

/// The peers have launched, or will: this communicator is out of step for good.
void HcclCommunicator::end(const Error& error) {
    {
        const std::lock_guard lock(records_);
        if (!ended_) ended_ = peer_lost("domain '" + domain() + "' has ended: " + error.what());
    }
    if (control_) control_->abort("it failed in " + std::string(error.what()));
}

void HcclCommunicator::check_enqueued(bool done) {
    if (pid_ != getpid() || destroyed_.load(std::memory_order_acquire)) return;
    if (!done) look_at_control();
    try {
        if (comm_) comm_->check_async_error("a call of domain '" + domain() + "' that was enqueued before");
    } catch (const Error& error) {
        end(error);
        throw;
    }
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
        flight_.push_back({seq_, op, dtype, "running", now_ns(), 0});
        if (flight_.size() > flight_length) flight_.pop_front();
    }
    const auto record = [&](const char* state) {
        const std::lock_guard lock(records_);
        flight_.back().state = state;
        flight_.back().end_ns = now_ns();
    };
    bool launching = false;
    try {
        agree();
        launching = true;
        body(where(op));
        record("done");
        operators_.fetch_add(1, std::memory_order_relaxed);
    } catch (const Error& error) {
        failed_.fetch_add(1, std::memory_order_relaxed);
        record("failed");
        if (launching) end(error);
        throw;
    } catch (...) {
        failed_.fetch_add(1, std::memory_order_relaxed);
        record("failed");
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
        [&](const std::string& where) {
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
            const TimePoint limit = deadline(timeout);
            aclrtStream stream = x.stream != nullptr ? x.stream : device_->stream();
            begin_launch(stream, where);
            move(x, output, recv_counts, rdispls, stream, limit, where);
            bytes_.fetch_add(bytes_of(recv_counts, x.dtype), std::memory_order_relaxed);
            if (x.stream == nullptr) wait("exchange-wait", stream, limit, where);
        });
}

void HcclCommunicator::move(const Exchange& x, void* output, std::span<const int64_t> recv_counts,
                            std::span<const int64_t> rdispls, aclrtStream stream, TimePoint limit,
                            const std::string& where) {
    if (size() == 1) return copy_own(x, output, stream, where);
    if (gathered_from_each(x, recv_counts, rdispls) > 0) return gather(x, output, rdispls, stream, where);
    if (falls_back_) return gather_and_slice(x, output, recv_counts, rdispls, stream, limit, where);
    // Byte displacements need not be multiples of the element.
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
    keep(std::move(layout), stream, where);
}

void HcclCommunicator::gather(const Exchange& x, void* output, std::span<const int64_t> rdispls, aclrtStream stream,
                              const std::string& where) {
    const WireType wire = wire_type(x.dtype);
    check_wire_counts(x, wire.per_element);
    const size_t unit = x.byte_displs ? 1 : size_of(x.dtype);
    comm_->all_gather(static_cast<const char*>(x.input) + static_cast<size_t>(x.sdispls[0]) * unit,
                      static_cast<char*>(output) + static_cast<size_t>(rdispls[0]) * unit,
                      static_cast<uint64_t>(x.send_counts[0] * wire.per_element), wire.type, stream, where);
    keep(nullptr, stream, where);
}

/// A world of one rank: HCCL would copy from the start of both buffers, whatever the displacements.
void HcclCommunicator::copy_own(const Exchange& x, void* output, aclrtStream stream, const std::string& where) {
    const size_t element = size_of(x.dtype), unit = x.byte_displs ? 1 : element;
    const size_t target = x.rdispls.empty() ? 0 : static_cast<size_t>(x.rdispls[0]) * unit;
    Device::copy_async(static_cast<char*>(output) + target,
                       static_cast<const char*>(x.input) + static_cast<size_t>(x.sdispls[0]) * unit,
                       static_cast<size_t>(x.send_counts[0]) * element, stream, where);
}

void HcclCommunicator::reduce(const Reduction& r, double timeout) {
    const auto type = reduction_type(r.dtype);
    const auto op = reduction_of(r.reduce_op);
    const bool even = std::adjacent_find(r.counts.begin(), r.counts.end(), std::not_equal_to<>()) == r.counts.end();
    if (!type || !op || (r.op == OpKind::reduce_scatter && !even)) {
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
            if (agrees(seq_)) {
                Reduction announced = r;
                announced.stream = nullptr;
                announced.moves = false;
                control_->reduce(announced, timeout);
                agreed_.fetch_add(1, std::memory_order_relaxed);
            } else {
                look_at_control();
            }
            if (stream == nullptr) stream = device_->stream();
            check_reduction(r.op, stream);
        },
        [&](const std::string& where) {
            const TimePoint limit = deadline(timeout);
            const size_t bytes = bytes_of(r.counts, r.dtype);
            const auto total = static_cast<uint64_t>(bytes / size_of(r.dtype));
            begin_launch(stream, where);
            if (size() == 1) {
                Device::copy_async(r.output, r.input, bytes, stream, where);
            } else if (total > 0 && r.op == OpKind::reduce_scatter) {
                comm_->reduce_scatter(r.input, r.output, static_cast<uint64_t>(r.counts[0]), *type, *op, stream, where);
            } else if (total > 0) {
                comm_->all_reduce(r.input, r.output, total, *type, *op, stream, where);
            }
            keep(nullptr, stream, where);
            bytes_.fetch_add(bytes, std::memory_order_relaxed);
            if (r.stream == nullptr) wait("reduction-wait", stream, limit, where);
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
        [](const std::string&) {});
}

/// HCCL runs the calls of a communicator in their order, on every rank alike: a stream waits for the one before.
void HcclCommunicator::begin_launch(aclrtStream stream, const std::string& where) {
    if (!comm_) return;
    comm_->check_async_error(where);
    forget_completed(where);
    if (launched_.empty() || launched_.back().stream == stream || !synchronizes("launch-order")) return;
    check_acl(cann().aclrtStreamWaitEvent(stream, launched_.back().event), "aclrtStreamWaitEvent", where);
}

std::string HcclCommunicator::hccl_name() const {
    check_usable();
    return comm_ ? comm_->name() : std::string();
}

/// HCCL may read the counts when the device comes to the call, not when it is made.
void HcclCommunicator::keep(std::unique_ptr<WireLayout> layout, aclrtStream stream, const std::string& where) {
    aclrtEvent event = nullptr;
    if (events_.empty()) {
        check_acl(cann().aclrtCreateEvent(&event), "aclrtCreateEvent", where);
    } else {
        event = events_.back();
        events_.pop_back();
    }
    if (!synchronizes("kept-counts")) layout.reset();
    launched_.push_back({event, stream, std::move(layout)});
    check_acl(cann().aclrtRecordEvent(event, stream), "aclrtRecordEvent", where);
}

void HcclCommunicator::forget_completed(const std::string& where) {
    while (!launched_.empty()) {
        aclrtEventRecordedStatus status = ACL_EVENT_RECORDED_STATUS_NOT_READY;
        check_acl(cann().aclrtQueryEventStatus(launched_.front().event, &status), "aclrtQueryEventStatus", where);
        if (status != ACL_EVENT_RECORDED_STATUS_COMPLETE) return;
        events_.push_back(launched_.front().event);
        launched_.pop_front();
    }
}

/// Waits for what is still on the device, on whichever stream; not behind a failure, where it may never be done.
void HcclCommunicator::drain(TimePoint deadline) {
    if (!synchronizes("drain")) return;
    const std::string where = "leaving domain '" + domain() + "'";
    try {
        forget_completed(where);
        for (useconds_t pause = 500; !launched_.empty() && Clock::now() < deadline;
             pause = std::min(2 * pause, 20'000U)) {
            if (!usable() || (comm_ && comm_->async_error() != HCCL_SUCCESS)) return;
            if (hooks().poll) hooks().poll();
            usleep(pause);
            forget_completed(where);
        }
    } catch (const Error& error) {  // nobody can tell whether it will ever be done
        end(error);
    }
}

void HcclCommunicator::fail(OpKind op, const Error& error) {
    check_usable();
    queue_->run_or_submit([this, op, error] {
        check_usable();  // destroyed by now?
        ++seq_;
        failed_.fetch_add(1, std::memory_order_relaxed);
        if (agrees(seq_)) {
            control_->fail(op, error);
        } else if (size() > 1) {  // the peers do not ask: they can only be told that it is over
            abort(std::string(name_of(op)) + " failed on it: " + error.what());
        }
    });
}

WorkPtr HcclCommunicator::submit(std::function<void()> call) {
    check_usable();
    return queue_->submit(std::move(call));
}

void HcclCommunicator::abort(const std::string& reason) {
    if (pid_ != getpid()) return;
    {
        const std::lock_guard lock(records_);
        if (!ended_)
            ended_ = peer_lost("domain '" + domain() + "': rank " + std::to_string(rank()) + " aborted: " + reason);
    }
    if (control_) control_->abort(reason);
}

void HcclCommunicator::destroy() {
    if (pid_ != getpid()) return;
    const CallQueue::Turn turn(*queue_);
    if (destroyed_.load(std::memory_order_acquire)) return;
    device_->bind();
    drain(deadline(-1));
    destroyed_.store(true, std::memory_order_release);
    for (aclrtEvent event : events_) cann().aclrtDestroyEvent(event);
    events_.clear();
    if (!launched_.empty())  // HCCL may still read the counts
        abandon(std::make_unique<std::deque<Launch>>(std::exchange(launched_, {})));
    std::optional<Error> failure;
    try {
        if (comm_) comm_->destroy();
    } catch (const Error& error) {
        failure = error;
    }
    if (control_) control_->destroy();
    if (failure) throw *failure;
}

Stats HcclCommunicator::stats() const {
    return {{"operators", operators_.load(std::memory_order_relaxed)},
            {"failed_operators", failed_.load(std::memory_order_relaxed)},
            {"agreed_operators", agreed_.load(std::memory_order_relaxed)},
            {"bytes_hccl", bytes_.load(std::memory_order_relaxed)},
            {"falls_back", falls_back_ ? 1 : 0},
            {"all_reduce_falls_back", all_reduce_falls_back_ ? 1 : 0},
            {"reduce_scatter_falls_back", reduce_scatter_falls_back_ ? 1 : 0}};
}

std::string HcclCommunicator::flight_record() const {
    const std::lock_guard lock(records_);
    std::string json = "{\"domain\": \"" + domain() + "\", \"rank\": " + std::to_string(rank()) +
                       ", \"size\": " + std::to_string(size()) + ", \"ranks\": [{\"rank\": " + std::to_string(rank()) +
                       ", \"pid\": " + std::to_string(pid_) +
                       ", \"left\": " + (destroyed_.load(std::memory_order_acquire) ? "true" : "false") +
                       ", \"operators\": [";
    for (size_t i = 0; i < flight_.size(); ++i) {
        const FlightEntry& entry = flight_[i];
        json += (i > 0 ? ", " : "") + std::string("{\"seq\": ") + std::to_string(entry.seq) + ", \"operator\": \"" +
                std::string(name_of(entry.op)) + "\", \"dtype\": \"" + std::string(name_of(entry.dtype)) +
                "\", \"state\": \"" + entry.state + "\", \"start_ns\": " + std::to_string(entry.start_ns) +
                ", \"end_ns\": " + std::to_string(entry.end_ns) + "}";
    }
    return json + "]}]}";
}

}  // namespace alltoallv
