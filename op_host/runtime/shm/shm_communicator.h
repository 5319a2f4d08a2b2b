/// \file shm_communicator.h
/// \brief Communicator over shared memory: the ranks are processes of one host, or threads of one process.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/control/controlled_communicator.h"
#include "runtime/control/peer_words.h"
#include "runtime/core/strided_region.h"
#include "runtime/shm/algorithm_selector.h"
#include "runtime/shm/arena.h"
#include "runtime/shm/copy_threads.h"
#include "runtime/shm/hugepage_promoter.h"
#include "runtime/shm/links.h"
#include "runtime/shm/peer_writer.h"
#include "runtime/shm/point_to_point.h"

namespace alltoallv {

class QuantCodec;

/// The path of the bytes of one pair of ranks.
enum class Path : uint8_t {
    self,     // within this rank
    inlined,  // in the mailbox, along with the row
    push,     // the sender writes into the receiver's output, which lies in the receiver's arena
    pull,     // the receiver reads the sender's input, which lies in the sender's arena
    cma,      // the receiver reads the sender's private input with process_vm_readv
    staged,   // through a ring in the control segment
};

inline constexpr std::array<const char*, 6> path_names{"self", "inline", "push", "pull", "cma", "staged"};

class ShmCommunicator final : public ControlledCommunicator {
  public:
    /// `look` is called while the ranks join; it may throw.
    explicit ShmCommunicator(const CommunicatorOptions& options, const std::function<void()>& look = {});
    ~ShmCommunicator() override;

    std::string backend() const override { return "shm"; }
    bool releases_lock() const override { return !options_.threads; }  // they would wait for each other
    void exchange(const Exchange& exchange, double timeout) override;
    void reduce(const Reduction& reduction, double timeout) override;
    void quant_reduce(const QuantReduction& reduction, double timeout) override;
    MessageWorkPtr post(const PeerMessage& message, double timeout, bool waits) override;
    Stats stats() const override;

  private:
    enum class Stores : uint8_t { ordinary, streaming };
    /// A copy between regions of which one lies in rows.
    struct Copy {
        StridedRegion to, from;
        size_t bytes;
        Stores stores;
    };
    /// One staged transfer that is under way.
    struct Stream {
        int peer;
        RingHeader* ring;
        StridedRegion local;
        size_t left;
    };

    void connect(const std::function<void()>& look);
    void probe_peers();
    void leave() override;
    void begin_operator(double timeout) override;
    void check_moved() const override;
    void before_failure() override;
    void quarantine_output(const void* data, size_t bytes);
    void await_threads() const;

