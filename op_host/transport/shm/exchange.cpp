// Data movement: announce, agree, then one copy per non-empty pair along the path that the two rows determine.
#include <algorithm>
#include <cstring>

#include "transport/shm/shm_communicator.h"

namespace alltoallv {
namespace {

/// Bytes that a rank with a processor of its own sends straight into its peers' outputs.
constexpr size_t pushed_from = 4096;

/// Bytes up to which two copies may be quicker than the kernel's one.
constexpr size_t copied_twice = size_t{1} << 20;

/// Measures what lies between `go_on` and `pause`, if at all.
class Stopwatch {
  public:
    explicit Stopwatch(bool runs) : runs_(runs) { go_on(); }

    void go_on() {
        if (runs_) since_ = Clock::now();
    }
    void pause() {
        if (runs_) total_ += Clock::now() - since_;
    }
    double nanoseconds() {
        pause();
        return std::chrono::duration<double, std::nano>(total_).count();
    }

  private:
    bool runs_;
    Clock::time_point since_;
    Clock::duration total_{};
};

}  // namespace

/// What the row says beside its pairs.
void ShmCommunicator::fill_row(const Exchange& x, const ExchangeSummary& all, Row& mine) {
    mine.digests = all.digests;
    mine.root = x.root;
    mine.count = x.row;
    mine.input = Arena::instance().locate(x.input, all.input_extent);
    if (x.recv_counts.empty()) {
        mine.flags |= row_learns;
    } else {
        announce_output(x.output, all.output_extent, mine);
    }
    if (x.moves && allows(Path::inlined) && all.to_peers <= inline_capacity(mine)) mine.flags |= row_inline;
}

/// Says what goes where, and puts it into the mailbox if it travels with the row: peers that get the same region
/// (all_gather) share one copy. A pair that says so already, since the row's last operator, stays in its reader's
/// cache.
void ShmCommunicator::fill_pairs(const Exchange& x, Row& mine) {
    const auto element = static_cast<int64_t>(size_of(x.dtype));
    const int64_t unit = x.byte_displs ? 1 : element;
    const bool learns = (mine.flags & row_learns) != 0, inlined = (mine.flags & row_inline) != 0;
    char* const payload = control_->payload(mine);
    Pair* const pairs = mine.pairs();
    int64_t used = 0;
    Pair last{0, -1, 0, 0};  // as in the input
    int64_t last_offset = 0;
    for (int j = 0; j < size(); ++j) {
        const auto i = static_cast<size_t>(j);
        Pair pair{x.send_counts[i], x.sdispls[i] * unit, learns ? 0 : x.recv_counts[i],
                  learns ? 0 : x.rdispls[i] * unit};
        if (inlined && j != rank() && pair.send_count > 0) {
            if (pair.source != last.source || pair.send_count != last.send_count) {
                const int64_t bytes = pair.send_count * element;
                peer_writer_.copy(payload + used, static_cast<const char*>(x.input) + pair.source,
                                  static_cast<size_t>(bytes));
                last_offset = used;
                used += bytes;
            }
            last = pair;
            pair.source = last_offset;
        }
        if (pairs[j] != pair) pairs[j] = pair;
    }
}

void ShmCommunicator::announce_output(const void* output, size_t bytes, Row& mine) {
    mine.output = Arena::instance().locate(output, bytes);
    if (mine.output.segment() == 0) return;
    output_ = output;
    output_bytes_ = bytes;
}

/// What this rank may read from the peers' private memory into its own, if two copies may be quicker; else 0.
size_t ShmCommunicator::timed_bytes(const Exchange& x, const ExchangeSummary& all, const Row& mine) const {
    if (options_.path != "auto" || !allows(Path::cma) || !x.moves) return 0;
    if ((mine.flags & row_learns) != 0 || mine.output.segment() != 0) return 0;
    if (all.from_peers <= 4 * options_.inline_bytes || all.from_peers > copied_twice) return 0;
    return outgrows_caches(all.read + all.written) ? 0 : all.from_peers;
}

/// Where every rank has a processor, a second look at the peers costs less than a second copy, from a few KiB on. Into
/// private memory the alternatives are a system call per pair or a ring: the mailbox pays for longer, and longer still
/// for peers who would rather not read, and where ranks take turns on the processors.
size_t ShmCommunicator::inline_capacity(const Row& mine) const {
    if (options_.path != "auto" || (mine.flags & row_learns) != 0) return options_.inline_bytes;
    const bool has_room = control_->has_room();
    if (mine.output.segment() != 0)  // as the peers', supposedly
        return has_room ? std::min(options_.inline_bytes, pushed_from) : options_.inline_bytes;
    bool avoided = !has_room;  // by the rows of the last operator
    for (int j = 0; j < size(); ++j) avoided |= (control_->row(j, control_->seq() - 1).flags & row_avoids_reads) != 0;
    return avoided ? control_->layout().inline_bytes() : 4 * options_.inline_bytes;
}

/// After agreement, where no data move: the counts that the peers have announced.
uint64_t ShmCommunicator::tell_counts(const Exchange& x) {
    if (!x.recv_counts.empty()) return 0;
    learnt_.clear();
    for (int j = 0; j < size(); ++j) learnt_.push_back(control_->row(j).pairs()[rank()].send_count);
    x.allocate(learnt_);
    return 0;
}

/// After agreement a rank that learns its counts sizes its output and tells those who write into it.
char* ShmCommunicator::learn_counts(const Exchange& x, Row& mine, size_t& bytes) {
    learnt_.resize(static_cast<size_t>(size()));
    int64_t total = 0;
    const auto element = static_cast<int64_t>(size_of(x.dtype));
    for (int j = 0; j < size(); ++j) {
        const int64_t count = control_->row(j).pairs()[rank()].send_count;
        learnt_[static_cast<size_t>(j)] = count;
        mine.pairs()[j].recv_count = count;
        mine.pairs()[j].target = total * element;
        total += count;
    }
    bytes = static_cast<size_t>(total * element);
    void* output = x.allocate(learnt_);
    announce_output(output, bytes, mine);
    control_->signal(control_->my_flags().late, control_->seq());
    return static_cast<char*>(output);
}

Path ShmCommunicator::path_of(const Row& sender, const Row& receiver) const {
    if (sender.flags & row_inline) return Path::inlined;
    if (receiver.output.segment() != 0 && allows(Path::push)) return Path::push;
    if (sender.input.segment() != 0 && allows(Path::pull)) return Path::pull;
    // The row of an input in the arena gives no address to read from.
    const bool reads = allows(Path::cma) && sender.input.segment() == 0 && (receiver.flags & row_avoids_reads) == 0;
    return reads ? Path::cma : Path::staged;
}

uint64_t ShmCommunicator::exchange_in_turn(const Exchange& x, Row& mine) {
    const size_t element = size_of(x.dtype);
    const ExchangeSummary all = x.summary != nullptr ? *x.summary : summarize(x, rank());
    fill_row(x, all, mine);
    // Where ranks take turns their times mean nothing; two copies are quicker there.
    const size_t avoided_bytes = timed_bytes(x, all, mine), timed = control_->has_room() ? avoided_bytes : 0;
    if (timed > 0 ? reads_.choose(timed) == AlgorithmSelector::other : avoided_bytes > 0)
        mine.flags |= row_avoids_reads;
    Stopwatch watch(timed > 0);
    fill_pairs(x, mine);
    watch.pause();
    control_->publish(mine);
    control_->agree();
    if (!x.moves) return tell_counts(x);
    watch.go_on();

    copying_ = true;
    const auto* input = static_cast<const char*>(x.input);
    size_t written = all.written;
    char* output = (mine.flags & row_learns) != 0 ? learn_counts(x, mine, written) : static_cast<char*>(x.output);
    const Pair* pairs = mine.pairs();
    const uint64_t seq = control_->seq();
    uint64_t moved = 0;
    const bool outgrows = outgrows_caches(all.read + written);
    const Stores own = outgrows ? Stores::streaming : Stores::ordinary;

    if (const size_t bytes = static_cast<size_t>(pairs[rank()].recv_count) * element; bytes > 0) {
        copy_checked(output + pairs[rank()].target, input + pairs[rank()].source, bytes, own);
        count(Path::self, bytes);
        moved += bytes;
    }
    // I use a peer's memory, or a peer mine; by system calls.
    bool touched = false, awaits = false, reads = false, is_read = false;
    std::fill(awaited_.begin(), awaited_.end(), uint8_t{0});
    outgoing_.clear();
    incoming_.clear();
    // Step k pairs every rank with another receiver, so that no output is written by all at once.
    for (int k = 1; k < size(); ++k) {
        const int to = (rank() + k) % size(), from = (rank() - k + size()) % size();
        if (const size_t bytes = static_cast<size_t>(pairs[to].send_count) * element;
            bytes > 0 && (mine.flags & row_inline) == 0) {
            const Row& receiver = control_->row(to);
            if (receiver.flags & row_learns) await_late(to, seq);
            const char* source = input + pairs[to].source;
            const Path path = path_of(mine, receiver);
            switch (path) {
                case Path::push:
                    copy_checked(address_of(to, receiver.output) + receiver.pairs()[rank()].target, source, bytes,
                                 outgrows ? Stores::streaming : Stores::to_peer);
                    count(Path::push, bytes);
                    touched = true;
                    break;
                case Path::staged:
                    outgoing_.push_back({&control_->ring(rank(), to), const_cast<char*>(source), bytes});
                    break;
                default:  // the receiver reads my input
                    awaited_[static_cast<size_t>(to)] = 1;
                    awaits = true;
                    is_read |= path == Path::cma;
            }
        }
        if (const size_t bytes = static_cast<size_t>(pairs[from].recv_count) * element; bytes > 0) {
            Row& sender = control_->row(from);
            const int64_t source = sender.pairs()[rank()].source;
            char* target = output + pairs[from].target;
            const Path path = path_of(sender, mine);
            moved += bytes;
            switch (path) {
                case Path::inlined:
                    std::memcpy(target, control_->payload(sender) + source, bytes);
                    break;
                case Path::pull:
                    copy_checked(target, address_of(from, sender.input) + source, bytes, own);
                    touched = true;
                    break;
                case Path::cma:
                    read_peer(from, target, sender.input_address() + static_cast<uint64_t>(source), bytes);
                    touched = reads = true;
                    break;
                case Path::staged:
                    incoming_.push_back({&control_->ring(from, rank()), target, bytes});
                    break;
                default:  // the sender writes into my output, and counts the bytes
                    awaited_[static_cast<size_t>(from)] = 1;
                    awaits = true;
            }
            if (path != Path::push) count(path, bytes);
        }
    }
    if (!outgoing_.empty() || !incoming_.empty()) run_staged();
    if (touched) {
        control_->throw_if_poisoned();  // what was read may have been a dead call's memory
        control_->signal(control_->my_flags().done, seq);
    }
    if (awaits)  // DONE in row_protocol.pml
        control_->wait_flags([](Flags& flags) -> Flag& { return flags.done; }, seq,
                             [&](int j) { return awaited_[static_cast<size_t>(j)] != 0; });
    if (timed > 0) reads_.note(timed, reads ? AlgorithmSelector::usual : AlgorithmSelector::other, watch.nanoseconds());
    if (is_read) promoter_.note(input, all.input_extent);
    return moved;
}

void ShmCommunicator::await_late(int peer, uint64_t seq) {
    control_->wait_flags([](Flags& flags) -> Flag& { return flags.late; }, seq, [&](int j) { return j == peer; });
}

char* ShmCommunicator::address_of(int peer, Location location) {
    PeerState& state = peers_[static_cast<size_t>(peer)];
    if (state.same_process) return Arena::instance().base(location.segment()) + location.offset();
    char* base = state.segments.base(location.segment());
    if (base == nullptr) {
        links_->request_segment(peer, location.segment());
        control_->wait([&] { return (base = state.segments.base(location.segment())) != nullptr; },
                       [&] { return std::vector<int>{peer}; }, false);
    }
    return base + location.offset();
}

}  // namespace alltoallv
