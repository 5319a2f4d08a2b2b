// Exchanges between hosts: small ones travel with the rows, others within a host through shared memory and between
// hosts by the mover.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "runtime/control/peer_words.h"
#include "runtime/core/request.h"
#include "runtime/core/strided_region.h"
#include "runtime/hosts/tcp_communicator.h"

namespace alltoallv {
namespace {

constexpr double reason_in_time = 1.0;  // seconds until the reason of a loss must have come

size_t bytes_of(DType dtype, int64_t count) {
    return static_cast<size_t>(count) * size_of(dtype);
}

size_t place_of(const Exchange& x, int64_t displ) {
    return x.byte_displs ? static_cast<size_t>(displ) : bytes_of(x.dtype, displ);
}

}  // namespace

void TcpCommunicator::exchange(const Exchange& x, double timeout) {
    if (is_strided(x)) return exchange_packed(x, timeout);
    run(x.op, x.dtype, timeout, x.moves, [&](OwnRow& own_row) {
        fill_row(x, own_row);
        if (x.moves) pack(x, own_row);
        control_->publish();
        control_->agree();
        std::vector<int64_t> recvs(x.recv_counts.begin(), x.recv_counts.end());
        if (x.moves) return deliver(x, own_row, recvs);
        if (recvs.empty()) x.allocate(control_->counts_from_peers(x.dtype));
    });
}

/// Sends regions that lie in rows as they lie on the wire, in one piece each.
void TcpCommunicator::exchange_packed(const Exchange& x, double timeout) {
    const auto element = static_cast<int64_t>(size_of(x.dtype));
    struct Side {
        std::vector<int64_t> displs;
        std::unique_ptr<char[]> bytes;
    };
    const auto side = [&](std::span<const int64_t> counts) {
        Side made;
        made.displs.resize(counts.size());
        alltoallv::pack(counts, made.displs);
        const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
        made.bytes = std::make_unique_for_overwrite<char[]>(bytes_of(x.dtype, x.moves ? all : 0));
        return made;
    };
    const Side sent = side(x.send_counts), received = side(x.recv_counts);
    Exchange packed = x;
    packed.byte_displs = false;
    packed.summary = nullptr;
    packed.send_steps = packed.recv_steps = {};
    packed.input = sent.bytes.get();
    packed.sdispls = sent.displs;
    if (!x.recv_counts.empty()) packed.output = received.bytes.get();
    if (!x.recv_counts.empty()) packed.rdispls = received.displs;
    const auto input = [&](size_t j) {
        return region_of(static_cast<const char*>(x.input) + place_of(x, x.sdispls[j]), element, x.send_steps, j);
    };
    const auto output = [&](size_t j) {
        return region_of(static_cast<const char*>(x.output) + place_of(x, x.rdispls[j]), element, x.recv_steps, j);
    };
    for (size_t j = 0; x.moves && j < x.send_counts.size(); ++j)
        copy_region({sent.bytes.get() + sent.displs[j] * element}, input(j), bytes_of(x.dtype, x.send_counts[j]));
    exchange(packed, timeout);
    for (size_t j = 0; x.moves && j < x.recv_counts.size(); ++j)
        copy_region(output(j), {received.bytes.get() + received.displs[j] * element},
                    bytes_of(x.dtype, x.recv_counts[j]));
}

void TcpCommunicator::fill_row(const Exchange& x, OwnRow& own_row) {
    const bool learns = x.recv_counts.empty();
    for (int j = 0; j < size(); ++j) {
        const auto i = static_cast<size_t>(j);
        own_row.pairs()[j] = {x.send_counts[i], 0, learns ? 0 : x.recv_counts[i], 0};
    }
    own_row.balance = pair_balance(rank(), x.send_counts, x.recv_counts);
    own_row.root = x.root;
    own_row.terms = x.terms;
    own_row.count = x.row;
    if (learns) own_row.flags |= row_learns;
    if (!x.moves) own_row.flags |= row_moves_nothing;
}

/// Packs all data that this rank sends, if they are few: regions for several ranks once.
void TcpCommunicator::pack(const Exchange& x, OwnRow& own_row) {
    size_t used = 0;
    for (size_t j = 0; j < x.send_counts.size(); ++j) {
        Pair& pair = own_row.pairs()[j];
        const size_t bytes = bytes_of(x.dtype, x.send_counts[j]);
        if (j > 0 && x.send_counts[j] == x.send_counts[j - 1] && x.sdispls[j] == x.sdispls[j - 1]) {
            pair.source = own_row.pairs()[j - 1].source;
            continue;
        }
        if (used + bytes > tcp_payload_bytes) {
            if (carriers_.between) return;
            throw backend_unavailable(5022, "domain '", domain(), "' moves no more than ", tcp_payload_bytes,
                                      " bytes of a rank between hosts");
        }
        pair.source = static_cast<int64_t>(used);
        if (bytes > 0)
            std::memcpy(control_->payload(own_row) + used,
                        static_cast<const char*>(x.input) + place_of(x, x.sdispls[j]), bytes);
        used += bytes;
    }
    own_row.input.bits = used;
    own_row.flags |= row_inline;
}

void TcpCommunicator::deliver(const Exchange& x, const OwnRow& own_row, std::vector<int64_t>& recvs) {
    const bool learns = recvs.empty();
    auto* output = static_cast<char*>(x.output);
    // All ranks know how many send their data with their rows, so they decide alike.
    const uint32_t packed_ranks = control_->agreed().with_payload;
    const bool all_inline = packed_ranks == static_cast<uint32_t>(size()), none_inline = packed_ranks == 0;
    if (!all_inline) start_moving();
    if (learns) {
        recvs = control_->counts_from_peers(x.dtype);
        output = static_cast<char*>(x.allocate(recvs));
    }
    Pieces pieces(size());
    bool within = (own_row.flags & row_inline) == 0;
    size_t packed = 0;
    for (size_t j = 0; j < recvs.size(); ++j) {
        const size_t bytes = bytes_of(x.dtype, recvs[j]);
        char* const to = output + (learns ? packed : place_of(x, x.rdispls[j]));
        packed += bytes;
        const auto from = static_cast<int>(j);
        if (control_->has_brought(from)) {
            const RowWords sender(control_->row(from), rank());
            check_counts(from, rank(), sender.pair.send_count, recvs[j]);
            if ((sender.flags & row_inline) != 0) {
                if (bytes > 0) std::memcpy(to, control_->payload_of(from, sender.pair.source, bytes), bytes);
                continue;
            }
        } else if (all_inline && bytes > 0) {
            throw control_->broken(from, "it brings no data");
        }
        within |= on_this_host(from);
        pieces.in[j] = {to, bytes};
    }
    if (all_inline) return;
    if ((own_row.flags & row_inline) == 0)
        for (size_t j = 0; j < x.send_counts.size(); ++j)
            pieces.out[j] = {static_cast<const char*>(x.input) + place_of(x, x.sdispls[j]),
                             bytes_of(x.dtype, x.send_counts[j])};
    if (none_inline && (x.op == OpKind::all_gather || x.op == OpKind::all_gather_into_tensor))
        share(pieces);
    else
        move(pieces, within);
}

/// Uses displacements from the lowest address, because the pieces may be in several allocations.
void TcpCommunicator::move_within(const Pieces& pieces) {
    Request request(OpKind::all_to_all_v, static_cast<int>(carriers_.on_host.size()));
    const auto place = [this](const auto& by_rank, std::span<int64_t> counts, std::span<int64_t> displs) {
        decltype(by_rank[0].data()) lowest = nullptr;
        for (const int j : carriers_.on_host)
            if (const auto& piece = by_rank[static_cast<size_t>(j)];
                !piece.empty() && (!lowest || piece.data() < lowest))
                lowest = piece.data();
        for (size_t k = 0; k < counts.size(); ++k) {
            const auto& piece = by_rank[static_cast<size_t>(carriers_.on_host[k])];
            counts[k] = static_cast<int64_t>(piece.size());
            if (!piece.empty()) displs[k] = piece.data() - lowest;
        }
        return lowest;
    };
    const char* const input = place(pieces.out, request.send_counts(), request.sdispls());
    char* const output = place(pieces.in, request.recv_counts(), request.rdispls());
    carriers_.within->exchange(request.exchange(DType::uint8, input, output), timeout_);
}

/// Called before data move that do not travel with the rows: from here on the peers cannot continue without this rank.
void TcpCommunicator::start_moving() {
    if (!carriers_.between) throw backend_unavailable(5023, "domain '", domain(), "' moves no data between hosts");
    moving_ = true;
}

void TcpCommunicator::move(const Pieces& pieces, bool within) {
    std::vector<Outgoing> out;
    std::vector<Incoming> in;
    for (int j = 0; j < size(); ++j) {
        const auto from = pieces.out[static_cast<size_t>(j)];
        const auto to = pieces.in[static_cast<size_t>(j)];
        if (j == rank() || (carriers_.within && on_this_host(j))) continue;
        if (!from.empty()) out.push_back({j, from.data(), from.size()});
        if (!to.empty()) in.push_back({j, to.data(), to.size()});
    }
    const auto reasoned = [this](const auto& step) {
        try {
            return step();
        } catch (const Error& error) {
            // A peer that has closed its connection has told why on another one, whose news may come a little later.
            const auto end = after(error.kind() == ErrorClass::peer_lost ? reason_in_time : 0);
            while (!control_->poisoned() && Clock::now() < end) ::usleep(500);
            control_->throw_if_poisoned();
            throw;
        }
    };
    reasoned([&] {
        control_->throw_if_poisoned();  // MPI may crash in a rank that sends to one that has died
        carriers_.between->begin(out, in);
    });
    const auto me = static_cast<size_t>(rank());
    if (const auto own = pieces.in[me]; !carriers_.within && !own.empty())
        std::memcpy(own.data(), pieces.out[me].data(), own.size());
    if (carriers_.within && within) move_within(pieces);
    control_->wait_polling([&] { return reasoned([&] { return carriers_.between->progress(); }); },
                           [&] { return carriers_.between->missing(); });
}

/// Returns the rank of `host` (given by its first rank) that receives the data of rank `from` on another host.
int TcpCommunicator::takes_for(int host, int from) const {
    std::vector<int> ranks;
    size_t place = 0;
    for (int j = 0; j < size(); ++j) {
        if (first_on_host_[static_cast<size_t>(j)] == host) ranks.push_back(j);
        if (j < from && first_on_host_[static_cast<size_t>(j)] == first_on_host_[static_cast<size_t>(from)]) ++place;
    }
    return ranks[place % ranks.size()];
}

void TcpCommunicator::share(const Pieces& pieces) {
    const int here = first_on_host_[static_cast<size_t>(rank())];
    Pieces between(size()), within(size());
    // In every round, each rank of this host forwards one piece: first its own, then those that it receives.
    std::vector<std::vector<int>> taken(static_cast<size_t>(size()));
    size_t rounds = 1;
    for (int j = 0; j < size(); ++j) {
        const auto i = static_cast<size_t>(j);
        if (first_on_host_[i] == here) {
            Pieces& beside = carriers_.within ? within : between;
            beside.in[i] = pieces.in[i];
            beside.out[i] = pieces.out[i];
            continue;
        }
        if (takes_for(first_on_host_[i], rank()) == j) between.out[i] = pieces.out[i];
        const int taker = takes_for(here, j);
        taken[static_cast<size_t>(taker)].push_back(j);
        rounds = std::max(rounds, taken[static_cast<size_t>(taker)].size() + 1);
        if (taker == rank()) between.in[i] = pieces.in[i];
    }
    move(between, false);
    if (!carriers_.within) return;
    move_within(within);
    for (size_t round = 0; round + 1 < rounds; ++round) {
        Pieces handed(size());
        const auto forwarded_by = [&](int taker) {
            const std::vector<int>& list = taken[static_cast<size_t>(taker)];
            return round < list.size() ? pieces.in[static_cast<size_t>(list[round])] : std::span<char>();
        };
        for (const int j : carriers_.on_host) {
            if (j == rank()) continue;
            handed.out[static_cast<size_t>(j)] = forwarded_by(rank());
            handed.in[static_cast<size_t>(j)] = forwarded_by(j);
        }
        move_within(handed);
    }
}

std::vector<std::string> gather_texts(Communicator& communicator, const std::string& own_text) {
    const auto ranks = static_cast<size_t>(communicator.size());
    std::string all(ranks * own_text.size(), '\0');
    const Request request =
        gather_request(OpKind::all_gather, communicator.size(), static_cast<int64_t>(own_text.size()));
    communicator.exchange(request.exchange(DType::uint8, own_text.data(), all.data()), -1);
    std::vector<std::string> texts;
    for (size_t j = 0; j < ranks; ++j) texts.push_back(all.substr(j * own_text.size(), own_text.size()));
    return texts;
}

}  // namespace alltoallv
