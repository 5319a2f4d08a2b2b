// Communicator over HCCL: tensors in NPU memory, any number of hosts.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/control/flight.h"
#include "runtime/core/communicator.h"
#include "runtime/hccl/hccl_group.h"
#include "runtime/hccl/kernels.h"
#include "runtime/hccl/launches.h"

namespace alltoallv {

/// Calls with a stream enqueue on it and return; calls without one block until the data have arrived.
///
/// Before a launch the ranks agree on operator, dtype and counts over `control`, a communicator of the same ranks in
/// host memory or over TCP, as often as `check` says. Without it the caller must ensure agreement by other means.
class HcclCommunicator final : public Communicator {
  public:
    /// Gives every rank the texts of all ranks, which have one length.
    using GatherBytes = std::function<std::vector<std::string>(const std::string&)>;
    /// Makes `control` once an HCCL communicator can find the peers; returns null and sets `failure` if that fails.
    using Meet = std::function<CommunicatorPtr(const GatherBytes& gather, std::string& failure)>;

    /// Collective: blocks until all ranks have arrived. With `meet`, `control` is made later.
    HcclCommunicator(HcclOptions options, CommunicatorPtr control, const Meet& meet = {});
    ~HcclCommunicator() override;

    std::string backend() const override { return "hccl"; }
    CommunicatorPtr control() const override { return control_; }

    /// Returns the caller's HcclComm, or null.
    HcclComm borrowed() const { return options_.comm; }
    /// Returns HCCL's name of its HcclComm, which consists of the domain and a unique hash; empty without one.
    std::string hccl_name() const;

    void exchange(const Exchange& exchange, double timeout) override;
    /// Throws an error of class hccl on every rank if HCCL returns success and does nothing, which the first call of an
    /// operator checks; the communicator stays usable, and `stats()` has "<operator>_falls_back".
    void reduce(const Reduction& reduction, double timeout) override;
    /// Only with `launched`, or with `moves` false: front ends move the data where the kernels in Ascend C do not
    /// (alltoallv/torch/engines).
    void quant_reduce(const QuantReduction& reduction, double timeout) override;
    /// Enqueues one kernel; the host does not wait. Throws backend_unavailable on every rank where the kernels do not
    /// serve; the communicator stays usable.
    void exchange_counted_on_device(const CountedOnDevice& call);
    /// Why the kernels do not serve this communicator; empty if they do. Collective when it is first asked.
    std::string why_no_kernels();
    /// Whether they serve a reduction, which the ranks have not compared yet; collective like `why_no_kernels`.
    bool kernel_serves(const QuantReduction& reduction);
    void fail(OpKind op, const Error& error, bool of_caller) override;
    void abort(const std::string& reason) override;
    void check_enqueued(bool done) override;
    bool usable() const override;
    Stats stats() const override;
    std::string flight_record() const override;

  private:
    void share_root_info();
    void find_control(const Meet& meet);
    void leave() override;
    void check_usable() const override;
    bool agrees(uint64_t seq) const;
    void poll(const std::string& where) const;
    void look_at_control() const;
    /// Makes the host wait for a stream. `name`: see synchronization.h.
    void wait(const char* name, const OnStream& on);
    void wait_for_owner(const std::string& where);
    Clock::time_point deadline(double timeout) const;

    void end(const Error& error);
    bool drain(Clock::time_point deadline);

    // operators.cpp
    std::string where(OpKind op) const;
    /// Runs one operator in its turn; a failure after the agreement ends the communicator for all ranks.
    template <class Agree, class Body>
    void run(OpKind op, DType dtype, Agree&& agree, Body&& body);

    const std::string& decide_on_kernels(const std::string& where);
    std::string reasons(const std::string& own_reason);
    /// Gathers the bytes of all ranks, over the communicator in host memory.
    void gather_on_host(const void* own, void* all, size_t bytes);

    /// The exchange has all counts from here on, also those that were learnt.
    void move(const Exchange& exchange, const OnStream& on);
    static const char* input_at(const Exchange& exchange, size_t rank);
    static char* output_at(const Exchange& exchange, size_t rank);
    void begin_launch(const OnStream& on);

    // fallback.cpp
    /// Runs `call(input, output)` on copies in device memory; before the call `heard` holds none of the right values,
    /// after it the output. `name` is the name of the wait for it.
    void on_device(const char* name, std::span<const std::byte> input, std::span<std::byte> heard, const OnStream& on,
                   const std::function<void(char*, char*)>& call);
    /// The same with HcclAllGather, of `count` elements of a type per rank.
    void gather_to_host(const char* name, std::span<const std::byte> input, std::span<std::byte> heard, uint64_t count,
                        HcclDataType type, const OnStream& on);
    OnStream self_check(aclrtStream stream) const;
    void check_data_path();
    void check_reduction(OpKind op, aclrtStream stream);
    bool reduces_rightly(OpKind op, const OnStream& on);
    bool all_saw(bool right, const OnStream& on);
    void gather_and_slice(const Exchange& exchange, const OnStream& on);

    HcclOptions options_;
    CommunicatorPtr control_;  ///< may be null
    std::unique_ptr<Device> device_;
    std::unique_ptr<HcclGroup> comm_;  ///< null if there is only one rank, and once destroyed
    bool falls_back_ = false;          ///< HcclAlltoAllV moves no data here; equal on all ranks
    std::map<OpKind, bool> reduces_;   ///< true: HCCL does this reduction here; absent: unknown; equal on all ranks
    std::atomic<bool> all_reduce_falls_back_{false}, reduce_scatter_falls_back_{false};
    std::optional<std::string> no_kernels_;  ///< why, once the ranks have agreed on it; empty: they serve
    std::unique_ptr<Kernels> kernels_;
    std::atomic<uint64_t> kernel_calls_{0};
    uint64_t seq_ = 0;
    Launches launches_;
    std::atomic<uint64_t> agreed_{0}, bytes_{0};
    mutable std::mutex records_;  ///< guards flight_ and ended_
    std::deque<FlightOperator> flight_;
    std::optional<Error> ended_;  ///< the error that closed it
};

}  // namespace alltoallv
