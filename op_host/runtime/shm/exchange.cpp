// Data movement: announce, agree, then one copy per non-empty pair on the path that the two rows determine.
#include <algorithm>
#include <cstring>
#include <ctime>
#include <optional>

#include "runtime/shm/shm_communicator.h"

namespace alltoallv {
namespace {

/// Bytes from which a rank with its own processor sends directly into its peers' outputs.
constexpr size_t pushed_from = 4096;

/// Bytes up to which two copies may be faster than the kernel's one.
constexpr size_t copied_twice = size_t{1} << 20;

/// Bytes from which stores that pass the caches may be faster than others; who reads what has passed them waits for it,
/// and with fewer bytes that takes longer than the stores have saved.
constexpr size_t maybe_streamed = size_t{8} << 20;

/// Measures the time between `go_on` and `pause`, if it is on. Where ranks share processors it is this thread's own:
/// the time of the others' slices says nothing about a way.
class Stopwatch {
  public:
    Stopwatch(bool runs, bool has_room) : runs_(runs), clock_(has_room ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID) {
        go_on();
    }

    void go_on() {
        if (runs_) since_ = now();
    }
    void pause() {
        if (runs_) total_ += now() - since_;
    }
    double nanoseconds() {
        pause();
        return total_;
    }

  private:
    double now() const {
        timespec time{};
        clock_gettime(clock_, &time);
        return 1e9 * static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec);
    }

    bool runs_;
    clockid_t clock_;
    double since_ = 0, total_ = 0;
};

}  // namespace

/// One exchange once all ranks have agreed on it: where its data lie, and what is left to wait for.
struct ShmCommunicator::Movement {
    Movement(const Exchange& exchange, RowWords& words, uint64_t number)
        : x(exchange),
          own_words(words),
          seq(number),
          element(size_of(x.dtype)),
          unit(x.byte_displs ? 1 : static_cast<int64_t>(element)),
          input(static_cast<const char*>(x.input)),
          output(static_cast<char*>(x.output)),
          recv_counts(x.recv_counts),
          rdispls(x.rdispls),
          output_unit(unit) {}

    StridedRegion source(int to) const {
        const auto i = static_cast<size_t>(to);
        return region_of(input + x.sdispls[i] * unit, static_cast<int64_t>(element), x.send_steps, i);
    }
    StridedRegion target(int from) const {
        const auto i = static_cast<size_t>(from);
        return region_of(output + rdispls[i] * output_unit, static_cast<int64_t>(element), x.recv_steps, i);
    }

    const Exchange& x;
    RowWords& own_words;
    const uint64_t seq;
    const size_t element;
    const int64_t unit;  // bytes of a displacement
    const char* const input;
    char* output;
    std::span<const int64_t> recv_counts, rdispls;
    int64_t output_unit;
    Stores stores = Stores::ordinary;  // of copies into private memory and into shared memory that is an output
    uint64_t moved = 0;
    bool touched = false, awaits = false;  // this rank uses a peer's memory, or a peer uses its memory
    bool is_read = false;                  // by system calls
};

/// By which of two ways an exchange goes where both can do it.
struct ShmCommunicator::Ways {
    bool ring = false, at_once = false;  // between two ranks: through the ring, or from memory to memory
    bool avoids_reads = false;           // private memory: two copies, not a system call
    bool streams = false;                // stores pass the caches
    // What is timed, if anything.
    AlgorithmSelector* selector = nullptr;
    size_t bytes = 0;
    AlgorithmSelector::Way way = AlgorithmSelector::usual;
};

/// Returns where the data lie, as the row will have it.
RowWords ShmCommunicator::locate(const Exchange& x, const ExchangeSummary& all) {
    RowWords own_words;
    own_words.input = Arena::instance().locate(x.input, all.input_extent);
    if (x.recv_counts.empty()) {
        own_words.flags |= row_learns;
    } else {
        own_words.output = announce_output(x.output, all.output_extent);
    }
    if (is_strided(x)) own_words.flags |= row_strided;
    return own_words;
}

