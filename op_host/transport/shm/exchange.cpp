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

/// Elements that a rank reads, regions that several peers get counted once, and writes.
int64_t footprint(const Pair* pairs, int size) {
    int64_t total = 0;
    for (int j = 0; j < size; ++j) {
        const bool again = j > 0 && pairs[j].source == pairs[j - 1].source;
        total += (again ? 0 : pairs[j].send_count) + pairs[j].recv_count;
    }
    return total;
}

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

/// One past the last byte that the non-empty regions cover; displacements in elements, or where `in_bytes` in bytes.
size_t extent(std::span<const int64_t> counts, std::span<const int64_t> displs, size_t element, bool in_bytes) {
    const auto length = static_cast<int64_t>(element), unit = in_bytes ? 1 : length;
    int64_t end = 0;
    for (size_t j = 0; j < counts.size(); ++j)
        if (counts[j] > 0) end = std::max(end, displs[j] * unit + counts[j] * length);
    return static_cast<size_t>(end);
}

}  // namespace

void ShmCommunicator::fill_pairs(const Exchange& x, Row& mine) {
    const auto element = static_cast<int64_t>(size_of(x.dtype));
    const int64_t unit = x.byte_displs ? 1 : element;
    const bool learns = x.recv_counts.empty();
    Pair* pairs = mine.pairs();
    uint64_t sent = 0, expected = 0;
    for (int j = 0; j < size(); ++j) {
        const auto i = static_cast<size_t>(j);
        pairs[j] = {x.send_counts[i], x.sdispls[i] * unit, learns ? 0 : x.recv_counts[i],
                    learns ? 0 : x.rdispls[i] * unit};
        sent += pair_hash(rank(), j, x.send_counts[i]);
        if (!learns) expected += pair_hash(j, rank(), x.recv_counts[i]);
    }
    mine.send_digest = sent;
    mine.recv_digest = expected;
    mine.root = x.root;
    mine.count = x.row;
    mine.input = Arena::instance().locate(x.input, extent(x.send_counts, x.sdispls, size_of(x.dtype), x.byte_displs));
    if (learns) {
        mine.flags |= row_learns;
    } else {
        announce_output(x.output, extent(x.recv_counts, x.rdispls, size_of(x.dtype), x.byte_displs), mine);
    }
}

void ShmCommunicator::announce_output(const void* output, size_t bytes, Row& mine) {
    mine.output = Arena::instance().locate(output, bytes);
    if (mine.output.segment() == 0) return;
    output_ = output;
    output_bytes_ = bytes;
}

/// What this rank may read from the peers' private memory into its own, if two copies may be quicker; else 0.
size_t ShmCommunicator::contested_bytes(const Exchange& x, const Row& mine) const {
    if (options_.path != "auto" || !allows(Path::cma) || !x.moves) return 0;
    if ((mine.flags & row_learns) != 0 || mine.output.segment() != 0) return 0;
    int64_t count = 0;
    for (int j = 0; j < size(); ++j) count += j == rank() ? 0 : mine.pairs()[j].recv_count;
    const size_t bytes = static_cast<size_t>(count) * size_of(x.dtype);
    if (bytes <= 4 * options_.inline_bytes || bytes > copied_twice) return 0;
    return outgrows_caches(static_cast<size_t>(footprint(mine.pairs(), size())) * size_of(x.dtype)) ? 0 : bytes;
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
    for (int j = 0; j < size(); ++j) avoided |= (control_->row(j, control_->seq() - 1).flags & row_reads_not) != 0;
    return avoided ? control_->layout().inline_bytes() : 4 * options_.inline_bytes;
}

