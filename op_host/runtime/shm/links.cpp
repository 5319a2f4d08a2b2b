#include "runtime/shm/links.h"

#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <set>
#include <thread>

#include "runtime/base/process_state.h"
#include "runtime/base/resources.h"
#include "runtime/base/spare_descriptors.h"
#include "runtime/bootstrap/reactor.h"
#include "runtime/bootstrap/unix_socket.h"
#include "runtime/core/held_lock.h"
#include "runtime/shm/arena.h"

namespace alltoallv {

namespace {

/// Sends a message; a segment's descriptor goes with it. Returns false if the socket is full.
bool send_now(int socket, const WireMessage& message) {
    const int fd = message.kind == WireMessage::segment_sent ? Arena::instance().descriptor(message.segment) : -1;
    const std::string_view words{reinterpret_cast<const char*>(&message), sizeof message};
    return try_send(socket, words, std::span(&fd, fd < 0 ? 0 : 1)) != IoStatus::again;
}

}  // namespace

/// All live Links of the process, so that a forked child can close its copies of their descriptors: otherwise the
/// sockets would hide the parent's death from peers.
struct LinksRegistry {
    std::mutex mutex;
    std::set<Links*> all;

    static LinksRegistry& instance() { return ProcessState<LinksRegistry>::get(); }

