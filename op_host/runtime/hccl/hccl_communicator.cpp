#include "runtime/hccl/hccl_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/base/abandon.h"
#include "runtime/base/seconds_text.h"
#include "runtime/core/hooks.h"
#include "runtime/core/request.h"
#include "runtime/hccl/library.h"
#include "runtime/hccl/result.h"
#include "runtime/hccl/synchronization.h"

namespace alltoallv {
namespace {

constexpr uint64_t first_calls = 8;  ///< number of calls that check="first" compares

}  // namespace

HcclCommunicator::HcclCommunicator(HcclOptions options, CommunicatorPtr control, const Meet& meet)
    : Communicator(options.rank, options.size, options.domain, CallQueue::Waiters::watch),
      options_(std::move(options)),
      control_(std::move(control)),
      device_(std::make_unique<Device>(options_.device)) {
    check_rank(options_.rank, options_.size);
    if (options_.size == 1 && options_.comm == nullptr) return;
    const std::string joining = "rank " + std::to_string(rank()) + " joining domain '" + domain() + "'";
    if (options_.comm == nullptr && options_.rank_table.empty()) share_root_info();
    try {
        comm_ = std::make_unique<HcclGroup>(options_, *device_, [this] { look_at_control(); });
        wait_for_owner(joining);
        if (options_.size > 1 && meet) find_control(meet);
        if (options_.size > 1) check_data_path();
    } catch (const Error& error) {
        if (control_) control_->abort(joining + " failed: " + error.what());
        throw;
    } catch (...) {
        if (control_) control_->abort(joining + " was interrupted");
        throw;
    }
}

HcclCommunicator::~HcclCommunicator() {
    if (is_inherited()) {
        abandon(std::move(kernels_));
        abandon(std::move(comm_));
        abandon(std::move(device_));
        abandon(std::move(queue_));
        return;
    }
    destroy_quietly();
    queue_.reset();
}

/// Rank 0 makes the root info; the control communicator distributes it.
void HcclCommunicator::share_root_info() {
    if (!control_)
        throw invalid_param(1101, "domain '", domain(),
                            "' has no communicator in host memory, expected one, a rank table or an HcclGroup");
    std::string info(hccl_root_info_bytes, '\0');
    if (rank() == 0) {
        try {
            info = make_root_info();
        } catch (const Error& error) {
            control_->fail(OpKind::broadcast, error);
            control_->fail(OpKind::broadcast, error);  // after all have met in the first call, lest one find us gone
            throw;
        }
    }
    Request request(OpKind::broadcast, size());
    request.recv_counts()[0] = static_cast<int64_t>(info.size());
    if (rank() == 0) std::ranges::fill(request.send_counts(), request.recv_counts()[0]);
    std::string heard(info.size(), '\0');
    control_->exchange(request.exchange(DType::uint8, info.data(), heard.data()), options_.timeout);
    options_.root_info = heard;
}

/// Uses HcclAllGather, if the ranks share nothing else.
void HcclCommunicator::find_control(const Meet& meet) {
    const std::string where = "the ranks of domain '" + domain() + "' meeting";
    const auto gather = [&](const std::string& own) {
        const size_t bytes = own.size(), ranks = static_cast<size_t>(size());
        std::string all(ranks * bytes, '\0');
        gather_to_host("meeting-wait", std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)), bytes,
                       HCCL_DATA_TYPE_UINT8, {device_->stream(), deadline(-1), where});
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
    Communicator::check_usable();
    const std::lock_guard lock(records_);
    if (ended_) throw *ended_;
}

bool HcclCommunicator::usable() const {
    if (is_inherited() || destroyed_.load(std::memory_order_acquire)) return false;
    if (control_ && !control_->usable()) return false;
    const std::lock_guard lock(records_);
    return !ended_;
}

/// True if the ranks compare call number `seq`.
bool HcclCommunicator::agrees(uint64_t seq) const {
    if (!control_ || options_.check == "off" || !synchronizes("agreement")) return false;
    return options_.check == "always" || seq <= first_calls;
}

/// Throws the error that has ended the control communicator, if any: a peer's loss, an abort, its failure.
void HcclCommunicator::look_at_control() const {
    if (hooks().poll) hooks().poll();
    if (!control_ || control_->usable()) return;
    const Request nothing(OpKind::barrier, size());
    Exchange exchange = nothing.exchange(DType::uint8, nullptr, nullptr);
    exchange.moves = false;
    control_->exchange(exchange, 0);
}

void HcclCommunicator::poll(const std::string& where) const {
    look_at_control();
    if (comm_) comm_->check_async_error(where);
}

Clock::time_point HcclCommunicator::deadline(double timeout) const {
    return after(timeout < 0 ? options_.timeout : timeout);
}