/// Fills the row except for its pairs.
void ShmCommunicator::fill_row(const Exchange& x, const ExchangeSummary& all, const Ways& ways, RowWords& own_words,
                               OwnRow& row) {
    if (ways.avoids_reads) own_words.flags |= row_avoids_reads;
    if (!x.moves)
        own_words.flags |= row_moves_nothing;
    else if (ways.ring)
        own_words.flags |= row_in_ring;
    else if (!ways.at_once && allows(Path::inlined) && all.to_peers <= inline_capacity(own_words, ways))
        own_words.flags |= row_inline;
    else if (own_words.output.segment() != 0)
        give(own_words.output, x.recv_counts);
    else if (!x.recv_counts.empty())  // peers' outputs are assumed to be like this one
        give(own_words.input, x.send_counts);
    row.flags = own_words.flags;
    row.balance = all.balance;
    row.root = x.root;
    row.terms = x.terms;
    row.count = x.row;
    row.input = own_words.input;
    row.output = own_words.output;
}

/// Fills the pairs, and copies data that travel with the row into the mailbox or the ring: peers that get the same
/// region (all_gather) share one copy. A pair that is unchanged since the row's last operator is not written, so it
/// stays in its reader's cache.
void ShmCommunicator::fill_pairs(const Exchange& x, uint8_t flags, OwnRow& row) {
    const auto element = static_cast<int64_t>(size_of(x.dtype));
    const int64_t unit = x.byte_displs ? 1 : element;
    const bool learns = (flags & row_learns) != 0, inlined = (flags & row_inline) != 0;
    const bool in_ring = (flags & row_in_ring) != 0, strided = (flags & row_strided) != 0;
    char* const payload = control_->payload(row);
    Pair* const pairs = row.pairs();
    int64_t used = 0;
    Pair last{0, -1, 0, 0};  // as in the input
    Steps last_steps{};
    int64_t last_offset = 0;
    for (int j = 0; j < size(); ++j) {
        const auto i = static_cast<size_t>(j);
        Pair pair{x.send_counts[i], x.sdispls[i] * unit, learns ? 0 : x.recv_counts[i],
                  learns ? 0 : x.rdispls[i] * unit};
        const StridedRegion data = region_of(static_cast<const char*>(x.input) + pair.source, element, x.send_steps, i);
        if (strided) {
            const auto in_bytes = [&](std::span<const Steps> all) {
                return all.empty() ? Steps{} : Steps{all[i].row * element, all[i].stride * element};
            };
            control_->steps(row)[j] = {in_bytes(x.send_steps), in_bytes(x.recv_steps)};
        }
        if (inlined && j != rank() && pair.send_count > 0) {
            const Steps steps{static_cast<int64_t>(data.row), static_cast<int64_t>(data.stride)};
            if (pair.source != last.source || pair.send_count != last.send_count || steps != last_steps) {
                const auto bytes = static_cast<size_t>(pair.send_count * element);
                if (data.run() >= bytes)
                    std::memcpy(payload + used, data.at, bytes);
                else
                    copy_region({payload + used}, data, bytes);
                last_offset = used;
                used += static_cast<int64_t>(bytes);
            }
            last = pair;
            last_steps = steps;
            pair.source = last_offset;
        }
        if (in_ring && j != rank()) put_into_ring(data, static_cast<size_t>(pair.send_count * element));
        if (pairs[j] != pair) pairs[j] = pair;
    }
}

Location ShmCommunicator::announce_output(const void* output, size_t bytes) {
    const Location location = Arena::instance().locate(output, bytes);
    if (location.segment() == 0) return location;
    output_ = output;
    output_bytes_ = bytes;
    return location;
}

/// Call it before a row names memory that peers map: sends them its segment, so that it has come to them before the
/// row. `counts`: of these data by rank, empty if every rank has some.
Location ShmCommunicator::give(Location location, std::span<const int64_t> counts) {
    const uint32_t segment = location.segment();
    uint32_t& given = given_[segment % given_.size()];
    if (segment == 0 || given == segment) return location;
    given = segment;
    for (int j = 0; j < size(); ++j)
        if (counts.empty() || counts[static_cast<size_t>(j)] > 0) links_->give_segment(j, segment);
    return location;
}