    void forget() const {
        for (Links* links : all)
            for (auto& link : links->links_) {
                link->peer.socket.reset();
                link->peer.pidfd.reset();
            }
    }
};

Links::Links(std::vector<Peer> peers, LinkEvents events) : events_(std::move(events)) {
    for (Peer& peer : peers) {
        links_.push_back(std::make_unique<Link>());
        links_.back()->peer = std::move(peer);
    }
    SpareDescriptors::instance().hold();
    LinksRegistry& registry = LinksRegistry::instance();
    const std::lock_guard lock(registry.mutex);
    registry.all.insert(this);
}

Links::~Links() {
    stop();
    LinksRegistry& registry = LinksRegistry::instance();
    {
        const std::lock_guard lock(registry.mutex);
        if (registry.all.erase(this) == 0) return;
    }
    SpareDescriptors::instance().release();
}

std::shared_ptr<Links> Links::make(std::vector<Peer> peers, LinkEvents events) {
    return std::shared_ptr<Links>(new Links(std::move(peers), std::move(events)));
}

void Links::watch() {
    const std::weak_ptr<Links> self = weak_from_this();
    for (int rank = 0; rank < static_cast<int>(links_.size()); ++rank) {
        const Peer& peer = links_[static_cast<size_t>(rank)]->peer;
        if (peer.pidfd)
            Reactor::instance().add(peer.pidfd.get(), [self, rank](uint32_t) {
                if (const auto links = self.lock()) links->on_death(rank, "its process has ended");
            });
        if (peer.socket)
            Reactor::instance().add(peer.socket.get(), [self, rank](uint32_t) {
                if (const auto links = self.lock()) links->on_socket(rank);
            });
    }
}

void Links::unwatch(int rank) {
    Peer& peer = links_[static_cast<size_t>(rank)]->peer;
    if (peer.pidfd) Reactor::instance().remove(peer.pidfd.get());
    if (peer.socket) Reactor::instance().remove(peer.socket.get());
}

void Links::stop() {
    {
        const std::lock_guard lock(mutex_);
        if (stopped_) return;
        stopped_ = true;
    }
    for (int rank = 0; rank < static_cast<int>(links_.size()); ++rank) unwatch(rank);
    {
        // A link whose peer has died is no longer watched, so the code above has not waited for it.
        const std::lock_guard lock(events_mutex_);
        events_ = {};
    }
    const std::lock_guard lock(mutex_);
    for (auto& link : links_) {
        link->peer.socket.reset();
        link->peer.pidfd.reset();
        link->memory.reset();
    }
}

void Links::on_death(int rank, const std::string& how) {
    Link& link = *links_[static_cast<size_t>(rank)];
    unwatch(rank);
    if (link.gone.exchange(true, std::memory_order_acq_rel)) return;
    const std::lock_guard lock(events_mutex_);
    if (events_.lost) events_.lost(rank, how);
}

void Links::on_socket(int rank) {
    if (!receive_all(rank)) on_death(rank, "its connection was closed");
}

/// The reactor's thread deals with a closed connection.
void Links::take(int rank) {
    (void)receive_all(rank);
}

/// Returns false if the connection is closed.
bool Links::receive_all(int rank) {
    Link& link = *links_[static_cast<size_t>(rank)];
    for (;;) {
        Event event = Event::none;
        {
            const std::lock_guard lock(mutex_);
            if (stopped_ || !link.peer.socket) return true;
            send_unsent(link);
            Message message;
            std::optional<Error> cut_short;
            IoStatus status = IoStatus::done;
            try {
                status = try_receive(link.peer.socket.get(), message);
            } catch (const Error& error) {
                cut_short = error;
            }
            if (status != IoStatus::done) return status == IoStatus::again;
            event = cut_short ? on_cut_short(link, message, *cut_short) : on_message(rank, message);
        }
        if (event == Event::none) continue;
        std::unique_lock lock(events_mutex_, std::try_to_lock);
        if (!lock) {
            HeldLock::release_now();  // the event being delivered may be waiting for it, to warn
            lock.lock();
        }
        if (event == Event::answered && events_.answered) events_.answered();
        if (event == Event::poisoned && events_.poisoned) events_.poisoned();
        if (event == Event::invalid && events_.lost) events_.lost(rank, "it sent an invalid message");
    }
}

/// Call it with the lock held. A segment's descriptor was lost because this process has none left: if it is awaited, it
/// is requested again with a spare one, or the waiting rank gets the error.
Links::Event Links::on_cut_short(Link& link, const Message& message, const Error& error) {
    WireMessage words{};
    if (message.data.size() != sizeof words || !link.memory) return Event::none;
    std::memcpy(&words, message.data.data(), sizeof words);
    if (words.kind != WireMessage::segment_sent || !link.requested.contains(words.segment)) return Event::none;
    if (SpareDescriptors::instance().give_one()) {
        send(link, {WireMessage::want_segment, words.segment});
        return Event::none;
    }
    link.requested.erase(words.segment);
    link.memory->refuse(words.segment, error);
    return Event::answered;
}

/// Call it with the lock held. `invalid`: no healthy peer sends that.
Links::Event Links::on_message(int rank, Message& message) {
    Link& link = *links_[static_cast<size_t>(rank)];
    WireMessage words{};
    if (message.data.size() != sizeof words) return Event::invalid;
    std::memcpy(&words, message.data.data(), sizeof words);
    switch (words.kind) {
        case WireMessage::want_segment:  // the message about a release follows
            send(link, {WireMessage::segment_sent, words.segment});
            return Event::none;
        case WireMessage::segment_sent: {
            if (!link.memory) return Event::none;
            const bool awaited = link.requested.erase(words.segment) > 0;
            if (message.fds.size() == 1) {
                if (!link.memory->offer(words.segment, std::move(message.fds[0]), awaited)) return Event::invalid;
            } else if (awaited) {
                link.memory->refuse(words.segment,
                                    peer_lost(4038, "rank " + std::to_string(rank) +
                                                        " published an invalid record: it has no segment " +
                                                        std::to_string(words.segment)));
            }
            return awaited ? Event::answered : Event::none;
        }
        case WireMessage::released:
            if (link.memory) link.memory->drop(words.segment);
            return Event::none;
        case WireMessage::poisoned:
            return Event::poisoned;
    }
    return Event::invalid;
}

void Links::set_memory(int rank, std::shared_ptr<PeerMemory> memory) {
    const std::lock_guard lock(mutex_);
    links_[static_cast<size_t>(rank)]->memory = std::move(memory);
}

void Links::give_segment(int rank, uint32_t segment) {
    const std::lock_guard lock(mutex_);
    const Link& link = *links_[static_cast<size_t>(rank)];
    if (!stopped_ && link.peer.socket && link.unsent.empty() && link.memory && link.memory->note_given(segment))
        (void)send_now(link.peer.socket.get(), {WireMessage::segment_sent, segment});
}

void Links::request_segment(int rank, uint32_t segment) {
    const std::lock_guard lock(mutex_);
    Link& link = *links_[static_cast<size_t>(rank)];
    if (!link.requested.insert(segment).second) return;
    requests_.fetch_add(1, std::memory_order_relaxed);
    send(link, {WireMessage::want_segment, segment});
}

/// Call it with the lock held. If the socket is full, the message follows once the peer has read others.
void Links::send(Link& link, const WireMessage& message) {
    if (stopped_ || !link.peer.socket) return;
    if (link.unsent.empty() && send_now(link.peer.socket.get(), message)) return;
    if (std::ranges::find(link.unsent, message) != link.unsent.end()) return;
    link.unsent.push_back(message);
    if (link.unsent.size() == 1) Reactor::instance().watch_output(link.peer.socket.get(), true);
}

/// Call it with the lock held.
void Links::send_unsent(Link& link) {
    if (link.unsent.empty()) return;
    const size_t before = link.unsent.size();
    while (!link.unsent.empty() && send_now(link.peer.socket.get(), link.unsent.front())) link.unsent.pop_front();
    if (link.unsent.empty()) Reactor::instance().watch_output(link.peer.socket.get(), false);
    // Too many descriptors of this user are in flight, of which nobody reports when they have arrived.
    if (link.unsent.size() == before) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Links::announce_poison() {
    tell_all(WireMessage{WireMessage::poisoned, 0});
}

void Links::tell_all(const WireMessage& message) {
    const std::lock_guard lock(mutex_);
    for (const auto& link : links_) send(*link, message);
}

void Links::announce_released(std::span<const uint32_t> segments) {
    LinksRegistry& registry = LinksRegistry::instance();
    const std::lock_guard lock(registry.mutex);
    for (Links* links : registry.all)
        for (const uint32_t segment : segments) links->tell_all(WireMessage{WireMessage::released, segment});
}

UniqueFd Links::duplicate_pidfd(int rank) const {
    const std::lock_guard lock(mutex_);
    const Peer& peer = links_[static_cast<size_t>(rank)]->peer;
    return peer.pidfd ? UniqueFd(fcntl(peer.pidfd.get(), F_DUPFD_CLOEXEC, 0)) : UniqueFd();
}

}  // namespace alltoallv
