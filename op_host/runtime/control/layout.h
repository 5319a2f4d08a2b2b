/// \file layout.h
/// \brief The shared control segment of a communicator: the data that each rank writes and its peers read.
///
/// Every rank owns two rows, used in turn. A rank publishes row n+2 only after it has seen all rows n+1, and a rank
/// that has published row n+1 has finished with the rows n, so a row is never overwritten while it is read (ROW in
/// row_protocol.pml, where a model checker looks at every interleaving).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "runtime/base/sizes.h"
#include "runtime/control/flight.h"
#include "runtime/control/summary.h"
#include "runtime/core/collective.h"

namespace alltoallv {

/// Address of a tensor: segment 0 is the owner's private memory (offset = address), others are segments of its arena.
struct Location {
    uint64_t bits = 0;

    static Location in_segment(uint32_t segment, uint64_t offset) {
        return {static_cast<uint64_t>(segment) << 48 | offset};
    }
    static Location in_private(const void* address) { return {reinterpret_cast<uint64_t>(address) & offset_mask}; }
    uint32_t segment() const { return static_cast<uint32_t>(bits >> 48); }
    uint64_t offset() const { return bits & offset_mask; }

    static constexpr uint64_t offset_mask = (uint64_t{1} << 48) - 1;
};

/// The part of a row about one peer. Offsets are in bytes; a reduction's are the words of its shape.
struct Pair {
    int64_t send_count;  // elements for that peer
    int64_t source;      // where they start: in the input, or in the row's payload if it travels inline
    int64_t recv_count;  // elements expected from that peer
    int64_t target;      // where they go in the output

    bool operator==(const Pair&) const = default;
};

/// How both regions of a pair lie, in bytes; row 0: in one piece.
struct PairSteps {
    Steps source, target;
};

enum RowFlag : uint8_t {
    row_failed = 1,        // the rank failed its own checks: the payload holds an ErrorText
    row_inline = 2,        // everything that this rank sends lies in the payload
    row_learns = 4,        // the peers announce the receive counts; `output` and the targets follow with `Flags::late`
    row_avoids_reads = 8,  // this rank avoids reading the peers' private memory: a mailbox or a ring is better
    row_in_ring = 16,      // everything that this rank sends lies in the ring to the other of two ranks
    row_of_caller = 32,    // with row_failed: the caller's arguments were wrong, which concerns this operator alone
    row_moves_nothing = 64,  // the ranks only compare their rows: the data lie on a device
    row_strided = 128,       // PairSteps tell how the regions lie
};

/// What a rank announces of one operator, beside what concerns single peers.
struct Announcement {
    DType dtype;
    OpKind op;
    ReduceOp reduce_op;
    uint8_t flags;
    uint64_t balance;  // of all ranks' counts: see pair_balance
    Location input;
    Location output;
    int64_t count;          // elements of a reduction, or of one row of an exchange; as what follows equal on all ranks
    int64_t terms;          // what else they agree on, in the operator's form (core/terms.h)
    int32_t root;           // of a rooted operator
    uint32_t shape_digest;  // of a reduction (core/shape_words.h); 0: no shape to compare
};

/// A rank's announcement in shared memory; Pair[W], the payload and PairSteps[W] follow.
struct alignas(cache_line) Row : Announcement {
    std::atomic<uint64_t> seq;  // published with release once the rest is written

    Pair* pairs() { return reinterpret_cast<Pair*>(this + 1); }
    const Pair* pairs() const { return reinterpret_cast<const Pair*>(this + 1); }
};
static_assert(sizeof(Row) == cache_line);

/// The announcement that a rank prepares. It goes into the row when that is published: each store before would take the
/// line away from peers that look at it already.
struct OwnRow : Announcement {
    Row* shared = nullptr;