ShmCommunicator::Ways ShmCommunicator::choose_ways(const Exchange& x, const ExchangeSummary& all,
                                                   const RowWords& own_words) {
    using Selector = AlgorithmSelector;
    const bool learns = (own_words.flags & row_learns) != 0, is_private = own_words.output.segment() == 0;
    Ways ways;
    ways.avoids_reads = reads_refused_;
    ways.streams = exceeds_cache(all.read + all.written);
    if (learns || !x.moves) return ways;
    const bool rings = fits_ring(all.to_peers);
    const auto choose = [&](Selector& selector, size_t bytes, bool expected) {
        const auto choice = selector.choose(bytes, expected ? Selector::other : Selector::usual);
        if (choice.timed) ways.selector = &selector, ways.bytes = bytes, ways.way = choice.way;
        return choice.way == Selector::other;
    };
    const bool read_at_once = own_words.input.segment() != 0 || (allows(Path::cma) && !reads_refused_);
    if (rings) {  // the peer's output is assumed to be like this one
        const bool only = is_private && (is_strided(x) || !read_at_once);
        const bool times = chooses_ && control_->has_room();
        ways.ring = only || !times ? is_private : choose(rings_[is_private], all.to_peers, is_private);
        ways.at_once = times && !ways.ring;
    } else if (is_private && !is_strided(x) && read_at_once && chooses_ && all.from_peers > 4 * options_.inline_bytes &&
               all.from_peers <= copied_twice && !ways.streams) {
        ways.avoids_reads = choose(reads_, all.from_peers, false);
    } else if (chooses_ && !is_private && all.written >= maybe_streamed) {
        ways.streams = choose(streams_, all.written, ways.streams);
    }
    return ways;
}

/// Returns the mailbox bytes to use. If every rank has a processor, a second look at the peers costs less than a second
/// copy, from a few KiB on. Into private memory the alternatives are a system call per pair or a ring: then the mailbox
/// is better up to larger sizes, if ranks share processors even where a ring is.
size_t ShmCommunicator::inline_capacity(const RowWords& own_words, const Ways& ways) const {
    if (!chooses_ || (own_words.flags & row_learns) != 0) return options_.inline_bytes;
    const bool has_room = control_->has_room();
    if (own_words.output.segment() != 0)  // peers' outputs are assumed to be like this one
        return has_room ? std::min(options_.inline_bytes, pushed_from) : options_.inline_bytes;
    return has_room || !ways.avoids_reads ? 4 * options_.inline_bytes : control_->layout().inline_bytes();
}

/// After agreement, a rank that learns its counts allocates its output and informs the ranks that write into it.
/// Returns the bytes.
size_t ShmCommunicator::learn_counts(Movement& m, OwnRow& row) {
    learnt_ = control_->counts_from_peers(m.x.dtype);
    targets_.clear();
    size_t bytes = 0;
    for (int j = 0; j < size(); ++j) {
        targets_.push_back(static_cast<int64_t>(bytes));
        write_once(row.pairs()[j].recv_count, learnt_[static_cast<size_t>(j)]);
        write_once(row.pairs()[j].target, targets_.back());
        bytes += static_cast<size_t>(learnt_[static_cast<size_t>(j)]) * m.element;
    }
    m.output = static_cast<char*>(m.x.allocate(learnt_));
    m.recv_counts = learnt_;
    m.rdispls = targets_;
    m.output_unit = 1;
    m.own_words.output = give(announce_output(m.output, bytes), learnt_);
    write_once(row.shared->output, m.own_words.output);
    control_->signal(control_->my_flags().late, control_->seq());
    return bytes;
}

Path ShmCommunicator::path_of(const RowWords& sender, const RowWords& receiver) const {
    if (sender.flags & row_inline) return Path::inlined;
    if (sender.flags & row_in_ring) return Path::staged;
    if (receiver.output.segment() != 0 && allows(Path::push)) return Path::push;
    if (sender.input.segment() != 0 && allows(Path::pull)) return Path::pull;
    // If the input is in the arena, the row has no address to read from.
    const bool reads = allows(Path::cma) && sender.input.segment() == 0 && (receiver.flags & row_avoids_reads) == 0 &&
                       ((sender.flags | receiver.flags) & row_strided) == 0;
    return reads ? Path::cma : Path::staged;
}

