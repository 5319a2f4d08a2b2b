/// \file communicator.h
/// \brief A rank's membership in a group, over whichever transport moves its data.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "base/error.h"
#include "core/call_queue.h"
#include "core/collective.h"
#include "core/quant_reduction.h"

namespace alltoallv {

/// A message under way.
class MessageWork : public Work {
  public:
    int source() const { return source_.load(); }
    void set_source(int rank) { source_.store(rank); }

  private:
    std::atomic<int> source_{PeerMessage::any_rank};  // of a recv, once it has met its message
};

using MessageWorkPtr = std::shared_ptr<MessageWork>;

/// Counters since the communicator was made, by name; see docs/architecture.md for the names.
using Stats = std::map<std::string, uint64_t>;

/// Collective calls block until this rank's part is done and throw `Error`. One call runs at a time: calls from
/// several threads are ordered by the communicator. Every rank must issue the same calls in the same order.
class Communicator : public std::enable_shared_from_this<Communicator> {
  public:
    virtual ~Communicator() = default;

    virtual int rank() const = 0;
    virtual int size() const = 0;
    virtual const std::string& domain() const = 0;
    virtual std::string backend() const = 0;

    /// For ranks whose data lie on a device: the communicator of the same ranks in host memory, if there is one.
    virtual std::shared_ptr<Communicator> control() const { return nullptr; }

    /// `timeout` in seconds; negative: the communicator's own.
    virtual void exchange(const Exchange& exchange, double timeout) = 0;
    virtual void reduce(const Reduction& reduction, double timeout) = 0;

    /// Throws value_overflow, on every rank, for a value that does not fit while the request says `raise`.
    virtual void quant_reduce(const QuantReduction& reduction, double /*timeout*/) {
        throw backend_unavailable("backend '" + backend() + "' has no " + std::string(name_of(reduction.op)));
    }

    /// Begins a message; `waits`: the caller waits at once. It goes on beside the collectives, whatever they wait for.
    /// A message that is not as the other side expects is an error on both, with nothing written.
    virtual MessageWorkPtr post(const PeerMessage& message, double /*timeout*/, bool /*waits*/) {
        throw backend_unavailable("backend '" + backend() + "' has no " + std::string(name_of(message.op)));
    }

    /// Uses up this rank's next sequence number with a failure, which every peer then raises too. Does not wait.
    virtual void fail(OpKind op, const Error& error) = 0;

    /// Runs `call`, which uses this communicator's blocking calls, later and in order.
    virtual WorkPtr submit(std::function<void()> call) = 0;

    /// The same for one operator: where it cannot be begun, its failure is the peers' too.
    WorkPtr begin(OpKind op, std::function<void()> call);

    /// Wakes and fails every rank that waits or comes later. Callable from any thread.
    virtual void abort(const std::string& reason) = 0;

    /// Leaves the group and frees what the communicator holds. Idempotent.
    virtual void destroy() = 0;

    /// Throws what is known to have failed behind calls that were enqueued on a device. `done`: they have ended, so
    /// that trouble of the peers no longer matters. From any thread.
    virtual void check_enqueued(bool /*done*/) {}

    /// False once poisoned, destroyed, or inherited through fork.
    virtual bool usable() const = 0;

    /// True while a call runs or waits for its turn.
    virtual bool busy() const = 0;

    virtual Stats stats() const = 0;

    /// The last operators of every rank, as JSON.
    virtual std::string flight_record() const = 0;

  protected:
    /// Throws invalid_param unless there is such a rank.
    static void check_rank(int rank, int size);

    /// What a call throws that comes while another thread's is inside: ranks may take the two in different orders.
    Error two_threads(OpKind op) const;

    /// What calls after `fork`, in the child, and after `destroy()` throw.
    Error inherited() const;
    Error destroyed() const;

    /// For destructors, which cannot report what fails: aborts calls that are pending, then leaves.
    void destroy_quietly();
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

}  // namespace alltoallv
