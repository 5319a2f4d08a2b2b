#include "runtime/hosts/tcp_messages.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "runtime/base/quiet_thread.h"
#include "runtime/bootstrap/unix_socket.h"
#include "runtime/hosts/tcp_messages_parts.h"

namespace alltoallv {
namespace {

constexpr size_t little = 64 << 10;         // bytes that travel with an offer
constexpr size_t little_on_host = 8 << 10;  // to a rank that shares memory
constexpr size_t most_offered = 4 << 20;    // bytes that a peer keeps of offers that it has not taken
constexpr int step_ms = 20;
constexpr double last_words = 1.0;  // seconds

}  // namespace

TcpMessages::TcpMessages(ControlPlane& control, std::vector<UniqueFd> sockets, CommunicatorPtr within,
                         std::vector<int> on_host, const void* key)
    : control_(control),
      within_(std::move(within)),
      on_host_(std::move(on_host)),
      key_(key),
      connections_(sockets.size()),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!bell_) throw system_error("cannot make an eventfd", errno);
    for (size_t j = 0; j < sockets.size(); ++j) connections_[j].socket = std::move(sockets[j]);
}

TcpMessages::~TcpMessages() {
    close();
}

MessageWorkPtr TcpMessages::start(const PeerMessage& message, double timeout) {
    const auto work = std::make_shared<Pending>(shared_from_this());
    const std::lock_guard lock(mutex_);
    Post post{{message, timeout < 0 ? control_.timeout() : timeout}, work};
    if (closing_) throw was_destroyed(message.op);
    if (control_.poisoned() && !post.survives()) throw post.ended(control_);
    try {
        serve();
    } catch (const Error& error) {  // its peer waits for this message already, or will
        control_.poison_with(error, post.text(control_));
        throw;
    }
    posts_.push_back(std::move(post));
    control_.messages_under_way.fetch_add(1);
    const uint64_t one = 1;
    (void)!::write(bell_.get(), &one, sizeof one);
    return work;
}

void TcpMessages::serve() {
    const std::lock_guard lock(thread_mutex_);
    if (!closing_ && !thread_.joinable()) thread_ = quiet_thread("alltoallv-p2p", "messages", [this] { run(); });
}

void TcpMessages::close() {
    {
        const std::scoped_lock lock(mutex_, thread_mutex_);
        closing_ = true;
        const uint64_t one = 1;
        (void)!::write(bell_.get(), &one, sizeof one);
    }
    const bool served = thread_.joinable();
    if (served) thread_.join();
    const std::lock_guard lock(mutex_);
    if (!served) say_last_words();
    const auto moves = [](const Post& post) { return post.carried && !post.carried->done(); };
    if (std::any_of(posts_.begin(), posts_.end(), moves)) within_->destroy();  // nothing moves after this
    for (Post& post : posts_)
        if (!post.work->done()) finish(post, post.ended(control_));
    posts_.clear();
    for (Connection& connection : connections_) connection.socket.reset();
    within_.reset();
}

void TcpMessages::run() {
    for (;;) {
        wait_a_step();
        drive_carried();
        const std::lock_guard lock(mutex_);
        if (closing_) return say_last_words();
        for (Post& post : posts_)
            if (post.sends() && post.number == 0) offer(post);
        match();
        for (size_t j = 0; j < connections_.size(); ++j) speak(static_cast<int>(j));
        look();
        tell_to_wait();
        posts_.remove_if([](const Post& post) { return post.work->done(); });
    }
}

/// Waits until there is something to receive, to send or to end; receives it.
void TcpMessages::wait_a_step() {
    std::vector<pollfd> ready{{bell_.get(), POLLIN, 0}};
    std::vector<int> peers{-1};
    int wait_ms = step_ms;
    {
        const std::lock_guard lock(mutex_);
        if (std::any_of(posts_.begin(), posts_.end(), [](const Post& post) { return post.carried != nullptr; }))
            wait_ms = 0;
        for (size_t j = 0; j < connections_.size(); ++j) {
            if (!connections_[j].socket) continue;
            const int events = POLLIN | (connections_[j].words.empty() ? 0 : POLLOUT);
            ready.push_back({connections_[j].socket.get(), static_cast<short>(events), 0});
            peers.push_back(static_cast<int>(j));
        }
    }
    if (::poll(ready.data(), ready.size(), wait_ms) <= 0) return;
    uint64_t rung;
    if (ready[0].revents != 0) (void)!::read(bell_.get(), &rung, sizeof rung);
    const std::lock_guard lock(mutex_);
    for (size_t i = 1; i < ready.size(); ++i)
        if ((ready[i].revents & ~POLLOUT) != 0) hear(peers[i]);
}

/// Sends answers without which sends of the peers would not end, and that this rank leaves.
void TcpMessages::say_last_words() {
    const auto begun = Clock::now();
    for (size_t j = 0; j < connections_.size(); ++j)
        if (connections_[j].socket) say(static_cast<int>(j), {Say::leave});
    const auto silent = [&](Connection& connection) { return !connection.socket || connection.words.empty(); };
    while (!std::all_of(connections_.begin(), connections_.end(), silent) && seconds_since(begun) < last_words) {
        for (size_t j = 0; j < connections_.size(); ++j) speak(static_cast<int>(j));
        ::usleep(500);
    }
    for (Connection& connection : connections_)
        if (connection.socket) ::shutdown(connection.socket.get(), SHUT_WR);
}