// Reads nothing from this rank's own row, because a broken peer may have changed it.
uint64_t ShmCommunicator::exchange_in_turn(const Exchange& x, OwnRow& row) {
    std::optional<ExchangeSummary> computed;
    const ExchangeSummary& all = x.summary != nullptr ? *x.summary : computed.emplace(summarize(x, rank()));
    RowWords own_words = locate(x, all);
    const Ways ways = choose_ways(x, all, own_words);
    fill_row(x, all, ways, own_words, row);
    Stopwatch watch(ways.selector != nullptr, control_->has_room());
    fill_pairs(x, own_words.flags, row);
    watch.pause();
    control_->publish();
    control_->agree();
    if ((own_words.flags & row_in_ring) != 0) settle_ring();
    const bool learns = (own_words.flags & row_learns) != 0;
    if (!x.moves) {
        if (learns) x.allocate(control_->counts_from_peers(x.dtype));
        return 0;
    }
    watch.go_on();

    moving_ = true;
    Movement m(x, own_words, control_->seq());
    if (learns ? exceeds_cache(all.read + learn_counts(m, row)) : ways.streams) m.stores = Stores::streaming;
    std::ranges::fill(pending_peers_, uint8_t{0});
    copies_.clear();
    outgoing_.clear();
    incoming_.clear();
    lent_.clear();
    keep_own(m);
    // Step k pairs every rank with another receiver, so that the ranks do not all write one output at the same time.
    for (int k = 1; k < size(); ++k) {
        send_to(m, rank() + k < size() ? rank() + k : rank() + k - size());  // divisions would take longer
        receive_from(m, rank() >= k ? rank() - k : rank() - k + size());
    }
    copy_rows_in_turn();
    finish(m);
    if (ways.selector != nullptr) ways.selector->note(ways.bytes, ways.way, watch.nanoseconds());
    if (m.is_read) promoter_.note(m.input, all.input_extent);
    return m.moved;
}

void ShmCommunicator::keep_own(Movement& m) {
    const int64_t n = m.recv_counts[static_cast<size_t>(rank())];
    if (n == 0) return;
    check_counts(rank(), rank(), m.x.send_counts[static_cast<size_t>(rank())], n);
    const size_t bytes = static_cast<size_t>(n) * m.element;
    copy_checked(m.target(rank()), m.source(rank()), bytes, m.stores);
    count(Path::self, bytes);
    m.moved += bytes;
}

/// Writes into the receiver's output, or begins what the receiver takes part in.
void ShmCommunicator::send_to(Movement& m, int to) {
    const int64_t n = m.x.send_counts[static_cast<size_t>(to)];
    if (n == 0 || (m.own_words.flags & (row_inline | row_in_ring)) != 0) return;  // the others went with the row
    if (read_once(control_->row(to).flags) & row_learns) await_late(to, m.seq);
    const RowWords receiver(control_->row(to), rank());
    check_counts(rank(), to, n, receiver.pair.recv_count);
    const size_t bytes = static_cast<size_t>(n) * m.element;
    const Stream stream{to, &control_->ring(rank(), to), m.source(to), bytes};
    const Path path = path_of(m.own_words, receiver);
    if (path == Path::push) {
        StridedRegion target;
        if ((receiver.flags & row_strided) != 0)
            target = strided(to, control_->steps(control_->row(to))[rank()].target, bytes);
        target.at =
            address_of(to, &Row::output, receiver.output, receiver.pair.target, target.extent(bytes), m.x.send_counts);
        copy_checked(target, m.source(to), bytes, m.stores);
        count(path, bytes);
        m.touched = true;
    } else if (path == Path::staged) {
        outgoing_.push_back(stream);
    } else {  // the receiver reads this rank's input
        pending_peers_[static_cast<size_t>(to)] = 1;
        m.awaits = true;
        if (path == Path::cma) {
            m.is_read = true;
            lent_.push_back(stream);
        }
    }
}

/// Takes what the sender has announced, or begins what the sender takes part in.
void ShmCommunicator::receive_from(Movement& m, int from) {
    const int64_t n = m.recv_counts[static_cast<size_t>(from)];
    if (n == 0) return;
    const RowWords sender(control_->row(from), rank());
    check_counts(from, rank(), sender.pair.send_count, n);
    const size_t bytes = static_cast<size_t>(n) * m.element;
    const int64_t source = sender.pair.source;
    const StridedRegion target = m.target(from);
    const Stream stream{from, &control_->ring(from, rank()), target, bytes};
    Path path = path_of(sender, m.own_words);
    m.moved += bytes;
    switch (path) {
        case Path::inlined:
            copy_region(target, {const_cast<char*>(control_->payload_of(from, source, bytes))}, bytes);
            break;
        case Path::pull: {
            StridedRegion data;
            if ((sender.flags & row_strided) != 0)
                data = strided(from, control_->steps(control_->row(from))[rank()].source, bytes);
            data.at = address_of(from, &Row::input, sender.input, source, data.extent(bytes), m.recv_counts);
            copy_checked(target, data, bytes, m.stores);
            m.touched = true;
            break;
        }
        case Path::cma:
            m.touched = true;
            if (read_peer(from, target.at, sender.input.offset() + static_cast<uint64_t>(source), bytes)) break;
            reads_refused_ = true;
            path = Path::staged;
            incoming_.push_back(stream);
            control_->signal(stream.ring->wanted, m.seq);
            break;
        case Path::staged:
            if ((sender.flags & row_in_ring) == 0)
                incoming_.push_back(stream);
            else if (fits_ring(bytes))
                take_from_ring(bytes, [&](const char* data) { copy_region(target, {const_cast<char*>(data)}, bytes); });
            else
                throw control_->broken(from, "its data do not fit the ring");
            break;
        default:  // the sender writes into this rank's output, and counts the bytes
            pending_peers_[static_cast<size_t>(from)] = 1;
            m.awaits = true;
            return;
    }
    count(path, bytes);
}