    Pair* pairs() const { return shared->pairs(); }
};

struct ErrorText {
    uint8_t kind;
    int32_t code;
    char text[496];
};

struct alignas(cache_line) Flag {
    std::atomic<uint64_t> value;
};

/// Wakes sleepers; see Doorbell.
struct alignas(cache_line) Bell {
    std::atomic<uint32_t> rung, sleepers;
};

/// Progress for which peers wait.
struct Flags {
    Flag done;      // sequence number of the last exchange whose copies this rank has finished
    Flag late;      // sequence number of the last learning row that is complete
    Flag rounds;    // of two-shot reductions
    Flag refused;   // sequence number of the last operator whose rows this rank refused
    Bell messages;  // rung by peers that have written something for this rank, or have read something
};

enum class RankState : uint32_t { absent, joined, ready, left };

/// One operator in the flight recorder.
struct FlightEntry {
    std::atomic<uint64_t> seq, what, bytes, start_ns, end_ns;  // what: op << 40 | dtype << 8 | FlightState
};

struct alignas(cache_line) RankStatus {
    std::atomic<RankState> state;
    std::atomic<uint32_t> pid, place;  // place: a hash of its host (base/place.h)
    std::atomic<uint64_t> process;     // random identity of the process: ranks with the same one share an arena
    std::atomic<uint64_t> acked;       // set once this rank has seen the poison and will not write to any peer again
    std::atomic<uint64_t> probe;       // address of a word that peers try to read with process_vm_readv
    std::atomic<uint32_t> reads_all;   // 1 if this rank could read every peer
    std::atomic<uint32_t> ended;       // 1 if it has left because its process ends
    std::atomic<uint32_t> silent;      // of a leader of another host: 1 while it does not answer
    std::atomic<uint64_t> arrived;     // of a rank of another host: an operator that it has begun, as far as is known
    std::atomic<uint64_t>
        carried[2];                  // the same: operators, in turn, whose row is here for what it brings to this host
    std::atomic<uint64_t> cpus[16];  // the processors it may use, bit by bit
    char host[64];                   // its name, if it is not this host
    char reason[1024];               // why this rank poisoned the communicator
    FlightEntry flight[flight_length];
};

enum class PoisonKind : uint8_t { none, timeout, lost, aborted, deadlock, resource, memory };

/// Two ranks that disagree about a count; from < 0 if none do.
struct CountMismatch {
    int32_t from = -1, to = -1;
    int64_t sent = 0, expected = 0;
};

/// Why a communicator has ended. In one word, so that whatever else happens no rank but the one that `by` writes of in
/// its `reason` counts as lost.
struct PoisonWord {
    PoisonKind kind;
    int lost;  // a rank; < 0: none
    int by;

    PoisonWord(PoisonKind as, int of, int teller) : kind(as), lost(of), by(teller) {}
    explicit PoisonWord(uint64_t bits)
        : kind(static_cast<PoisonKind>(bits >> 56)), lost(rank_of(bits >> 28)), by(rank_of(bits)) {}
    uint64_t bits() const {
        return static_cast<uint64_t>(kind) << 56 | static_cast<uint64_t>(lost + 1) << 28 |
               static_cast<uint64_t>(by + 1);
    }

  private:
    static int rank_of(uint64_t bits) { return static_cast<int>(bits & 0xfffffff) - 1; }
};

/// What the ranks of all other hosts announce, of two operators in turn.
struct alignas(cache_line) OtherHosts {
    std::atomic<uint64_t> seq;  // published with release once the summary is written
    Summary sum[2];
};

struct alignas(cache_line) ControlHeader {
    std::atomic<uint64_t> poison;   // 0, or a PoisonWord; set once
    std::atomic<uint64_t> refused;  // the last operator that any rank has refused
    std::atomic<uint64_t>
        compared;  // between hosts: the last operator whose counts rank 0 has compared, and its finding
    CountMismatch difference;
    OtherHosts others;
    Bell bell;
};

/// A single-producer single-consumer ring for payload that has no other path; its bytes follow.
struct RingHeader {
    Flag produced;  // bytes since the communicator was made
    Flag consumed;
    Flag wanted;  // number of the operator whose data the receiver takes here, because it may not read them itself
};

/// taken: the receiver reads the data by itself; wanted: they are to come in pieces through the channel.
enum class MessageState : uint32_t { free, offered, taken, wanted, done, refused, withdrawn };

/// One message from a rank to another. The sender writes all fields except the receiver's answer.
struct alignas(cache_line) MessageSlot {
    std::atomic<uint64_t> number;  // of this channel, from 1; published with release once the rest is written
    std::atomic<MessageState> state;
    int32_t tag;
    int64_t count, expected_count;  // expected: written by a receiver that refuses it
    Location input;
    DType dtype, expected_dtype;
    std::atomic<uint32_t> produced, consumed;  // pieces, if they travel through the channel
};
static_assert(sizeof(MessageSlot) == cache_line);

/// Messages from one rank to another; two buffers for pieces of data follow.
struct Channel {
    static constexpr size_t slots = 64;  // messages that have been sent and not yet received

    MessageSlot messages[slots];
};

/// An operator in which a process waits, and the first rank that it waits for.
struct WaitRecord {
    static constexpr size_t most_ranks = 4;
    struct For {
        int64_t process;
        int64_t rank;
    };

    int64_t process;  // equal on all hosts: the place and the pid
    int32_t rank;
    uint32_t operators;         // number of operators in which the process waits; one record each
    int64_t since_ns, seen_ns;  // no thread of the process could continue in all that time
    uint64_t seq;
    OpKind op;
    uint16_t ranks;
    uint32_t moves_messages;  // 1 if the process has messages under way that no thread waits for
    double limit;             // seconds that the wait lasts at most
    For missing[most_ranks];
    char domain[136];
};
static_assert(sizeof(WaitRecord) % sizeof(uint64_t) == 0);

/// The waits that a waiting process knows: its own records, and those that its peers have published.
struct alignas(cache_line) WaitBoard {
    static constexpr size_t most_records = 64;