    // exchange.cpp
    struct Movement;
    struct Ways;
    uint64_t exchange_in_turn(const Exchange& exchange, OwnRow& own_row);
    RowWords locate(const Exchange& exchange, const ExchangeSummary& all);
    void fill_row(const Exchange& exchange, const ExchangeSummary& all, const Ways& ways, RowWords& own_words,
                  OwnRow& row);
    void fill_pairs(const Exchange& exchange, uint8_t flags, OwnRow& row);
    Ways choose_ways(const Exchange& exchange, const ExchangeSummary& all, const RowWords& own_words);
    size_t inline_capacity(const RowWords& own_words, const Ways& ways) const;
    size_t learn_counts(Movement& m, OwnRow& row);
    void keep_own(Movement& m);
    void send_to(Movement& m, int to);
    void receive_from(Movement& m, int from);
    void finish(Movement& m);
    Location announce_output(const void* output, size_t bytes);
    Location give(Location location, std::span<const int64_t> counts);
    void await_late(int peer, uint64_t seq);
    Path path_of(const RowWords& sender, const RowWords& receiver) const;
    bool allows(Path path) const { return (allowed_ >> static_cast<unsigned>(path) & 1u) != 0; }
    StridedRegion strided(int peer, const Steps& steps, size_t bytes) const;
    char* address_of(int peer, Location Row::* where, Location location, int64_t displacement, size_t bytes,
                     std::span<const int64_t> counts);
    void count(Path path, size_t bytes) {
        auto& counter = bytes_by_path_[static_cast<size_t>(path)];
        counter.store(counter.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
    }

    // copies.cpp
    /// True if ranks that each read and write this number of bytes exceed the caches, so that streaming stores pay.
    bool exceeds_cache(size_t bytes) const { return bytes >= cache_share_; }
    void copy_checked(const StridedRegion& to, const StridedRegion& from, size_t bytes, Stores stores);
    void copy_rows_in_turn();
    void copy_share(size_t share, size_t shares);
    void copy_together(char* to, const char* from, size_t bytes, Stores stores);
    void copy_alone(char* to, const char* from, size_t bytes, Stores stores);
    bool read_peer(int peer, char* to, uint64_t from, size_t bytes);
    bool serve_refused();
    void run_staged();
    bool fits_ring(size_t bytes) const;
    uint64_t place_in_ring(const Flag& used, size_t bytes) const;
    char* ring_data(RingHeader& ring, uint64_t place) const {
        return reinterpret_cast<char*>(&ring + 1) + place % control_->layout().ring_bytes();
    }
    void put_into_ring(const StridedRegion& data, size_t bytes);
    void settle_ring();
    /// After agreement: calls `use` with the bytes that the other of two ranks has put there.
    template <class Use>
    void take_from_ring(size_t bytes, Use&& use) {
        RingHeader& ring = control_->ring(1 - rank(), rank());
        const uint64_t place = place_in_ring(ring.consumed, bytes);
        use(static_cast<const char*>(ring_data(ring, place)));
        control_->signal(ring.consumed, place + bytes);
    }
    size_t filled(const Stream& stream, uint64_t produced, uint64_t consumed) const;
    size_t pump_out(Stream& stream);
    size_t pump_in(Stream& stream);

    // reduce.cpp
    uint64_t reduce_in_turn(const Reduction& reduction, OwnRow& own_row);
    bool has_result(const Reduction& r) const { return r.op != OpKind::reduce || r.root == rank(); }
    uint64_t reduce_sources(const Reduction& reduction, const Part& part, Path path);
    uint64_t reduce_small(const Reduction& reduction, OwnRow& own_row);
    uint64_t reduce_pair(const Reduction& reduction);
    uint64_t reduce_two_shot(const Reduction& reduction, OwnRow& own_row);
    bool find_all(std::vector<const char*>& addresses, Location Row::* where, size_t bytes);
    template <class Stages>
    void two_shot(Stages& stages, const struct TwoShotShape& shape);

    // quant_reduce.cpp
    uint64_t quant_reduce_in_turn(const QuantReduction& reduction, OwnRow& own_row);
    void quant_reduce_by(const QuantReduction& q, QuantCodec& codec, std::vector<QuantPart> parts, OwnRow& own_row);
    void quant_reduce_small(const QuantReduction& q, QuantCodec& codec, const std::vector<QuantPart>& parts,
                            OwnRow& own_row);
    void quant_reduce_two_shot(const QuantReduction& q, QuantCodec& codec, std::vector<QuantPart> parts,
                               OwnRow& own_row);

    std::shared_ptr<Links> links_;
    std::vector<ShmPeer> peers_;
    std::shared_ptr<PointToPoint> messages_;
    const bool chooses_;                // among the paths, by what is faster
    unsigned allowed_ = 0;              // bit per Path
    int processors_ = 0;                // of all ranks together
    size_t cache_share_ = 0;            // bytes of these processors' caches, for each rank
    std::array<uint32_t, 64> given_{};  // segments that peers have been sent, by the last digits of their ids
    uint64_t probe_word_ = 0;           // private memory that peers try to read
    const void* output_ = nullptr;      // of this operator, once peers may know its location in the arena
    size_t output_bytes_ = 0;
    uint64_t put_ = 0;                 // end of what was last put into the ring to the other of two ranks
    uint64_t steps_ = 0, rounds_ = 0;  // of two-shot reductions so far, equal on all ranks
    PeerWriter scratch_writer_{4.0};   // less than reading an input that is in no cache
    PeerWriter codes_writer_{0.6};     // part of the own codes' speed
    // What is quicker, at once or by the other way: the ring between two ranks, into shared and into private outputs;
    // two copies of private memory with shared memory between; stores past the caches.
    std::array<AlgorithmSelector, 2> rings_;
    AlgorithmSelector reads_, streams_{2};
    HugepagePromoter promoter_;
    std::unique_ptr<CopyThreads> copy_threads_;  // null if ranks need all processors
    std::vector<Copy> copies_;
    std::vector<Stream> outgoing_, incoming_;
    std::vector<Stream> lent_;    // data that peers read by themselves, or else ask for
    bool reads_refused_ = false;  // the kernel no longer lets this rank read its peers' private memory
    std::vector<uint8_t> pending_peers_;
    std::vector<int64_t> learnt_, targets_;  // counts of the peers, and destinations of their data, in bytes
    std::vector<const char*> inputs_, outputs_, slots_;
    std::vector<const void*> sources_;
    std::vector<char> result_;  // of a part of a small quantized reduction
    std::array<std::atomic<uint64_t>, path_names.size()> bytes_by_path_{};
};

/// The factory that the registry uses.
CommunicatorPtr make_shm_communicator(const CommunicatorOptions& options);

/// Makes the part of a communicator between hosts on this host; `look` throws once that has ended.
CommunicatorPtr make_shm_part(const CommunicatorOptions& options, const std::function<void()>& look);

}  // namespace alltoallv
