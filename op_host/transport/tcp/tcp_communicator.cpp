#include "transport/tcp/tcp_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "base/abandon.h"
#include "core/quant_terms.h"

namespace alltoallv {
namespace {

constexpr size_t payload_bytes = 8192;
constexpr size_t card_bytes = 2048;     // what rank 0 says of itself over `gather`
constexpr double meeting_seconds = 30;  // where nothing but agreement depends on it

TcpMeetingOptions meeting_options(const CommunicatorOptions& options, std::string token) {
    TcpMeetingOptions meeting;
    meeting.rank = options.rank;
    meeting.size = options.size;
    meeting.domain = options.domain;
    meeting.token = std::move(token);
    meeting.timeout = options.timeout;
    meeting.poll = hooks().poll;
    return meeting;
}

std::string random_token() {
    std::string token;
    std::ifstream("/proc/sys/kernel/random/uuid") >> token;
    return token;
}

/// Equal for one domain of one job, whatever their length.
std::string token_of(const CommunicatorOptions& options) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const char c : options.job + "\n" + options.domain) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
    return std::to_string(hash);
}

/// "port token address address ...", as many addresses as fit.
std::string card_of(int port, const std::string& token) {
    std::string card = std::to_string(port) + " " + token;
    for (const std::string& address : own_addresses())
        if (card.size() + 1 + address.size() < card_bytes) card += " " + address;
    card.resize(card_bytes, '\0');
    return card;
}

std::vector<std::string> words_of(const std::string& card) {
    std::vector<std::string> words;
    std::string word;
    for (const char c : card) {
        if (c != ' ' && c != '\0') {
            word += c;
            continue;
        }
        if (!word.empty()) words.push_back(std::move(word));
        word.clear();
        if (c == '\0') break;
    }
    return words;
}

}  // namespace

CommunicatorPtr make_tcp_communicator(const CommunicatorOptions& options, const TcpAddress& rank_0) {
    const TcpMeetingOptions meeting = meeting_options(options, token_of(options));
    TcpMembership membership = options.rank == 0 ? receive_ranks(listen_when_free(rank_0.port, meeting), meeting)
                                                 : join_rank_0({rank_0}, meeting);
    return std::make_shared<TcpCommunicator>(options, std::move(membership));
}

CommunicatorPtr make_tcp_communicator(const CommunicatorOptions& options, const GatherBytes& gather,
                                      std::string& failure) {
    UniqueFd listener;
    std::string token, card(card_bytes, '\0');
    if (options.rank == 0) {
        try {
            listener = listen_tcp(0);
            token = random_token();
            card = card_of(port_of(listener.get()), token);
        } catch (const Error& error) {
            failure = error.what();
        }
    }
    const std::vector<std::string> words = words_of(gather(card)[0]);
    CommunicatorPtr made;
    if (words.size() > 2) {
        TcpMeetingOptions meeting = meeting_options(options, words[1]);
        meeting.timeout = std::min(options.timeout, meeting_seconds);
        std::vector<TcpAddress> addresses;
        for (size_t i = 2; i < words.size(); ++i) addresses.push_back({words[i], std::stoi(words[0])});
        try {
            TcpMembership membership =
                options.rank == 0 ? receive_ranks(listener, meeting) : join_rank_0(addresses, meeting);
            made = std::make_shared<TcpCommunicator>(options, std::move(membership));
        } catch (const Error& error) {
            failure = error.what();
        }
    } else if (failure.empty()) {
        failure = "rank 0 has no address";
    }
    const std::vector<std::string> verdicts = gather(made ? "+" : "-");
    if (std::all_of(verdicts.begin(), verdicts.end(), [](const std::string& verdict) { return verdict == "+"; }))
        return made;
    if (failure.empty()) failure = "another rank could not";
    return nullptr;
}

TcpCommunicator::TcpCommunicator(const CommunicatorOptions& options, TcpMembership membership)
    : options_(options), pid_(getpid()) {
    ControlPlane::Options control;
    control.rank = rank();
    control.size = size();
    control.domain = domain();
    control.timeout = options.timeout;
    control.check = options.check;
    control.inline_bytes = payload_bytes;
    control.warn_after = options.warn_after;
    const size_t bytes = Layout(size(), payload_bytes).hot();  // no rings and no scratch
    control_ = std::make_unique<ControlPlane>(control, std::make_shared<Mapping>(Mapping::of_this_process(bytes)));
    for (int j = 0; j < size(); ++j) {
        const TcpPeer& peer = membership.peers[static_cast<size_t>(j)];
        RankStatus& status = control_->status(j);
        status.pid.store(peer.pid, std::memory_order_relaxed);
        status.state.store(RankState::ready, std::memory_order_relaxed);
        if (!peer.same_host)
            std::memcpy(status.host, peer.host.data(), std::min(peer.host.size(), sizeof status.host - 1));
    }
    star_ = TcpStar::make(std::move(membership.sockets), *control_);
    control_->on_publish = [this](Row& row, uint64_t seq) { star_->publish(row, seq); };
    control_->on_poison = [this] { star_->tell_poison(); };
    star_->watch();
    queue_->on_interrupt = [this] { abort("interrupted while waiting for its turn"); };
}

TcpCommunicator::~TcpCommunicator() {
    if (pid_ != getpid()) {
        abandon(std::move(star_));
        abandon(std::move(queue_));
        abandon(std::move(control_));
        return;
    }
    destroy_quietly();
}

void TcpCommunicator::check_usable() const {
    if (pid_ != getpid()) throw inherited();
    if (destroyed_.load(std::memory_order_acquire)) throw destroyed();
}

