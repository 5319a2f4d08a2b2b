/// \file point_to_point_moves.cpp
/// \brief Moves a message: the sender offers it, the receiver matches and reads it, or gets it in pieces.

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "runtime/control/peer_words.h"
#include "runtime/shm/arena.h"
#include "runtime/shm/point_to_point.h"
#include "runtime/shm/point_to_point_post.h"

namespace alltoallv {
namespace {

constexpr uint64_t in_progress = ~uint64_t{0};

}  // namespace

bool PointToPoint::offer(Post& post) {
    const int to = post.asked.peer;
    const uint64_t number = sent_[static_cast<size_t>(to)] + 1;
    MessageSlot& message = slot(control_.rank(), to, number);
    if (message.state.load(std::memory_order_acquire) != MessageState::free) return false;
    sent_[static_cast<size_t>(to)] = number;
    message.tag = post.asked.tag;
    message.count = post.asked.count;
    message.dtype = post.asked.dtype;
    message.input = post.input;
    message.produced.store(0, std::memory_order_relaxed);
    message.consumed.store(0, std::memory_order_relaxed);
    message.state.store(MessageState::offered, std::memory_order_relaxed);
    message.number.store(number, std::memory_order_release);
    post.message = &message;
    ring(to);
    return true;
}

/// Continues a send that has been offered: handles the receiver's answer, or writes pieces for it.
bool PointToPoint::push(Post& post) {
    MessageSlot& message = *post.message;
    const MessageState state = message.state.load(std::memory_order_acquire);
    if (state == MessageState::done || state == MessageState::refused) {
        const auto error = state == MessageState::done ? nullptr : std::make_exception_ptr(mismatch(post, message));
        message.state.store(MessageState::free, std::memory_order_relaxed);
        return finish(post, error);
    }
    if (state != MessageState::wanted) return false;
    Channel& way = channel(control_.rank(), post.asked.peer);
    uint32_t& produced = post.pieces;
    const uint32_t before = produced;
    while (post.moved < post.bytes() && produced - message.consumed.load(std::memory_order_acquire) < 2) {
        const size_t n = std::min(control_.layout().piece_bytes(), post.bytes() - post.moved);
        std::memcpy(control_.layout().piece(way, produced), post.data() + post.moved, n);
        post.moved += n;
        message.produced.store(++produced, std::memory_order_release);
    }
    if (produced == before) return false;
    ring(post.asked.peer);
    return true;
}

bool PointToPoint::take(Post& post) {
    const bool any = post.asked.peer == PeerMessage::any_rank;
    for (int from = any ? 0 : post.asked.peer; from < (any ? control_.size() : post.asked.peer + 1); ++from)
        if (take_from(post, from)) return true;
    return post.asked.looks == PeerMessage::Looks::once && finish(post);
}

/// Matches a receive with the first message of its tag. Whatever becomes possible between an earlier receive and a
/// later one waits for the next pass, in which the earlier one comes first.
bool PointToPoint::take_from(Post& post, int from) {
    const auto i = static_cast<size_t>(from);
    const int me = control_.rank();
    while (heard_[i] != pass_ && waiting_[i].size() < Channel::slots &&
           slot(from, me, arrived_[i] + 1).number.load(std::memory_order_acquire) == arrived_[i] + 1)
        waiting_[i].push_back(++arrived_[i]);
    heard_[i] = pass_;
    const auto match = std::find_if(waiting_[i].begin(), waiting_[i].end(),
                                    [&](uint64_t number) { return post.asked.accepts(slot(from, me, number).tag); });
    if (match == waiting_[i].end()) return false;
    MessageSlot& message = slot(from, me, *match);
    const int64_t count = read_once(message.count);
    const DType dtype = read_once(message.dtype);
    if (post.asked.looks != PeerMessage::Looks::no) {
        post.work->set_found(from, message.tag, count, dtype);
        return finish(post);
    }
    const bool fits = post.asked.accepts(count, dtype);
    const Location input = read_once(message.input);
    const bool in_pieces = fits && count > 0 && staged(input);
    if (in_pieces && reading_[i] >= pass_) return false;
    if (!fits) {
        message.expected_count = post.asked.count;
        message.expected_dtype = post.asked.dtype;
    }
    MessageState state = MessageState::offered;
    const MessageState answer = !fits ? MessageState::refused : in_pieces ? MessageState::wanted : MessageState::taken;
    if (!message.state.compare_exchange_strong(state, answer, std::memory_order_acq_rel)) return false;
    waiting_[i].erase(match);
    post.from = from;
    post.work->set_found(from, message.tag, count, dtype);
    if (fits) post.expect(count, *post.work);
    if (post.traced != nullptr) {
        post.traced->peer = from;
        post.traced->waited_ns = flight_ns() - flight_ns(post.started);
        control_.tracer().update(*post.traced);
    }
    if (!fits) {
        ring(from);
        return finish(post, std::make_exception_ptr(mismatch(post, message)));
    }
    post.message = &message;
    post.input = input;
    post.in_pieces = in_pieces;
    if (in_pieces) {
        reading_[i] = in_progress;
        ring(from);
    }
    read(post);
    return true;
}

/// Continues a receive that has been matched.
bool PointToPoint::read(Post& post) {
    MessageSlot& message = *post.message;
    const size_t bytes = post.bytes();
    if (post.in_pieces) {
        const bool changed = read_pieces(post);
        if (post.moved < bytes) return changed;
        reading_[static_cast<size_t>(post.from)] = pass_;
    } else if (bytes > 0 && post.input.segment() != 0) {
        const char* source = address_of(post);
        if (source == nullptr) return false;
        std::memcpy(post.data(), source, bytes);
    } else {
        if (!post.waits_for_pieces && !read_itself(post)) post.waits_for_pieces = refused_ = true;
        if (post.waits_for_pieces) return begin_pieces(post);
    }
    // A sender that has given up meanwhile may have changed the data.
    const bool complete = !control_.poisoned();
    message.state.store(MessageState::done, std::memory_order_release);
    ring(post.from);
    return finish(post, complete ? nullptr : std::make_exception_ptr(post.ended(control_)));
}

/// Reads the sender's private memory; false if the kernel refuses that, which it may do at any time after the probe.
bool PointToPoint::read_itself(Post& post) {
    const ShmPeer& peer = peers_[static_cast<size_t>(post.from)];
    while (post.moved < post.bytes()) {
        const ssize_t got =
            peer.read(post.data() + post.moved, post.input.offset() + post.moved, post.bytes() - post.moved);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == ESRCH)
            throw peer_lost(
                4037, "reading the memory of " + control_.describe_rank(post.from) + " failed: " + strerror(errno));
        if (got <= 0) return false;
        post.moved += static_cast<size_t>(got);
    }
    return true;
}

