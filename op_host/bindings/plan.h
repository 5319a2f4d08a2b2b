// Exchanges and reductions that are ready to run on any buffers that fit them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/core/communicator.h"
#include "runtime/core/request.h"
#include "runtime/shm/arena.h"

namespace alltoallv {

/// The result of an exchange whose receive counts came from the peers.
struct Learnt {
    Block block;
    std::vector<int64_t> counts;
};

/// A checked request with its dtype. Pending calls share it and need no Python to drop it.
class ReadyExchange {
  public:
    ReadyExchange(Request request, DType dtype, int rank);
    ReadyExchange(const ReadyExchange&) = delete;  // the exchange points into this object
    ReadyExchange& operator=(const ReadyExchange&) = delete;

    const Request& request() const { return request_; }
    DType dtype() const { return exchange_.dtype; }

    void run(Communicator& communicator, uintptr_t input, uintptr_t output, double timeout, uintptr_t stream = 0) const;

    /// Lets the ranks agree without moving data; returns the counts if the peers announce them.
    std::vector<int64_t> compare(Communicator& communicator, double timeout) const;

    /// Receives into a block of the arena.
    void learn(Communicator& communicator, uintptr_t input, double timeout, Learnt& learnt) const;

    /// Receives into the output that `allocate` makes from the receive counts.
    void learn(Communicator& communicator, uintptr_t input, double timeout, uintptr_t stream,
               const std::function<uintptr_t(std::vector<int64_t>)>& allocate) const;

  private:
    Exchange at(uintptr_t input, uintptr_t stream) const;

    Request request_;
    Exchange exchange_;
    ExchangeSummary summary_;
};

/// A reduction with its counts, for pending calls.
struct ReadyReduction {
    Reduction reduction;
    std::vector<int64_t> counts;

    void run(Communicator& communicator, double timeout) {
        reduction.counts = counts;
        communicator.reduce(reduction, timeout);
    }
};

/// The class that Python sees.
struct Plan {
    CommunicatorPtr communicator;
    std::shared_ptr<const ReadyExchange> data;
};

/// An asynchronous call whose output is known only at its end.
struct LearningWork {
    WorkPtr work;
    std::shared_ptr<const ReadyExchange> exchange;
    std::shared_ptr<Learnt> learnt;

    /// Returns the shape of the output, after the work.
    std::vector<int64_t> shape() const { return exchange->request().shape_for(learnt->counts); }
};

/// Makes the plan of a checked request for the elements of that dtype.
Plan plan_of(CommunicatorPtr communicator, Request request, const std::string& dtype);

/// Begins an exchange with a known output. The queue belongs to the communicator and ends before it.
WorkPtr submit(Communicator& communicator, std::shared_ptr<const ReadyExchange> exchange, uintptr_t input,
               uintptr_t output, double timeout);

LearningWork submit_learning(Communicator& communicator, std::shared_ptr<const ReadyExchange> exchange, uintptr_t input,
                             double timeout);

}  // namespace alltoallv
