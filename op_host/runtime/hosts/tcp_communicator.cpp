#include "runtime/hosts/tcp_communicator.h"

#include <algorithm>
#include <cstring>

#include "runtime/base/abandon.h"
#include "runtime/base/sha256.h"
#include "runtime/bootstrap/bootstrap.h"
#include "runtime/control/liveness.h"
#include "runtime/hosts/tcp_connections.h"
#include "runtime/hosts/tcp_tree.h"

namespace alltoallv {
namespace {

constexpr double meeting_seconds = 30;  // for cases in which only agreement depends on it

/// The key differs between the domains of a job, which may share a port.
TcpJoinOptions meeting_options(const CommunicatorOptions& options, const std::string& secret) {
    TcpJoinOptions meeting;
    meeting.rank = options.rank;
    meeting.size = options.size;
    meeting.domain = options.domain;
    meeting.key = hex(hmac_sha256(secret, options.job + '\n' + options.domain));
    meeting.timeout = options.join_timeout < 0 ? options.timeout : options.join_timeout;
    meeting.warn_after = options.warn_after;
    meeting.check = options.check;
    meeting.poll = Liveness::poll(options);
    return meeting;
}

std::shared_ptr<TcpCommunicator> make_of(CommunicatorOptions options, TcpMembership membership,
                                         const TcpJoinOptions& meeting) {
    connect_tree(membership, meeting);
    options.secret = meeting.key;  // for later connections
    return make_communicator<TcpCommunicator>(options, std::move(membership), meeting);
}

}  // namespace

std::shared_ptr<TcpCommunicator> make_tcp_communicator(const CommunicatorOptions& options, const TcpAddress& rank_0) {
    const TcpJoinOptions meeting = meeting_options(options, options.secret);
    TcpMembership membership = options.rank == 0 ? receive_ranks_at(rank_0, meeting) : join_rank_0({rank_0}, meeting);
    return make_of(options, std::move(membership), meeting);
}

std::shared_ptr<TcpCommunicator> make_tcp_communicator(const CommunicatorOptions& options, const GatherBytes& gather,
                                                       std::string& failure) {
    UniqueFd listener;
    std::string card(card_bytes, '\0');
    if (options.rank == 0) {
        try {
            listener = listen_tcp(0);
            card = card_of(port_of(listener.get()));
        } catch (const Error& error) {
            failure = error.what();
        }
    }
    const std::vector<std::string> words = words_of(gather(card)[0]);
    std::shared_ptr<TcpCommunicator> made;
    std::optional<Error> refused;  // with the same error on all ranks
    if (words.size() > 2) {
        TcpJoinOptions meeting = meeting_options(options, options.secret + words[1]);
        meeting.timeout = std::min(meeting.timeout, meeting_seconds);
        std::vector<TcpAddress> addresses;
        for (size_t i = 2; i < words.size(); ++i) addresses.push_back({words[i], std::stoi(words[0])});
        try {
            TcpMembership membership =
                options.rank == 0 ? receive_ranks(std::move(listener), meeting) : join_rank_0(addresses, meeting);
            made = make_of(options, std::move(membership), meeting);
        } catch (const Error& error) {
            failure = error.what();
            if (error.kind() == ErrorClass::invalid_param || error.kind() == ErrorClass::peer_lost) refused = error;
        }
    } else if (failure.empty()) {
        failure = "rank 0 has no address";
    }
    const std::vector<std::string> verdicts = gather(made ? "+" : "-");
    if (std::all_of(verdicts.begin(), verdicts.end(), [](const std::string& verdict) { return verdict == "+"; }))
        return made;
    if (refused) throw *refused;
    if (failure.empty()) failure = "another rank could not";
    return nullptr;
}

TcpCommunicator::TcpCommunicator(const CommunicatorOptions& options, TcpMembership membership,
                                 const TcpJoinOptions& meeting)
    : ControlledCommunicator(options) {
    std::vector<int> here;
    std::vector<int64_t> processes;
    for (int j = 0; j < size(); ++j) {
        const TcpPeer& peer = membership.peers[static_cast<size_t>(j)];
        if (peer.same_host) here.push_back(j);
        processes.push_back(Liveness::process(peer.place, peer.pid));
    }
    const TcpPeer& first = membership.peers[0];
    local_job_ = options.job + "/" + std::to_string(first.place) + "-" + std::to_string(first.pid) + "/" +
                 std::to_string(here[0]);
    BootstrapOptions bootstrap;
    bootstrap.job = local_job_ + "/rows";
    bootstrap.domain = domain();
    bootstrap.rank = static_cast<int>(std::find(here.begin(), here.end(), rank()) - here.begin());
    bootstrap.size = static_cast<int>(here.size());
    bootstrap.names = here;
    bootstrap.timeout = meeting.timeout;
    bootstrap.warn_after = options.warn_after;
    bootstrap.control_bytes = Layout(size(), tcp_payload_bytes).without_data();
    bootstrap.poll = [&] {  // one that has come over TCP may end before it comes here
        if (meeting.poll) meeting.poll();
        Liveness::check(processes, rank(), domain());
    };
    Membership local;
    std::optional<Error> failure;
    try {
        local = bootstrap_processes(bootstrap);
        control_ = std::make_unique<ControlPlane>(options, tcp_payload_bytes, std::move(local.memory), bootstrap.size);
    } catch (const Error& error) {
        failure = error;
    }
    confirm(membership, meeting, failure);
    for (int j = 0; j < size(); ++j) {
        const TcpPeer& peer = membership.peers[static_cast<size_t>(j)];
        RankStatus& status = control_->status(j);
        status.pid.store(peer.pid, std::memory_order_relaxed);
        status.place.store(peer.place, std::memory_order_relaxed);
        RankState state = RankState::absent;  // it may have left by now
        status.state.compare_exchange_strong(state, RankState::ready);
        on_this_host_.push_back(peer.same_host);
        first_on_host_.push_back(peer.first_on_host);
        if (!peer.same_host)
            std::memcpy(status.host, peer.host.data(), std::min(peer.host.size(), sizeof status.host - 1));
    }
    try {
        leaders_ =
            std::make_shared<TcpLeaders>(std::move(membership), std::move(here), std::move(local.peers), *control_);
        leaders_->watch();
    } catch (const Error& error) {
        give_up(error);
        throw;
    }
}

TcpCommunicator::~TcpCommunicator() {
    if (is_inherited()) {
        abandon(std::move(leaders_));
        abandon(std::move(queue_));
        abandon(std::move(control_));
        abandon(std::move(carriers_.between));
        abandon(std::move(messages_));
        return;
    }
    destroy_quietly();
    queue_.reset();
}

void TcpCommunicator::carry_by(Carriers carriers, std::vector<UniqueFd> for_messages) {
    carriers_ = std::move(carriers);
    if (const auto within = std::dynamic_pointer_cast<ControlledCommunicator>(carriers_.within)) {
        part_of_this(*within);
        control_->share_poison([part = std::weak_ptr(within)](const ControlPlane::Poison& poison) {
            if (const auto there = part.lock()) there->end_with(poison);
        });
    }
    // Ranks that do not share memory count as ranks on separate hosts.
    if (!carriers_.within)
        for (int j = 0; j < size(); ++j)
            if (on_this_host(j)) first_on_host_[static_cast<size_t>(j)] = j;
    messages_ = std::make_shared<TcpMessages>(*control_, std::move(for_messages), carriers_.within, carriers_.on_host,
                                              queue_->key());
    Deadlocks::instance().answer_by(*control_, [messages = std::weak_ptr(messages_)] {
        try {
            if (const auto there = messages.lock()) there->serve();
        } catch (const Error&) {
            // without a thread, peers' messages end by their timeout
        }
    });
}

MessageWorkPtr TcpCommunicator::post(const PeerMessage& message, double timeout, bool waits) {
    check_usable();
    queue_->check_outside();
    if (message.peer != PeerMessage::any_rank) check_rank(message.peer, size());
    if (!messages_) return Communicator::post(message, timeout, waits);
    return messages_->start(message, timeout);
}

void TcpCommunicator::leave() {
    if (destroyed_.exchange(true, std::memory_order_acq_rel)) return;
    control_->leave();
    leaders_->stop();
    if (messages_) messages_->close();
    if (carriers_.between) carriers_.between->close();
    control_->share_poison({});
    if (carriers_.within) carriers_.within->destroy();
    carriers_.memory.reset();
    close_control();
}

}  // namespace alltoallv