/// Asks the sender of a message that was taken for its data in pieces, once no other message uses those.
bool PointToPoint::begin_pieces(Post& post) {
    uint64_t& reading = reading_[static_cast<size_t>(post.from)];
    if (reading >= pass_) return false;
    reading = in_progress;
    post.in_pieces = true;
    post.moved = 0;
    MessageState state = MessageState::taken;
    post.message->state.compare_exchange_strong(state, MessageState::wanted, std::memory_order_acq_rel);
    ring(post.from);
    return true;
}

bool PointToPoint::read_pieces(Post& post) {
    MessageSlot& message = *post.message;
    Channel& way = channel(post.from, control_.rank());
    uint32_t& consumed = post.pieces;
    const uint32_t before = consumed;
    while (post.moved < post.bytes() && consumed != message.produced.load(std::memory_order_acquire)) {
        const size_t n = std::min(control_.layout().piece_bytes(), post.bytes() - post.moved);
        std::memcpy(post.data() + post.moved, control_.layout().piece(way, consumed), n);
        post.moved += n;
        message.consumed.store(++consumed, std::memory_order_release);
    }
    if (consumed == before) return false;
    ring(post.from);
    return true;
}

/// Returns null until the peer has sent its segment.
const char* PointToPoint::address_of(const Post& post) {
    ShmPeer& owner = peers_[static_cast<size_t>(post.from)];
    const uint32_t id = post.input.segment();
    const char* address = nullptr;
    if (owner.same_process) {
        address = Arena::instance().address(id, post.input.offset(), post.bytes());
    } else {
        owner.segments.refresh();  // no copies run now: every copy follows at once
        const Mapping* const segment = owner.segments.find(id);
        if (segment == nullptr) {
            links_->request_segment(post.from, id);
            return nullptr;
        }
        address = segment->at(post.input.offset(), post.bytes());
        if (address != nullptr) segment->populate(post.input.offset(), post.bytes());
    }
    if (address == nullptr) throw control_.broken(post.from, "its message names memory that it has not given");
    return address;
}

}  // namespace alltoallv