void HcclCommunicator::wait(const char* name, const OnStream& on) {
    if (!synchronizes(name)) return;
    const auto begin = Clock::now();
    try {
        if (device_->wait(on, [&] { poll(on.where); })) return;
    } catch (const Error&) {
        if (comm_) comm_->check_async_error(on.where);  // HCCL's error is more precise than the stream's
        throw;
    }
    throw comm_timeout(4019, on.where, ": the device was not done after ", seconds_text(seconds_since(begin)),
                       ": a rank is late or gone; HCCL itself waits for HCCL_EXEC_TIMEOUT seconds");
}

/// Before a call of ours on our own stream, waits for what the owner of a borrowed HcclComm has enqueued.
void HcclCommunicator::wait_for_owner(const std::string& where) {
    if (options_.comm == nullptr || !synchronizes("owner-wait")) return;
    if (!Device::wait_for_all(deadline(-1), where, [&] { poll(where); }))
        throw comm_timeout(4020, where, ": earlier work on the device was not done in time");
}

/// Ends the communicator: the peers have launched the call or will, so the ranks no longer match.
void HcclCommunicator::end(const Error& error) {
    {
        const std::lock_guard lock(records_);
        if (!ended_) ended_ = peer_lost(4021, "domain '", domain(), "' has ended: ", error.what());
    }
    if (control_) control_->abort("it failed in " + std::string(error.what()));
}

void HcclCommunicator::check_enqueued(bool done) {
    if (is_inherited() || destroyed_.load(std::memory_order_acquire)) return;
    if (!done) look_at_control();
    try {
        if (comm_) comm_->check_async_error("an earlier call of domain '" + domain() + "'");
    } catch (const Error& error) {
        end(error);
        throw;
    }
}

std::string HcclCommunicator::hccl_name() const {
    check_usable();
    return comm_ ? comm_->name() : std::string();
}

/// Waits for the device's work, on any stream; not after a failure, when it may never finish. Returns true if it is
/// done.
bool HcclCommunicator::drain(Clock::time_point deadline) {
    if (!synchronizes("drain")) return false;
    const std::string where = "leaving domain '" + domain() + "'";
    try {
        for (useconds_t pause = 500; !launches_.forget_completed(where) && Clock::now() < deadline;
             pause = std::min(2 * pause, 20'000U)) {
            if (!usable() || (comm_ && comm_->async_error() != HCCL_SUCCESS)) return false;
            if (hooks().poll) hooks().poll();
            usleep(pause);
        }
        return launches_.forget_completed(where);
    } catch (const Error& error) {  // its completion is unknown
        end(error);
        return false;
    }
}

void HcclCommunicator::fail(OpKind op, const Error& error, bool of_caller) {
    check_usable();
    queue_->run_or_submit([this, op, error, of_caller] {
        check_usable();  // it may have been destroyed by now
        ++seq_;
        failed_.fetch_add(1, std::memory_order_relaxed);
        if (agrees(seq_))
            control_->fail(op, error, of_caller);
        else if (size() > 1)  // the peers do not compare calls: they can only learn that the communicator has ended
            abort(std::string(name_of(op)) + " failed on it: " + error.what());
    });
}

void HcclCommunicator::abort(const std::string& reason) {
    if (is_inherited()) return;
    {
        const std::lock_guard lock(records_);
        if (!ended_) ended_ = peer_lost(4022, "domain '", domain(), "': rank ", rank(), " aborted: ", reason);
    }
    if (control_) control_->abort(reason);
}

void HcclCommunicator::leave() {
    if (destroyed_.load(std::memory_order_acquire)) return;
    device_->bind();
    const bool idle = drain(deadline(-1));
    destroyed_.store(true, std::memory_order_release);
    launches_.release();
    if (!idle) abandon(std::move(kernels_));  // what they have launched may still use their memory
    kernels_.reset();
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
    Stats stats = Communicator::stats();
    stats.insert({{"agreed_operators", agreed_.load(std::memory_order_relaxed)},
                  {"bytes_hccl", bytes_.load(std::memory_order_relaxed)},
                  {"kernel_calls", kernel_calls_.load(std::memory_order_relaxed)},
                  {"falls_back", falls_back_ ? 1 : 0},
                  {"all_reduce_falls_back", all_reduce_falls_back_ ? 1 : 0},
                  {"reduce_scatter_falls_back", reduce_scatter_falls_back_ ? 1 : 0}});
    return stats;
}

std::string HcclCommunicator::flight_record() const {
    const std::lock_guard lock(records_);
    return flight_json(domain(), rank(), size(),
                       {{rank(),
                         static_cast<uint64_t>(getpid()),
                         destroyed_.load(std::memory_order_acquire),
                         {flight_.begin(), flight_.end()}}});
}

}  // namespace alltoallv