/// Moves what goes through rings, says that this rank no longer touches its peers' memory, and waits until no peer
/// touches its own (DONE in row_protocol.pml).
void ShmCommunicator::finish(Movement& m) {
    if (!outgoing_.empty() || !incoming_.empty()) run_staged();
    if (m.touched) {
        control_->throw_if_poisoned();  // the data may have been read from the memory of a dead call
        control_->signal(control_->my_flags().done, m.seq);
    }
    while (m.awaits) {
        control_->wait_ranks([&](int j) {
            const auto asks = [&](const Stream& stream) {
                return stream.peer == j && stream.ring->wanted.value.load(std::memory_order_acquire) == m.seq;
            };
            return pending_peers_[static_cast<size_t>(j)] == 0 ||
                   control_->flags(j).done.value.load(std::memory_order_acquire) >= m.seq ||
                   std::ranges::any_of(lent_, asks);
        });
        m.awaits = serve_refused();
        if (m.awaits) run_staged();
    }
}

void ShmCommunicator::await_late(int peer, uint64_t seq) {
    control_->wait_flags([](Flags& flags) -> Flag& { return flags.late; }, seq, [&](int j) { return j == peer; });
}

/// Returns how a region of that many bytes lies that a peer has announced, without its place; throws unless it can.
StridedRegion ShmCommunicator::strided(int peer, const Steps& steps, size_t bytes) const {
    const int64_t row = read_once(steps.row), stride = read_once(steps.stride);
    if (row == 0) return {};
    size_t extent = 0;
    if (row < 0 || stride < row || __builtin_mul_overflow(static_cast<size_t>(stride), (bytes - 1) / row, &extent) ||
        extent > Location::offset_mask)
        throw control_->broken(peer, "its rows do not fit into memory");
    return {nullptr, static_cast<size_t>(row), static_cast<size_t>(stride)};
}

/// Returns the address of memory that a peer has announced at `where`; throws unless it lies in a segment of that peer.
/// With a segment that is not mapped yet the segments of all peers are requested with which this rank shares data, so
/// that it waits once; `counts`: of these data by rank, empty if every rank has some.
char* ShmCommunicator::address_of(int peer, Location Row::* where, Location location, int64_t displacement,
                                  size_t bytes, std::span<const int64_t> counts) {
    ShmPeer& state = peers_[static_cast<size_t>(peer)];
    const uint64_t offset = location.offset() + static_cast<uint64_t>(displacement);
    char* address = nullptr;
    if (state.same_process) {
        address = Arena::instance().address(location.segment(), offset, bytes);
    } else {
        const Mapping* segment = state.segments.find(location.segment());
        if (segment == nullptr) {
            links_->take(peer);
            segment = state.segments.find(location.segment());
        }
        if (segment == nullptr) {
            for (int j = 0; j < size(); ++j) {
                const ShmPeer& other = peers_[static_cast<size_t>(j)];
                if (j == rank() || other.same_process || (!counts.empty() && counts[static_cast<size_t>(j)] <= 0))
                    continue;
                const Location theirs = j == peer ? location : read_once(control_->row(j).*where);
                if (theirs.segment() != 0 && !other.segments.holds(theirs.segment()))
                    links_->request_segment(j, theirs.segment());
            }
            control_->wait([&] { return (segment = state.segments.find(location.segment())) != nullptr; },
                           [&] { return std::vector<int>{peer}; }, false);
        }
        address = segment->at(offset, bytes);
        if (address != nullptr) segment->populate(offset, bytes);
    }
    if (address == nullptr) throw control_->broken(peer, "it names memory that it has not given");
    return address;
}

}  // namespace alltoallv
