// Makes the copies: direct, from a peer's private memory, and through the rings.

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "op_kernel/cpu/copy.h"
#include "runtime/shm/shm_communicator.h"

namespace alltoallv {
namespace {

/// A sender checks for poison at least once per this many bytes, which bounds what a late writer can touch.
constexpr size_t checked_chunk = size_t{1} << 20;
/// Least bytes that a thread copies: a smaller copy takes no longer than waking the thread.
constexpr size_t least_share = size_t{1} << 20;
/// Bytes of a copy between rows that are made before the next copy has its turn.
constexpr size_t rows_in_turn = size_t{64} << 10;
/// Bytes of a row from which streaming stores pay.
constexpr size_t least_streamed = 512;
/// Bytes that a rank puts into a ring before it looks at the others.
constexpr size_t ring_piece = size_t{32} << 10;
/// Bytes up to which the mailbox beside the row is better than a place in a ring.
constexpr size_t ring_from = 4096;

}  // namespace

void ShmCommunicator::copy_checked(const StridedRegion& to, const StridedRegion& from, size_t bytes, Stores stores) {
    if (to.run() < bytes || from.run() < bytes)
        copies_.push_back({to, from, bytes, stores});
    else if (copy_threads_ && bytes >= copy_threads_->shares() * least_share)
        copy_together(to.at, from.at, bytes, stores);
    else
        copy_alone(to.at, from.at, bytes, stores);
}

/// Makes the collected copies between rows, a piece of each in turn: rows of one lie between rows of another, and
/// are then found in pages that are at hand.
void ShmCommunicator::copy_rows_in_turn() {
    if (copies_.empty()) return;
    size_t bytes = 0;
    for (const Copy& each : copies_) bytes += each.bytes;
    const size_t shares = copy_threads_ ? copy_threads_->shares() : 1;
    if (shares > 1 && bytes >= shares * least_share)
        copy_threads_->run([&](size_t hand) { copy_share(hand, shares); });
    else
        copy_share(0, 1);
    control_->throw_if_poisoned();  // it may have stopped for that
}

/// Makes one of so many shares of every collected copy, until the communicator is poisoned. It does not throw: a helper
/// may run it.
void ShmCommunicator::copy_share(size_t share, size_t shares) {
    bool more = true;
    for (size_t done = 0; more; done += rows_in_turn) {
        more = false;
        for (const Copy& each : copies_) {
            const size_t part = (each.bytes + shares - 1) / shares, begin = share * part + done;
            const size_t end = std::min({begin + rows_in_turn, (share + 1) * part, each.bytes});
            if (begin >= end || control_->poisoned()) continue;
            more = true;
            StridedRegion to = each.to.from(begin), from = each.from.from(begin);
            for_pieces(to, from, end - begin, [&](const CopiedRows& all) {
                if (each.stores == Stores::streaming && all.bytes >= least_streamed)
                    kernel::copy_rows_streaming_unfenced(all.to, all.to_step, all.from, all.from_step, all.bytes,
                                                         all.number);
                else
                    all.copy();
            });
        }
    }
    kernel::fence_streaming();
}

void ShmCommunicator::copy_together(char* to, const char* from, size_t bytes, Stores stores) {
    const size_t share = round_up((bytes + copy_threads_->shares() - 1) / copy_threads_->shares(), 4096);
    copy_threads_->run([&](size_t hand) {
        const size_t begin = std::min(hand * share, bytes), end = std::min(begin + share, bytes);
        if (hand == 0) return copy_alone(to, from, end, stores);
        for (size_t at = begin; at < end && !control_->poisoned(); at += checked_chunk)
            kernel::copy(to + at, from + at, std::min(checked_chunk, end - at), stores == Stores::streaming);
    });
    control_->throw_if_poisoned();  // a helper may have stopped
}

void ShmCommunicator::copy_alone(char* to, const char* from, size_t bytes, Stores stores) {
    for (size_t at = 0; at < bytes; at += checked_chunk) {
        control_->throw_if_poisoned();
        const size_t chunk = std::min(checked_chunk, bytes - at);
        kernel::copy(to + at, from + at, chunk, stores == Stores::streaming);
    }
}

/// Returns false if the kernel refuses it, which it may do at any time after the probe.
bool ShmCommunicator::read_peer(int peer, char* to, uint64_t from, size_t bytes) {
    while (bytes > 0) {
        const ssize_t got = peers_[static_cast<size_t>(peer)].read(to, from, bytes);
        control_->throw_if_poisoned();
        if (got <= 0) {
            if (got < 0 && errno == EINTR) continue;
            if (got == 0 || errno != ESRCH) return false;
            throw peer_lost(4037,
                            "reading the memory of " + control_->describe_rank(peer) + " failed: " + strerror(errno));
        }
        to += got;
        from += static_cast<uint64_t>(got);
        bytes -= static_cast<size_t>(got);
    }
    return true;
}

/// Starts to send what peers have asked for because they may not read it. Returns true if there was any.
bool ShmCommunicator::serve_refused() {
    return std::erase_if(lent_, [&](const Stream& stream) {
               const bool wanted = stream.ring->wanted.value.load(std::memory_order_acquire) == control_->seq();
               if (wanted) outgoing_.push_back(stream);
               return wanted;
           }) > 0;
}

/// Returns the bytes in a ring: at most its capacity, unless a rank has corrupted it.
size_t ShmCommunicator::filled(const Stream& stream, uint64_t produced, uint64_t consumed) const {
    if (produced - consumed > control_->layout().ring_bytes())
        throw control_->broken(stream.peer, "more lies in its ring than fits");
    return produced - consumed;
}

size_t ShmCommunicator::pump_out(Stream& stream) {
    const size_t capacity = control_->layout().ring_bytes();
    const uint64_t produced = stream.ring->produced.value.load(std::memory_order_relaxed);
    const uint64_t consumed = stream.ring->consumed.value.load(std::memory_order_acquire);
    const size_t at = produced % capacity, room = capacity - filled(stream, produced, consumed);
    const size_t chunk = std::min({stream.left, room, capacity - at, capacity / 4, ring_piece});
    if (chunk == 0) return 0;
    char* const place = ring_data(*stream.ring, produced);
    if (stream.local.run() >= chunk)
        std::memcpy(place, stream.local.at, chunk);
    else
        copy_region({place}, stream.local, chunk);
    control_->signal(stream.ring->produced, produced + chunk);
    return chunk;
}

size_t ShmCommunicator::pump_in(Stream& stream) {
    const size_t capacity = control_->layout().ring_bytes();
    const uint64_t consumed = stream.ring->consumed.value.load(std::memory_order_relaxed);
    const uint64_t produced = stream.ring->produced.value.load(std::memory_order_acquire);
    const size_t at = consumed % capacity;
    const size_t chunk = std::min({stream.left, filled(stream, produced, consumed), capacity - at});
    if (chunk == 0) return 0;
    copy_region(stream.local, {ring_data(*stream.ring, consumed)}, chunk);
    control_->signal(stream.ring->consumed, consumed + chunk);
    return chunk;
}

/// Runs all staged transfers of this rank together: a rank that only sent, or only received, could block its peers.
void ShmCommunicator::run_staged() {
    const auto advance = [&](std::vector<Stream>& streams, auto pump) {
        bool progress = false;
        for (Stream& stream : streams) {
            const size_t chunk = pump(stream);
            stream.local = stream.local.from(chunk);
            stream.left -= chunk;
            progress |= chunk > 0;
        }
        std::erase_if(streams, [](const Stream& stream) { return stream.left == 0; });
        return progress;
    };
    // A peer whose last bytes are in the ring may have left, so nobody waits for it.
    const auto has_sent_all = [](const Stream& s) {
        return s.ring->produced.value.load(std::memory_order_acquire) -
                   s.ring->consumed.value.load(std::memory_order_relaxed) >=
               s.left;
    };
    const auto unfinished = [&] {
        std::vector<int> ranks;
        for (int j = 0; j < size(); ++j) {
            if (std::ranges::any_of(outgoing_, [&](const Stream& s) { return s.peer == j; }) ||
                std::ranges::any_of(incoming_, [&](const Stream& s) { return s.peer == j && !has_sent_all(s); }))
                ranks.push_back(j);
        }
        return ranks;
    };
    while (!outgoing_.empty() || !incoming_.empty()) {
        control_->throw_if_poisoned();
        control_->wait(
            [&] {
                const bool asked = serve_refused(), out = advance(outgoing_, [&](Stream& s) { return pump_out(s); });
                return advance(incoming_, [&](Stream& s) { return pump_in(s); }) || out || asked;
            },
            unfinished);
    }
}

/// True if two ranks hand over that many bytes in one piece, before they agree, through all of the ring in turn: lines
/// that the peer read long ago have left its own caches, and writing them costs a fifth of taking them from there.
bool ShmCommunicator::fits_ring(size_t bytes) const {
    return size() == 2 && chooses_ && bytes > ring_from && bytes <= control_->layout().ring_bytes() / 4;
}

/// Returns where the next piece begins, which both ranks compute alike. It does not go over the ring's end.
uint64_t ShmCommunicator::place_in_ring(const Flag& used, size_t bytes) const {
    const size_t capacity = control_->layout().ring_bytes();
    const uint64_t place = round_up(used.value.load(std::memory_order_relaxed), cache_line);
    return place % capacity + bytes > capacity ? round_up(place, capacity) : place;
}

/// Before this rank publishes its row. The peer may still be reading what an earlier operator has left there.
void ShmCommunicator::put_into_ring(const StridedRegion& data, size_t bytes) {
    const int peer = 1 - rank();
    RingHeader& ring = control_->ring(rank(), peer);
    const uint64_t place = place_in_ring(ring.produced, bytes);
    put_ = place + bytes;
    const size_t capacity = control_->layout().ring_bytes();
    control_->wait([&] { return put_ <= ring.consumed.value.load(std::memory_order_acquire) + capacity; },
                   [&] { return std::vector<int>{peer}; }, false);
    if (data.run() >= bytes)
        scratch_writer_.copy(ring_data(ring, place), data.at, bytes);
    else
        copy_region({ring_data(ring, place)}, data, bytes);
}

/// After agreement, so that both ranks have the same idea of the ring if the operator has failed before.
void ShmCommunicator::settle_ring() {
    control_->ring(rank(), 1 - rank()).produced.value.store(put_, std::memory_order_release);
}

}  // namespace alltoallv
