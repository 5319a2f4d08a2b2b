#include "runtime/shm/shm_communicator.h"

#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include "runtime/base/abandon.h"
#include "runtime/base/processors.h"
#include "runtime/base/release.h"
#include "runtime/base/resources.h"
#include "runtime/base/spare_descriptors.h"
#include "runtime/control/liveness.h"

namespace alltoallv {
namespace {

/// Most threads of a rank that copy: a few fill the memory's bandwidth.
constexpr int most_copy_threads = 4;

constexpr uint64_t probe_pattern = 0x616c6c746f616c6c;

unsigned allowed_paths(const std::string& path) {
    unsigned allowed = 1u << static_cast<unsigned>(Path::self) | 1u << static_cast<unsigned>(Path::staged);
    bool is_known = path == "auto";
    for (size_t i = 1; i < path_names.size(); ++i) {
        if (path != "auto" && path != path_names[i]) continue;
        allowed |= 1u << i;
        is_known = true;
    }
    if (!is_known)
        throw invalid_param(1113, "ALLTOALLV_PATH is '" + path + "', expected auto, inline, push, pull, cma or staged");
    return allowed;
}

/// If Yama restricts ptrace to ancestors, a process must allow its peers to read it. That lets every process of this
/// user read it, so it is done only on request.
void allow_peers_to_read() {
    const char* wanted = std::getenv("ALLTOALLV_ALLOW_PTRACE");
    if (wanted != nullptr && std::string(wanted) == "1") (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

}  // namespace

CommunicatorPtr make_shm_communicator(const CommunicatorOptions& options) {
    return make_communicator<ShmCommunicator>(options);
}

CommunicatorPtr make_shm_part(const CommunicatorOptions& options, const std::function<void()>& look) {
    return make_communicator<ShmCommunicator>(options, look);
}

ShmCommunicator::ShmCommunicator(const CommunicatorOptions& options, const std::function<void()>& look)
    : ControlledCommunicator(options),
      chooses_(options.path == "auto"),
      allowed_(allowed_paths(options.path)),
      probe_word_(probe_pattern) {
    check_rank(options.rank, options.size);
    if (options.copy_threads < 0)
        throw invalid_param(1114,
                            "copy_threads is " + std::to_string(options.copy_threads) + ", expected at least 1, or 0");
    Arena::instance().add_budget(options.budget_bytes());
    const auto give_up = [&](const Error& error) {
        if (control_) control_->poison_with(error, "joining");
        if (links_) links_->stop();
        Arena::instance().remove_budget(options.budget_bytes());
    };
    try {
        connect(look);
    } catch (const Error& error) {
        give_up(error);
        throw;
    } catch (const std::bad_alloc&) {
        const Error error = resource_error(5025, "no memory for what domain '" + domain() + "' needs");
        give_up(error);
        throw error;
    } catch (...) {
        give_up(peer_lost(4039, "interrupted"));
        throw;
    }
}

ShmCommunicator::~ShmCommunicator() {
    if (is_inherited()) {
        abandon(std::move(links_));
        abandon(std::move(queue_));
        abandon(std::move(messages_));
        abandon(std::move(copy_threads_));
        return;
    }
    destroy_quietly();
    queue_.reset();
}

void ShmCommunicator::connect(const std::function<void()>& look) {
    const Layout layout(size(), options_.mailbox_bytes());
    BootstrapOptions bootstrap;
    bootstrap.job = options_.job;
    bootstrap.secret = options_.secret;
    bootstrap.domain = options_.domain;
    bootstrap.rank = rank();
    bootstrap.size = size();
    bootstrap.timeout = options_.join_timeout < 0 ? options_.timeout : options_.join_timeout;
    bootstrap.warn_after = options_.warn_after;
    bootstrap.cure = options_.cure;
    bootstrap.settings = "path=" + options_.path + ";inline_bytes=" + std::to_string(options_.inline_bytes) +
                         ";check=" + (options_.check ? "always" : "off") + ";release=" + release();
    bootstrap.control_bytes = layout.total();
    bootstrap.names = options_.names;
    bootstrap.poll = [&, alive = Liveness::poll(options_)] {
        if (look) look();
        alive();
    };
    std::optional<SpareDescriptors::Lent> lent(std::in_place);  // a process without any joins with these
    Membership membership = options_.threads ? bootstrap_threads(bootstrap) : bootstrap_processes(bootstrap);
    lent.reset();

    peers_.resize(static_cast<size_t>(size()));
    for (size_t j = 0; j < peers_.size(); ++j) peers_[j].pid = membership.peers[j].pid;
    control_ = std::make_unique<ControlPlane>(options_, options_.mailbox_bytes(), std::move(membership.memory));
    LinkEvents events;
    events.lost = [this](int peer, const std::string& how) {
        if (!control_->has_left(peer)) control_->lost(peer, how);
    };
    events.poisoned = [this] { control_->acknowledge_if_idle(); };
    events.answered = [this] {
        control_->ring();
        Doorbell(control_->my_flags().messages).ring();
    };
    links_ = Links::make(std::move(membership.peers), std::move(events));
    control_->on_poison = [links = std::weak_ptr(links_)] {
        if (const auto alive = links.lock()) alive->announce_poison();
    };
    links_->watch();
    probe_peers();
    cache_share_ = last_level_cache_bytes(control_->cpus()) / static_cast<size_t>(size());
    processors_ = control_->processors();
    const int shares =
        options_.copy_threads > 0 ? options_.copy_threads : std::min(processors_ / size(), most_copy_threads);
    if (shares > 1) copy_threads_ = std::make_unique<CopyThreads>(static_cast<size_t>(shares - 1));
    messages_ = std::make_shared<PointToPoint>(
        *control_, links_, peers_, PointToPoint::Ways{allows(Path::pull), allows(Path::cma)}, queue_->key());
    pending_peers_.resize(peers_.size());
    outgoing_.reserve(peers_.size());
    incoming_.reserve(peers_.size());
}

/// Introduces this rank to its peers and finds out if process_vm_readv works between all of them.
void ShmCommunicator::probe_peers() {
    allow_peers_to_read();
    RankStatus& own_status = control_->status(rank());
    own_status.process.store(Arena::instance().process(), std::memory_order_relaxed);
    own_status.probe.store(reinterpret_cast<uint64_t>(&probe_word_), std::memory_order_relaxed);
    control_->enter_state(RankState::joined);
    bool reads_all = true;
    for (int j = 0; j < size(); ++j) {
        ShmPeer& peer = peers_[static_cast<size_t>(j)];
        const RankStatus& status = control_->status(j);
        const uint64_t process = status.process.load(std::memory_order_relaxed);
        peer.same_process = peer.pid == getpid() && process == Arena::instance().process();
        if (!peer.same_process) {
            const std::shared_ptr<PeerMemory> memory = PeerMemory::of(process);
            peer.segments = PeerSegments(memory);
            links_->set_memory(j, memory);
        }
        uint64_t word = 0;
        const uint64_t probe = status.probe.load(std::memory_order_relaxed);
        reads_all &= peer.read(&word, probe, sizeof word) == sizeof word && word == probe_pattern;
    }
    own_status.reads_all.store(reads_all ? 1 : 0, std::memory_order_relaxed);
    control_->enter_state(RankState::ready);
    for (int j = 0; j < size(); ++j)
        if (control_->status(j).reads_all.load(std::memory_order_relaxed) == 0)
            allowed_ &= ~(1u << static_cast<unsigned>(Path::cma));
    give(Location::in_segment(Arena::instance().first_segment(), 0), {});  // so that it is mapped before the first call
}

void ShmCommunicator::exchange(const Exchange& exchange, double timeout) {
    run(exchange.op, exchange.dtype, timeout, exchange.moves,
        [&](OwnRow& own_row) { return exchange_in_turn(exchange, own_row); });
}

void ShmCommunicator::reduce(const Reduction& reduction, double timeout) {
    run(reduction.op, reduction.dtype, timeout, reduction.moves,
        [&](OwnRow& own_row) { return reduce_in_turn(reduction, own_row); });
}

MessageWorkPtr ShmCommunicator::post(const PeerMessage& message, double timeout, bool waits) {
    check_usable();
    queue_->check_outside();
    const bool any = message.op == OpKind::recv && message.peer == PeerMessage::any_rank;
    if (!any) check_rank(message.peer, size());
    return messages_->start(message, timeout, waits);
}

void ShmCommunicator::leave() {
    if (destroyed_.exchange(true, std::memory_order_acq_rel)) return;
    messages_->close();
    control_->leave();
    links_->stop();
    copy_threads_.reset();
    for (ShmPeer& peer : peers_) peer.segments = {};
    close_control();
    Arena::instance().remove_budget(options_.budget_bytes());
}

void ShmCommunicator::begin_operator(double /*timeout*/) {
    output_ = nullptr;
    for (ShmPeer& peer : peers_) peer.segments.refresh();
    scratch_writer_.begin();
    codes_writer_.begin();
}

void ShmCommunicator::check_moved() const {
    if (output_ != nullptr && Arena::instance().has_cuts() &&
        Arena::instance().locate(output_, output_bytes_).segment() == 0)
        throw peer_lost(4040,
                        control_->describe_op() +
                            ": the output shares a page with the output of an operator which has failed meanwhile");
}

void ShmCommunicator::before_failure() {
    if (output_ != nullptr && control_->poisoned()) quarantine_output(output_, output_bytes_);
}

/// Peers that know the location of this rank's output may still write there: other processes are diverted to memory
/// that nobody uses, while threads of this process, which share its pages, are waited for.
void ShmCommunicator::quarantine_output(const void* data, size_t bytes) {
    await_threads();
    struct Watched {
        int rank;
        UniqueFd pidfd;
    };
    auto watched = std::make_shared<std::vector<Watched>>();
    for (int j = 0; j < size(); ++j)
        if (j != rank()) watched->push_back({j, links_->duplicate_pidfd(j)});
    const Layout layout = control_->layout();
    Arena::instance().quarantine(data, bytes, [watched, layout, memory = control_->memory()] {
        return std::all_of(watched->begin(), watched->end(), [&](const Watched& peer) {
            if (layout.status(memory->data(), peer.rank).acked.load(std::memory_order_acquire) != 0) return true;
            pollfd ended{peer.pidfd.get(), POLLIN, 0};
            return peer.pidfd && ::poll(&ended, 1, 0) == 1;
        });
    });
}

/// Waits until the ranks of this process that are in this operator have seen the poison. They check for it after each
/// piece of a copy, so they come to it as soon as they get a processor; only a signal handler that waits for this very
/// call could keep one from it, hence the limit. This rank, which copies nothing any more, says so first: another may
/// be waiting for it here.
void ShmCommunicator::await_threads() const {
    control_->status(rank()).acked.store(1, std::memory_order_release);
    const auto is_inside = [&](int j) {
        if (j == rank() || !peers_[static_cast<size_t>(j)].same_process) return false;
        return control_->is_in_operator(j) &&
               control_->flags(j).done.value.load(std::memory_order_acquire) < control_->seq() &&
               control_->row(j).pairs()[rank()].send_count > 0 &&
               control_->status(j).acked.load(std::memory_order_acquire) == 0;
    };
    const auto end = Clock::now() + thread_patience;
    for (int j = 0; j < size(); ++j)
        while (is_inside(j) && Clock::now() < end) sched_yield();
}

Stats ShmCommunicator::stats() const {
    Stats stats = Communicator::stats();
    for (size_t i = 0; i < path_names.size(); ++i)
        stats[std::string("bytes_") + path_names[i]] = bytes_by_path_[i].load(std::memory_order_relaxed);
    stats["cma_permitted"] = allows(Path::cma) ? 1 : 0;
    stats["segment_requests"] = links_->requests();
    stats["unrung_waits"] = Doorbell::unrung();
    stats["processors"] = static_cast<uint64_t>(processors_);
    const ArenaStats arena = Arena::instance().stats();
    stats["arena_segments"] = arena.segments;
    stats["arena_bytes"] = arena.segment_bytes;
    stats["arena_used_bytes"] = arena.used_bytes;
    stats["arena_quarantined_bytes"] = arena.quarantined_bytes;
    stats["arena_cut_bytes"] = arena.cut_bytes;
    stats["private_outputs"] = arena.private_blocks;
    stats["private_output_bytes"] = arena.private_bytes;
    return stats;
}

}  // namespace alltoallv