void TcpMessages::offer(Post& post) {
    Connection& to = connections_[static_cast<size_t>(post.asked.peer)];
    post.number = ++to.sent;
    Frame frame{Say::offer, post.asked.tag, post.number, 0, post.asked.count, post.asked.dtype};
    const bool is_little = post.bytes() <= (shares_memory(post, post.asked.peer) ? little_on_host : little);
    if (post.asked.peer == control_.rank()) {
        frame.bytes = post.bytes();
    } else if (is_little && to.offered + post.bytes() <= most_offered) {
        frame.bytes = post.offered = post.bytes();
        to.offered += post.offered;
    }
    say(post.asked.peer, frame, post.data(), frame.bytes);
}

/// Sends a frame; copies `body` if it is small.
void TcpMessages::say(int peer, const Frame& frame, const char* body, size_t bytes) {
    if (peer == control_.rank()) return on_frame(peer, frame, std::string(body, bytes));
    std::string own(reinterpret_cast<const char*>(&frame), sizeof frame);
    if (bytes <= little) own.append(body, bytes);
    connections_[static_cast<size_t>(peer)].words.push_back({std::move(own), body, bytes <= little ? 0 : bytes});
}

void TcpMessages::speak(int peer) {
    Connection& connection = connections_[static_cast<size_t>(peer)];
    while (connection.socket && !connection.words.empty()) {
        Connection::Words& words = connection.words.front();
        const bool own = !words.own.empty();
        const ssize_t sent = ::send(connection.socket.get(), own ? words.own.data() : words.data,
                                    own ? words.own.size() : words.bytes, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (sent < 0) {
            hear(peer);  // what it has said before it ended
            return connection.socket.reset();
        }
        const auto n = static_cast<size_t>(sent);
        if (own) {
            words.own.erase(0, n);
        } else {
            words.data += n;
            words.bytes -= n;
        }
        if (words.own.empty() && words.bytes == 0) connection.words.pop_front();
    }
}

void TcpMessages::hear(int peer) {
    Connection& connection = connections_[static_cast<size_t>(peer)];
    while (connection.socket) {
        const bool in_head = connection.head_heard < sizeof connection.head;
        const size_t in_body = connection.body_heard % little;  // data that nobody wants any more are read in pieces
        char* const at = in_head ? reinterpret_cast<char*>(&connection.head) + connection.head_heard
                         : connection.into != nullptr ? connection.into + connection.body_heard
                                                      : connection.body.data() + in_body;
        size_t left =
            in_head ? sizeof connection.head - connection.head_heard : connection.head.bytes - connection.body_heard;
        if (!in_head && connection.into == nullptr) left = std::min(left, little - in_body);
        if (left > 0) {
            const ssize_t got = ::recv(connection.socket.get(), at, left, MSG_DONTWAIT);
            if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
            if (got <= 0) return connection.socket.reset();
            (in_head ? connection.head_heard : connection.body_heard) += static_cast<size_t>(got);
        }
        if (connection.head_heard < sizeof connection.head) continue;
        if (in_head && connection.head.bytes > 0) {
            connection.body_heard = 0;
            Post* const post = connection.head.type == Say::data ? find(false, peer, connection.head.number) : nullptr;
            connection.into = post != nullptr && post->bytes() == connection.head.bytes ? post->data() : nullptr;
            if (connection.head.type != Say::data && connection.head.bytes > little) return connection.socket.reset();
            connection.body.assign(connection.into == nullptr ? std::min(connection.head.bytes, little) : 0, '\0');
        }
        if (connection.body_heard < connection.head.bytes) continue;
        const Frame frame = connection.head;
        connection.head_heard = connection.body_heard = 0;
        connection.into = nullptr;
        on_frame(peer, frame, std::exchange(connection.body, {}));
    }
}

void TcpMessages::on_frame(int peer, const Frame& frame, std::string body) {
    if (frame.type == Say::leave) {
        connections_[static_cast<size_t>(peer)].leaves = true;
        return;
    }
    if (frame.type == Say::offer) {
        connections_[static_cast<size_t>(peer)].offers.push_back({frame, std::move(body)});
        return;
    }
    Post* const post = find(frame.type != Say::data, peer, frame.number);
    if (post == nullptr) return;
    post->waits = frame.type == Say::wait;
    if (frame.type == Say::wait) return;
    if (frame.type == Say::take && shares_memory(*post, peer)) {
        carry(*post, peer);
    } else if (frame.type == Say::take) {
        say(peer, {Say::data, frame.tag, frame.number, post->bytes(), frame.count, frame.dtype}, post->data(),
            post->bytes());
    } else if (frame.type == Say::refuse) {
        finish(*post, message_mismatch(frame.tag, control_.domain(), control_.rank(), post->as(), peer,
                                       {frame.count, frame.dtype}));
    } else {
        if (frame.type == Say::data) say(peer, {Say::done, frame.tag, frame.number});
        finish(*post);
    }
}

/// Matches receives and offers, in the order of both.
void TcpMessages::match() {
    for (Post& post : posts_) {
        if (post.sends() || post.met || post.work->done()) continue;
        const bool any = post.asked.peer == PeerMessage::any_rank;
        const int end = any ? control_.size() : post.asked.peer + 1;
        int from = any ? 0 : post.asked.peer;
        while (from < end && !meet(post, from)) ++from;
        if (from == end && post.asked.looks == PeerMessage::Looks::once) finish(post);
    }
}

bool TcpMessages::meet(Post& post, int from) {
    std::deque<Offer>& offers = connections_[static_cast<size_t>(from)].offers;
    const auto found = std::find_if(offers.begin(), offers.end(),
                                    [&](const Offer& offer) { return post.asked.accepts(offer.frame.tag); });
    if (found == offers.end()) return false;
    post.work->set_found(from, found->frame.tag, found->frame.count, found->frame.dtype);
    if (post.asked.looks != PeerMessage::Looks::no) {
        finish(post);
        return true;
    }
    Offer offer = std::move(*found);
    offers.erase(found);
    post.from = from;
    post.met = true;
    post.number = offer.frame.number;
    if (post.asked.accepts(offer.frame.count, offer.frame.dtype)) {
        try {
            post.expect(offer.frame.count, *post.work);
        } catch (const Error& error) {
            control_.poison_with(error, post.text(control_));
            return true;
        }
        take(post, offer);
    } else {
        refuse(post, offer);
    }
    return true;
}

void TcpMessages::take(Post& post, Offer& offer) {
    if (offer.data.size() < post.bytes()) {
        if (shares_memory(post, post.from)) carry(post, post.from);
        say(post.from, {Say::take, offer.frame.tag, post.number});
        return;
    }
    if (post.bytes() > 0) std::memcpy(post.data(), offer.data.data(), post.bytes());
    finish(post);
    say(post.from, {Say::done, offer.frame.tag, post.number});
}

void TcpMessages::refuse(Post& post, const Offer& offer) {
    const Frame& frame = offer.frame;
    say(post.from, {Say::refuse, frame.tag, frame.number, 0, post.asked.count, post.asked.dtype});
    finish(post, message_mismatch(frame.tag, control_.domain(), post.from, {frame.count, frame.dtype}, control_.rank(),
                                  post.as()));
}

/// Checks if the peers still live, and if the time is over.
void TcpMessages::look() {
    for (Post& post : posts_) {
        if (post.work->done()) continue;
        if (!control_.poisoned() || post.survives()) {
            const std::vector<int> late = control_.peers_of(post.other());
            const bool gone = !late.empty() && std::all_of(late.begin(), late.end(), [&](int j) {
                return j != control_.rank() && !connections_[static_cast<size_t>(j)].socket;
            });
            if (gone && post.survives()) {
                finish(post, peer_lost(4034, control_.describe_rank(late[0]), " was lost"));
            } else if (gone && (control_.has_left(late[0]) || connections_[static_cast<size_t>(late[0])].leaves)) {
                control_.left_early(late[0]);
            } else if (gone) {
                control_.lost(late[0], "its connection for messages has ended");
            } else if (seconds_since(post.started) >= post.timeout) {
                const std::string text = control_.describe_wait("waited", post.started, post.text(control_), late);
                if (post.survives())
                    finish(post, comm_timeout(4012, text));
                else
                    control_.poison(PoisonKind::timeout, text);
            }
        }
        if (!control_.poisoned() || post.survives()) continue;
        if (post.carried && !post.carried->done())
            within_->abort(control_.received_poison().reason);  // the data are the caller's once nothing moves
        else
            finish(post, post.ended(control_));
    }
}

TcpMessages::Post* TcpMessages::find(bool sends, int peer, uint64_t number) {
    const auto found = std::find_if(posts_.begin(), posts_.end(), [&](const Post& post) {
        return number != 0 && post.sends() == sends && post.other() == peer && post.number == number &&
               !post.work->done();
    });
    return found == posts_.end() ? nullptr : &*found;
}

/// If a message ends half way, the rest is sent from a copy and received into unused memory, so that its connection
/// lasts. A broken peer may answer before it has received everything.
void TcpMessages::finish(Post& post, const std::optional<Error>& error) {
    const auto is_of = [&](const char* at) { return post.data() <= at && at < post.data() + post.bytes(); };
    for (Connection& connection : connections_) {
        if (connection.into != nullptr && !post.sends() && is_of(connection.into)) {
            connection.into = nullptr;
            connection.body.assign(little, '\0');
        }
        for (Connection::Words& words : connection.words)
            if (words.bytes > 0 && post.sends() && is_of(words.data))
                words.own.append(words.data, std::exchange(words.bytes, 0));
    }
    if (post.sends()) connections_[static_cast<size_t>(post.asked.peer)].offered -= std::exchange(post.offered, 0);
    control_.messages_under_way.fetch_sub(1);
    post.work->finish(error ? std::make_exception_ptr(*error) : nullptr);
}

}  // namespace alltoallv
