/// \file communicator.h
/// \brief A rank's membership in a group, with any transport.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/fork_generation.h"
#include "runtime/base/resources.h"
#include "runtime/core/call_queue.h"
#include "runtime/core/collective.h"
#include "runtime/core/quant_reduction.h"

namespace alltoallv {

/// A message under way.
class MessageWork : public Work {
  public:
    int source() const { return source_.load(); }
    int32_t tag() const { return tag_.load(); }
    int64_t count() const { return count_.load(); }
    DType dtype() const { return dtype_.load(); }
    void set_found(int source, int32_t tag, int64_t count, DType dtype) {
        tag_.store(tag);
        count_.store(count);
        dtype_.store(dtype);
        source_.store(source);
    }

    /// Of a recv of any number: the memory for the message, once it has matched.
    char* make_memory(size_t bytes) {
        try {
            memory_.resize(bytes);
        } catch (const std::exception&) {
            throw ran_out("memory for a message of " + std::to_string(bytes) + " bytes", ENOMEM);
        }
        return memory_.data();
    }
    const std::vector<char>& memory() const { return memory_; }

  private:
    // Of a recv, once it has matched its message; of one that looks, any_rank if there is none.
    std::atomic<int> source_{PeerMessage::any_rank};
    std::atomic<int32_t> tag_{0};
    std::atomic<int64_t> count_{0};
    std::atomic<DType> dtype_{DType::uint8};
    std::vector<char> memory_;
};

using MessageWorkPtr = std::shared_ptr<MessageWork>;

/// True once the process ends: its ranks tell their peers so when they leave.
inline std::atomic<bool> process_ends{false};

/// Counters since the communicator was made, by name; see docs/architecture.md for the names.
using Stats = std::map<std::string, uint64_t>;

/// Collective calls block until this rank's part is done and throw `Error`. One call runs at a time: calls from
/// several threads are ordered by the communicator. Every rank must issue the same calls in the same order.
class Communicator : public std::enable_shared_from_this<Communicator> {
  public:
    virtual ~Communicator() = default;

    int rank() const { return rank_; }
    int size() const { return size_; }
    const std::string& domain() const { return domain_; }
    virtual std::string backend() const = 0;

    /// Returns the communicator of the same ranks in host memory if data lie on a device and there is one.
    virtual std::shared_ptr<Communicator> control() const { return nullptr; }

    /// `timeout` is in seconds; negative means the communicator's own.
    virtual void exchange(const Exchange& exchange, double timeout) = 0;
    virtual void reduce(const Reduction& reduction, double timeout) = 0;

    /// Throws value_overflow, on every rank, if a value does not fit and the request says `raise`.
    virtual void quant_reduce(const QuantReduction& reduction, double /*timeout*/) {
        throw backend_unavailable(5009, "backend '" + backend() + "' has no " + std::string(name_of(reduction.op)));
    }

    /// Starts a message, which runs independent of collectives; `waits` says that the caller waits at once. A message
    /// that differs from what the other side expects is an error on both sides, and nothing is written.
    virtual MessageWorkPtr post(const PeerMessage& message, double /*timeout*/, bool /*waits*/) {
        throw backend_unavailable(5009, "backend '" + backend() + "' has no " + std::string(name_of(message.op)));
    }

    /// Uses this rank's next sequence number for a failure, which every peer then also raises. Does not wait.
    /// If it is `of_caller`, of the arguments that this rank was given, it concerns only peers that call `op`.
    virtual void fail(OpKind op, const Error& error, bool of_caller = true) = 0;

    /// Runs `call`, which uses this communicator's blocking calls, later and in order.
    WorkPtr submit(std::function<void()> call);

    /// Submits one operator; if that fails, its failure is announced to the peers.
    WorkPtr begin(OpKind op, std::function<void()> call);

    /// Changes how many seconds calls wait that have no limit of their own, from the next one on.
    virtual void set_timeout(double /*seconds*/) {
        throw backend_unavailable(5010, "backend '" + backend() + "' keeps the timeout with which it was made");
    }

    /// Wakes and fails every rank that waits or comes later. Callable from any thread.
    virtual void abort(const std::string& reason) = 0;

    /// Leaves the group and frees what the communicator holds. Idempotent. Inside a call of this thread it only aborts,
    /// so that the call ends.
    void destroy();

    /// Ends a communicator that nobody refers to any more. Other threads may still wait in its calls.
    static void drop(Communicator* last);

    /// Throws the known failures of calls that are enqueued on a device. `done`: they have ended, so that failures of
    /// peers no longer matter. Thread-safe.
    virtual void check_enqueued(bool /*done*/) {}

    /// False once poisoned or destroyed, and after a fork in the child.
    virtual bool usable() const = 0;

    /// True if calls release their thread's `HeldLock` before a long wait.
    virtual bool releases_lock() const { return false; }

    /// True while a call runs or waits for its turn.
    bool busy() const { return queue_->busy(); }

    virtual Stats stats() const;

    /// Returns the processes of the ranks, as control/liveness.h numbers them; nothing once destroyed.
    virtual std::vector<int64_t> processes() const {
        return control() ? control()->processes() : std::vector<int64_t>{};
    }

    /// The last operators of every rank, as JSON.
    virtual std::string flight_record() const = 0;

  protected:
    Communicator(int rank, int size, std::string domain, CallQueue::Waiters waiters)
        : queue_(std::make_unique<CallQueue>(waiters, "domain '" + domain + "'")),
          rank_(rank),
          size_(size),
          domain_(std::move(domain)) {}

    /// True in a forked child, which cannot use the parent's communicator.
    bool is_inherited() const { return generation_ != fork_generation(); }

    /// Throws an error after a fork in the child, and after `destroy()`.
    virtual void check_usable() const;
    bool has_ended() const { return is_inherited() || destroyed_.load(std::memory_order_acquire); }

    /// Does what `destroy` says, in its turn.
    virtual void leave() = 0;

    /// Throws invalid_param if there is no such rank.
    static void check_rank(int rank, int size);

    /// Returns the error of a call that comes during another thread's: ranks may order the two differently.
    Error two_threads(OpKind op) const;

    /// For destructors, which cannot report failures: aborts pending calls, then leaves.
    void destroy_quietly();

    /// The destructors of derived classes reset it before the objects that the queue's calls use.
    std::unique_ptr<CallQueue> queue_;
    std::atomic<bool> destroyed_{false};
    std::atomic<uint64_t> operators_{0}, failed_{0};

  private:
    const int rank_, size_;
    const std::string domain_;
    const uint32_t generation_ = fork_generation();
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

/// Makes every communicator that Python may refer to.
template <class Concrete, class... Arguments>
std::shared_ptr<Concrete> make_communicator(Arguments&&... arguments) {
    return {new Concrete(std::forward<Arguments>(arguments)...), Communicator::drop};
}

}  // namespace alltoallv
