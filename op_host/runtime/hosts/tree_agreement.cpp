#include "runtime/hosts/tree_agreement.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace alltoallv {
namespace {

template <class T>
std::string bytes_of(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <class T>
T value_of(const std::string& bytes) {
    T value;
    std::memcpy(static_cast<void*>(&value), bytes.data(), sizeof value);
    return value;
}

template <class T>
std::string bytes_of_all(const std::vector<T>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

template <class T>
std::vector<T> values_of(const std::string& bytes) {
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(static_cast<void*>(values.data()), bytes.data(), bytes.size());
    return values;
}

struct TwoFacts {
    RowFacts first, other;
};

/// Returns part `k` of a range.
TreeAgreement::Range part_of(const TreeAgreement::Range& whole, int64_t k) {
    const int64_t begin = std::min(whole.begin + k * whole.each(), whole.end);
    return {begin, std::min(begin + whole.each(), whole.end)};
}

}  // namespace

TreeAgreement::TreeAgreement(Host& host, size_t neighbours, int ranks, std::string domain)
    : host_(host), neighbours_(neighbours), ranks_(ranks), domain_(std::move(domain)) {
    search_.receivers = search_.senders = {0, ranks};
}

bool TreeAgreement::has_told(size_t neighbour, uint64_t seq) const {
    if (seq != next_) return seq < next_;
    const auto found = rounds_.find({seq, 0});
    return round_ > 0 || (found != rounds_.end() && (found->second.told >> neighbour & 1) != 0);
}

bool TreeAgreement::has_heard(size_t neighbour, uint64_t seq) const {
    if (seq != next_) return seq < next_;
    const auto found = rounds_.find({seq, 0});
    return round_ > 0 || (found != rounds_.end() && (found->second.heard >> neighbour & 1) != 0);
}

void TreeAgreement::publish(uint64_t seq) {
    if (seq != next_ || published_) return;
    published_ = true;
    start(Stage::summary);
}

bool TreeAgreement::hear(size_t neighbour, const Header& header, const char* body, size_t bytes) {
    if (header.seq < next_ || header.seq > next_ + 1 || !fits(header.stage, bytes)) return false;
    if ((header.stage == Stage::summary) != (header.round == 0)) return false;
    // A neighbour may be one round ahead: it needs this host's part of each.
    const uint16_t here = header.seq == next_ ? round_ : 0;
    if (header.round < here || header.round > here + 1) return false;
    Round& round = rounds_[{header.seq, header.round}];
    const uint64_t bit = uint64_t{1} << neighbour;
    if ((round.heard & bit) != 0 || (round.stage && *round.stage != header.stage)) return false;
    // The sum of all hosts has the part of this one, which its last neighbour has got once all others had told theirs.
    if (header.of_all != 0 && (round.told != bit || (round.heard | bit) != all())) return false;
    round.stage = header.stage;
    round.heard |= bit;
    const std::string told(body, bytes);
    if (header.of_all != 0)
        round.sum = told;
    else
        add(header.stage, round.sum, told);
    if (header.seq == next_) look(round, header.round);
    // The ranks here may go on once the others have been told.
    if (header.stage == Stage::summary) host_.heard(neighbour, header.seq, value_of<Summary>(told), header.of_all != 0);
    return true;
}

bool TreeAgreement::fits(Stage stage, size_t bytes) const {
    switch (stage) {
        case Stage::summary:
            return bytes == sizeof(Summary);
        case Stage::failure:
            return bytes == sizeof(FailedRow);
        case Stage::facts:
            return bytes == sizeof(TwoFacts);
        case Stage::learners:
            return bytes == (static_cast<size_t>(ranks_) + 7) / 8;
        case Stage::receivers:
        case Stage::senders:
            return bytes == static_cast<size_t>(ranges) * sizeof(Digest128);
        case Stage::pair:
            return bytes == sizeof(PairReport);
    }
    return false;
}

void TreeAgreement::add(Stage stage, std::string& sum, const std::string& more) {
    if (sum.empty()) {
        sum = more;
        return;
    }
    const auto added = [&]<class T>(T one) {
        one.add(value_of<T>(more));
        return bytes_of(one);
    };
    switch (stage) {
        case Stage::summary:
            sum = added(value_of<Summary>(sum));
            return;
        case Stage::failure:
            sum = added(value_of<FailedRow>(sum));
            return;
        case Stage::facts: {
            auto one = value_of<TwoFacts>(sum);
            const auto two = value_of<TwoFacts>(more);
            if (two.first.rank >= 0) one.first = two.first;
            if (two.other.rank >= 0) one.other = two.other;
            sum = bytes_of(one);
            return;
        }
        case Stage::learners:
            for (size_t i = 0; i < sum.size(); ++i) sum[i] = static_cast<char>(sum[i] | more[i]);
            return;
        case Stage::receivers:
        case Stage::senders: {
            std::vector<Digest128> sums = values_of<Digest128>(sum);
            const std::vector<Digest128> others = values_of<Digest128>(more);
            for (size_t i = 0; i < sums.size(); ++i) sums[i] += others[i];
            sum = bytes_of_all(sums);
            return;
        }
        case Stage::pair: {
            auto one = value_of<PairReport>(sum);
            const auto two = value_of<PairReport>(more);
            one.sent += two.sent;
            one.expected += two.expected;
            one.row += two.row;
            if (two.op != OpKind::none) one.op = two.op;
            sum = bytes_of(one);
            return;
        }
    }
}

/// Returns what the ranks of this host say.
std::string TreeAgreement::own(Stage stage) {
    switch (stage) {
        case Stage::summary:
            return bytes_of(host_.summary(next_));
        case Stage::failure:
            return bytes_of(host_.failure(next_, total_.called));
        case Stage::facts: {
            const Varied& ranks = total_.facts.other >= 0 ? total_.facts : total_.shapes;
            return bytes_of(TwoFacts{host_.facts(next_, ranks.first).value_or(RowFacts{}),
                                     host_.facts(next_, ranks.other).value_or(RowFacts{})});
        }
        case Stage::learners: {
            Ranks learners((static_cast<size_t>(ranks_) + 7) / 8);
            host_.add_learners(next_, learners);
            return bytes_of_all(learners);
        }
        case Stage::receivers:
        case Stage::senders: {
            search_.parts.assign(static_cast<size_t>(ranges), Digest128{});
            host_.add_pairs(next_, search_);
            return bytes_of_all(search_.parts);
        }
        case Stage::pair: {
            PairReport report;
            host_.add_pair(next_, static_cast<int>(search_.senders.begin), static_cast<int>(search_.receivers.begin),
                           report);
            return bytes_of(report);
        }
    }
    return {};
}

void TreeAgreement::start(Stage stage) {
    const uint16_t number = stage == Stage::summary ? 0 : ++round_;
    Round& round = rounds_[{next_, number}];
    if (!round.stage) round.stage = stage;
    add(stage, round.sum, own(stage));
    round.here = true;
    look(round, number);
}

/// Sends what the neighbours can be told, and goes on once all have told theirs.
void TreeAgreement::look(Round& round, uint16_t number) {
    if (!round.here) return;
    const uint64_t missing = all() & ~round.heard;
    if (std::popcount(missing) == 1 && round.told == 0) {
        round.told = missing;
        host_.send(static_cast<size_t>(std::countr_zero(missing)), {next_, number, *round.stage, 0}, round.sum);
    }
    if (missing != 0) return;
    for (uint64_t rest = all() & ~round.told; rest != 0; rest &= rest - 1)
        host_.send(static_cast<size_t>(std::countr_zero(rest)), {next_, number, *round.stage, 1}, round.sum);
    const Stage stage = *round.stage;
    const std::string sum = std::move(round.sum);
    round.told = all();
    conclude(stage, sum);
}

void TreeAgreement::conclude(Stage stage, const std::string& sum) {
    switch (stage) {
        case Stage::summary:
            total_ = value_of<Summary>(sum);
            if (total_.failed > 0) return start(Stage::failure);
            if (total_.facts.other >= 0 || total_.shapes.other >= 0) return start(Stage::facts);
            return total_.agrees() ? decide({}) : start(total_.learning > 0 ? Stage::learners : Stage::receivers);
        case Stage::failure: {
            const auto failure = value_of<FailedRow>(sum);
            return decide(verdict_of(failure, operator_text(failure.op)));
        }
        case Stage::facts: {
            const auto [first, other] = value_of<TwoFacts>(sum);
            const std::string what =
                total_.facts.other >= 0 ? row_difference(first, other) : shape_difference(first, other);
            return decide(Verdict{peer_mismatch("operator #", next_, " of domain '", domain_, "': ", what)});
        }
        case Stage::learners:
            search_.learners = values_of<uint8_t>(sum);
            host_.tell(next_, search_.learners);
            return start(Stage::receivers);
        case Stage::receivers:
        case Stage::senders:
            return narrow(sum);
        case Stage::pair: {
            const auto report = value_of<PairReport>(sum);
            const PairDifference pair{static_cast<int32_t>(search_.senders.begin),
                                      static_cast<int32_t>(search_.receivers.begin), report.sent, report.expected};
            return decide(verdict_of(pair, report.op, report.row, operator_text(report.op)));
        }
    }
}

/// Goes on with the first range that is not balanced.
void TreeAgreement::narrow(const std::string& sum) {
    const std::vector<Digest128> sums = values_of<Digest128>(sum);
    const auto found = std::ranges::find_if(sums, [](const Digest128& digest) { return static_cast<bool>(digest); });
    if (found == sums.end()) return decide({});  // those that do not learn their counts agree
    Range& range = search_.receivers.is_one() ? search_.senders : search_.receivers;
    range = part_of(range, found - sums.begin());
    if (!search_.receivers.is_one()) return start(Stage::receivers);
    start(search_.senders.is_one() ? Stage::pair : Stage::senders);
}

void TreeAgreement::decide(const std::optional<Verdict>& verdict) {
    const uint64_t seq = next_++;
    round_ = 0;
    published_ = false;
    total_ = {};
    search_.learners.clear();
    search_.receivers = search_.senders = {0, ranks_};
    rounds_.erase(rounds_.begin(), rounds_.lower_bound({next_, 0}));
    host_.decided(seq, verdict);
}

std::string TreeAgreement::operator_text(OpKind op) const {
    if (op == OpKind::none) return "domain '" + domain_ + "'";
    return "operator #" + std::to_string(next_) + " " + std::string(name_of(op)) + " of domain '" + domain_ + "'";
}

}  // namespace alltoallv