bool TcpCommunicator::usable() const {
    if (pid_ != getpid()) return false;
    const std::lock_guard lock(lifetime_);
    return control_ != nullptr && !control_->poisoned();
}

/// Runs one operator in its turn: `body` fills the row, publishes it and agrees.
template <class Body>
void TcpCommunicator::run(OpKind op, DType dtype, double timeout, Body&& body) {
    check_usable();
    const CallQueue::Turn turn(*queue_);
    check_usable();
    try {
        body(control_->open(op, dtype, timeout));
        control_->close(true, 0);
    } catch (const Error&) {
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->close(false, 0);
        throw;
    } catch (...) {
        control_->poison(PoisonKind::aborted,
                         "rank " + std::to_string(rank()) + " was interrupted in " + control_->describe_op());
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->close(false, 0);
        throw;
    }
    operators_.fetch_add(1, std::memory_order_relaxed);
}

void TcpCommunicator::exchange(const Exchange& x, double timeout) {
    run(x.op, x.dtype, timeout, [&](Row& mine) {
        const bool learns = x.recv_counts.empty();
        for (int j = 0; j < size(); ++j) {
            const auto i = static_cast<size_t>(j);
            mine.pairs()[j] = {x.send_counts[i], 0, learns ? 0 : x.recv_counts[i], 0};
        }
        mine.digests = digest_pairs(rank(), x.send_counts, x.recv_counts);
        mine.root = x.root;
        mine.count = x.row;
        if (learns) mine.flags |= row_learns;
        if (x.moves) pack(x, mine);
        control_->publish(mine);
        control_->agree();
        if (x.moves) {
            unpack(x);
        } else if (learns) {
            std::vector<int64_t> learnt;
            for (int j = 0; j < size(); ++j) learnt.push_back(control_->row(j).pairs()[rank()].send_count);
            x.allocate(learnt);
        }
    });
}

/// One region, which goes to all who get anything.
void TcpCommunicator::pack(const Exchange& x, Row& mine) {
    int64_t first = -1;
    for (size_t j = 0; j < x.send_counts.size(); ++j) {
        if (x.send_counts[j] == 0) continue;
        if (first < 0) first = static_cast<int64_t>(j);
        const auto i = static_cast<size_t>(first);
        const auto bytes = static_cast<size_t>(x.send_counts[j]) * size_of(x.dtype);
        if (x.send_counts[j] != x.send_counts[i] || x.sdispls[j] != x.sdispls[i] || bytes > payload_bytes ||
            x.recv_counts.empty() || x.byte_displs)
            throw backend_unavailable("domain '" + domain() + "' moves no data between hosts but one region of up to " +
                                      std::to_string(payload_bytes) + " bytes to all alike");
        mine.input.bits = bytes;
    }
    if (first < 0) return;
    const auto begin = static_cast<size_t>(x.sdispls[static_cast<size_t>(first)]) * size_of(x.dtype);
    std::memcpy(control_->payload(mine), static_cast<const char*>(x.input) + begin, mine.input.bits);
    mine.flags |= row_inline;
}

void TcpCommunicator::unpack(const Exchange& x) {
    for (int j = 0; j < size(); ++j) {
        const auto i = static_cast<size_t>(j);
        Row& sender = control_->row(j);
        const size_t bytes = static_cast<size_t>(x.recv_counts[i]) * size_of(x.dtype);
        if (bytes > 0)
            std::memcpy(static_cast<char*>(x.output) + static_cast<size_t>(x.rdispls[i]) * size_of(x.dtype),
                        control_->payload(sender), std::min<size_t>(bytes, sender.input.bits));
    }
}

void TcpCommunicator::reduce(const Reduction& r, double timeout) {
    if (r.moves) throw backend_unavailable("domain '" + domain() + "' moves no data between hosts");
    run(r.op, r.dtype, timeout, [&](Row& mine) {
        announce(mine, rank(), r);
        control_->publish(mine);
        control_->agree();
    });
}

void TcpCommunicator::quant_reduce(const QuantReduction& q, double timeout) {
    if (q.moves) throw backend_unavailable("domain '" + domain() + "' moves no data between hosts");
    run(q.op, q.dtype, timeout, [&](Row& mine) {
        announce(mine, control_->payload(mine), rank(), q);
        control_->publish(mine);
        control_->agree();
    });
}

void TcpCommunicator::fail(OpKind op, const Error& error) {
    check_usable();
    queue_->run_or_submit([this, op, error] {
        check_usable();  // destroyed by now?
        failed_.fetch_add(1, std::memory_order_relaxed);
        control_->fail(op, error);
    });
}

WorkPtr TcpCommunicator::submit(std::function<void()> call) {
    check_usable();
    return queue_->submit(std::move(call));
}

void TcpCommunicator::abort(const std::string& reason) {
    if (pid_ != getpid()) return;
    const std::lock_guard lock(lifetime_);
    if (control_ == nullptr) return;
    control_->poison(PoisonKind::aborted, "rank " + std::to_string(rank()) + " aborted: " + reason);
}

void TcpCommunicator::destroy() {
    if (pid_ != getpid()) return;
    const CallQueue::Turn turn(*queue_);
    if (destroyed_.exchange(true, std::memory_order_acq_rel)) return;
    control_->leave();
    star_->stop();
    const std::lock_guard lock(lifetime_);
    final_record_ = control_->flight_record();
    control_.reset();
}

Stats TcpCommunicator::stats() const {
    return {{"operators", operators_.load(std::memory_order_relaxed)},
            {"failed_operators", failed_.load(std::memory_order_relaxed)}};
}

std::string TcpCommunicator::flight_record() const {
    const std::lock_guard lock(lifetime_);
    return control_ == nullptr ? final_record_ : control_->flight_record();
}

}  // namespace alltoallv