/// Small payloads travel with the row. Peers that get the same region (all_gather) share one copy of it.
void ShmCommunicator::pack_inline(const Exchange& x, Row& mine) {
    if (!allows(Path::inlined)) return;
    const size_t element = size_of(x.dtype);
    const size_t capacity = inline_capacity(mine);
    const auto same_as_previous = [&](const Pair& pair, const Pair* previous) {
        return previous != nullptr && previous->source == pair.source && previous->send_count == pair.send_count;
    };
    Pair* pairs = mine.pairs();
    size_t total = 0;
    const Pair* previous = nullptr;
    for (int j = 0; j < size(); ++j) {
        if (j == rank() || pairs[j].send_count == 0) continue;
        if (!same_as_previous(pairs[j], previous)) total += static_cast<size_t>(pairs[j].send_count) * element;
        if (total > capacity) return;
        previous = &pairs[j];
    }
    char* payload = control_->payload(mine);
    size_t used = 0;
    Pair last{0, -1, 0, 0};  // as in the input
    int64_t last_offset = 0;
    for (int j = 0; j < size(); ++j) {
        if (j == rank() || pairs[j].send_count == 0) continue;
        if (!same_as_previous(pairs[j], &last)) {
            const size_t bytes = static_cast<size_t>(pairs[j].send_count) * element;
            peer_writer_.copy(payload + used, static_cast<const char*>(x.input) + pairs[j].source, bytes);
            last_offset = static_cast<int64_t>(used);
            used += bytes;
        }
        last = pairs[j];
        pairs[j].source = last_offset;
    }
    mine.flags |= row_inline;
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
char* ShmCommunicator::learn_counts(const Exchange& x, Row& mine) {
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
    void* output = x.allocate(learnt_);
    announce_output(output, static_cast<size_t>(total * element), mine);
    control_->signal(control_->my_flags().late, control_->seq());
    return static_cast<char*>(output);
}

Path ShmCommunicator::path_of(const Row& sender, const Row& receiver) const {
    if (sender.flags & row_inline) return Path::inlined;
    if (receiver.output.segment() != 0 && allows(Path::push)) return Path::push;
    if (sender.input.segment() != 0 && allows(Path::pull)) return Path::pull;
    // The row of an input in the arena gives no address to read from.
    const bool reads = allows(Path::cma) && sender.input.segment() == 0 && (receiver.flags & row_reads_not) == 0;
    return reads ? Path::cma : Path::staged;
}

uint64_t ShmCommunicator::exchange_in_turn(const Exchange& x, Row& mine) {
    const size_t element = size_of(x.dtype);
    fill_pairs(x, mine);
    // Where ranks take turns their times mean nothing; two copies are quicker there.
    const size_t rather_not = contested_bytes(x, mine), contested = control_->has_room() ? rather_not : 0;
    if (contested > 0 ? reads_.choose(contested) == Contest::other : rather_not > 0) mine.flags |= row_reads_not;
    Stopwatch watch(contested > 0);
    if (x.moves) pack_inline(x, mine);
    watch.pause();
    control_->publish(mine);
    control_->agree();
    if (!x.moves) return tell_counts(x);
    watch.go_on();

    copying_ = true;
    const auto* input = static_cast<const char*>(x.input);
    char* output = (mine.flags & row_learns) != 0 ? learn_counts(x, mine) : static_cast<char*>(x.output);
    const Pair* pairs = mine.pairs();
    const uint64_t seq = control_->seq();
    uint64_t moved = 0;
    const bool outgrows = outgrows_caches(static_cast<size_t>(footprint(pairs, size())) * element);
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
    if (awaits)
        control_->wait_flags([](Flags& flags) -> Flag& { return flags.done; }, seq,
                             [&](int j) { return awaited_[static_cast<size_t>(j)] != 0; });
    if (contested > 0) reads_.note(contested, reads ? Contest::usual : Contest::other, watch.nanoseconds());
    if (is_read) read_inputs_.note(input, extent(x.send_counts, x.sdispls, element, x.byte_displs));
    return moved;
}

void ShmCommunicator::await_late(int peer, uint64_t seq) {
    control_->wait_flags([](Flags& flags) -> Flag& { return flags.late; }, seq, [&](int j) { return j == peer; });
}

char* ShmCommunicator::address_of(int peer, Location location) {
    PeerState& state = peers_[static_cast<size_t>(peer)];
    for (const auto& [segment, base] : state.segments)
        if (segment == location.segment()) return base + location.offset();
    char* base = nullptr;
    if (state.same_process) {
        base = Arena::instance().base(location.segment());
    } else {
        base = state.memory->base(location.segment());
        if (base == nullptr) {
            links_->request_segment(peer, location.segment());
            control_->wait([&] { return (base = state.memory->base(location.segment())) != nullptr; },
                           [&] { return std::vector<int>{peer}; });
        }
    }
    state.segments.emplace_back(location.segment(), base);
    return base + location.offset();
}

}  // namespace alltoallv