    std::atomic<uint64_t> version, records;  // version is odd while it is being written
    std::atomic<uint64_t> words[most_records * sizeof(WaitRecord) / sizeof(uint64_t)];
};

/// Offsets inside the control segment.
class Layout {
  public:
    Layout(int size, size_t inline_bytes)
        : size_(static_cast<size_t>(size)),
          inline_bytes_(round_up(inline_bytes < sizeof(ErrorText) ? sizeof(ErrorText) : inline_bytes, cache_line)),
          steps_at_(sizeof(Row) + round_up(size_ * sizeof(Pair), cache_line) + inline_bytes_),
          row_stride_(steps_at_ + round_up(size_ * sizeof(PairSteps), cache_line)),
          ring_bytes_(size == 2 ? ring_of_two : ring_budget / std::max(size_ - 1, size_t{1}) / unit * unit) {
        if (ring_bytes_ < min_ring) ring_bytes_ = min_ring;
        flags_ = sizeof(ControlHeader);
        rows_ = flags_ + size_ * sizeof(Flags);
        status_ = rows_ + size_ * 2 * row_stride_;
        hot_ = round_up(status_ + size_ * sizeof(RankStatus), unit);
        boards_ = hot_;
        rings_ = round_up(boards_ + size_ * sizeof(WaitBoard), unit);
        scratch_ = round_up(rings_ + size_ * size_ * (sizeof(RingHeader) + ring_bytes_), unit);
        channels_ = scratch_ + size_ * scratch_bytes;
        total_ = channels_ + size_ * size_ * (sizeof(Channel) + 2 * piece_bytes());
    }

    size_t total() const { return total_; }
    size_t hot() const { return hot_; }  // the part that should be resident at once
    size_t without_data() const { return rings_; }
    size_t inline_bytes() const { return inline_bytes_; }
    size_t ring_bytes() const { return ring_bytes_; }
    size_t piece_bytes() const { return std::min(ring_bytes_ / 16, max_piece); }

    ControlHeader& header(char* base) const { return *reinterpret_cast<ControlHeader*>(base); }
    Flags& flags(char* base, int rank) const { return reinterpret_cast<Flags*>(base + flags_)[rank]; }
    Row& row(char* base, int rank, uint64_t seq) const {
        return *reinterpret_cast<Row*>(base + rows_ + (static_cast<size_t>(rank) * 2 + (seq & 1)) * row_stride_);
    }
    char* payload(Row& row) const { return reinterpret_cast<char*>(&row) + steps_at_ - inline_bytes_; }
    PairSteps* steps(Row& row) const { return reinterpret_cast<PairSteps*>(reinterpret_cast<char*>(&row) + steps_at_); }
    RankStatus& status(char* base, int rank) const { return reinterpret_cast<RankStatus*>(base + status_)[rank]; }
    RingHeader& ring(char* base, int from, int to) const {
        const size_t index = static_cast<size_t>(from) * size_ + static_cast<size_t>(to);
        return *reinterpret_cast<RingHeader*>(base + rings_ + index * (sizeof(RingHeader) + ring_bytes_));
    }
    Channel& channel(char* base, int from, int to) const {
        const size_t index = static_cast<size_t>(from) * size_ + static_cast<size_t>(to);
        return *reinterpret_cast<Channel*>(base + channels_ + index * (sizeof(Channel) + 2 * piece_bytes()));
    }
    char* piece(Channel& channel, uint32_t number) const {
        return reinterpret_cast<char*>(&channel + 1) + number % 2 * piece_bytes();
    }
    char* scratch(char* base, int rank) const { return base + scratch_ + static_cast<size_t>(rank) * scratch_bytes; }

    WaitBoard& board(char* base, int rank) const { return reinterpret_cast<WaitBoard*>(base + boards_)[rank]; }

    static constexpr size_t scratch_bytes = size_t{7} << 18;  // of a two-shot reduction, per rank

  private:
    static constexpr size_t unit = size_t{4} << 10;         // at which parts begin, equal on all ranks
    static constexpr size_t ring_budget = size_t{1} << 20;  // per rank, over all its receivers
    static constexpr size_t ring_of_two = size_t{3} << 20;  // more than a processor's own caches, less than shared ones
    static constexpr size_t min_ring = size_t{16} << 10;
    static constexpr size_t max_piece = size_t{16} << 10;

    size_t size_, inline_bytes_, steps_at_, row_stride_, ring_bytes_;
    size_t flags_, rows_, status_, hot_, boards_, rings_, scratch_, channels_, total_;
};

}  // namespace alltoallv
