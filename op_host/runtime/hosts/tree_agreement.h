/// \file tree_agreement.h
/// \brief How the hosts of a communicator agree on an operator: a reduction over the tree of their leaders.
///
/// Each leader puts together what the ranks of its host say, and what its neighbours in the tree have said of the hosts
/// behind them. Once only one neighbour is missing it sends that neighbour the sum of all others, and once none is, the
/// sum of all to those that do not have it. So one message of a constant size goes over each connection in each
/// direction, whatever the number of ranks; between two hosts both go at the same time.
///
/// Usually that is all. If the sum shows that something is wrong, all hosts see it, and go on to further rounds of the
/// same kind, which find out what: the first failure, the facts of two ranks, or, in ranges of ranks that become 64
/// times smaller from round to round, the first pair of ranks whose counts differ.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "runtime/control/agreement.h"

namespace alltoallv {

class TreeAgreement {
  public:
    static constexpr int64_t ranges = 64;  // into which a search divides ranks

    enum class Stage : uint8_t {
        summary,    // Summary
        failure,    // FailedRow
        facts,      // the RowFacts of two ranks
        learners,   // a bit for each rank: it learns its counts, if others do not
        receivers,  // the balance of each of 64 ranges of receivers
        senders,    // of one receiver: of each of 64 ranges of senders
        pair,       // PairReport
    };
    struct Header {
        uint64_t seq = 0;
        uint16_t round = 0;
        Stage stage = Stage::summary;
        uint8_t of_all = 0;  // 1: the sum of all hosts, and not only of those behind the sender
    };
    struct Range {
        int64_t begin = 0, end = 0;
        bool has(int64_t rank) const { return rank >= begin && rank < end; }
        bool is_one() const { return end - begin <= 1; }
        int64_t each() const { return (end - begin + ranges - 1) / ranges; }  // ranks of a part
    };
    struct PairReport {
        int64_t sent = 0, expected = 0, row = 0;
        OpKind op{};
    };
    /// A bit for each rank; empty: no rank.
    using Ranks = std::vector<uint8_t>;
    static bool has(const Ranks& ranks, int rank) {
        return !ranks.empty() && (ranks[static_cast<size_t>(rank) / 8] >> rank % 8 & 1) != 0;
    }

    /// Looks for the first pair of ranks that disagree.
    struct Search {
        Range receivers, senders;
        Ranks learners;                // as receivers, they agree with all
        std::vector<Digest128> parts;  // the balance of each range: of receivers, or, if that is one rank, of senders

        void sends(int from, int to, int64_t count) {
            if (covers(from, to)) parts[part(from, to)] += pair_hash(from, to, count);
        }
        void expects(int from, int to, int64_t count) {
            if (covers(from, to)) parts[part(from, to)] -= pair_hash(from, to, count);
        }

      private:
        bool covers(int from, int to) const { return receivers.has(to) && senders.has(from) && !has(learners, to); }
        size_t part(int from, int to) const {
            return static_cast<size_t>(receivers.is_one() ? (from - senders.begin) / senders.each()
                                                          : (to - receivers.begin) / receivers.each());
        }
    };

    /// The ranks of this host, whose rows of the present operator do not change, and the way to the neighbours.
    class Host {
      public:
        virtual ~Host() = default;
        virtual Summary summary(uint64_t seq) = 0;
        virtual FailedRow failure(uint64_t seq, uint64_t called) = 0;       // that of the host's ranks that counts
        virtual std::optional<RowFacts> facts(uint64_t seq, int rank) = 0;  // nothing: the rank is on another host
        virtual void add_learners(uint64_t seq, Ranks& learners) = 0;
        /// Some ranks learn their counts, others have announced that they do not: sends them the counts.
        virtual void tell(uint64_t seq, const Ranks& learners) = 0;
        /// Adds up the pairs of the host's ranks that a search looks at.
        virtual void add_pairs(uint64_t seq, Search& search) = 0;
        virtual void add_pair(uint64_t seq, int from, int to, PairReport& report) = 0;

        virtual void send(size_t neighbour, const Header& header, const std::string& body) = 0;
        /// A neighbour has said all about the hosts behind it, or, if `of_all`, about all hosts.
        virtual void heard(size_t neighbour, uint64_t seq, const Summary& summary, bool of_all) = 0;
        /// Every leader has come to this verdict; nothing: the operator goes on.
        virtual void decided(uint64_t seq, const std::optional<Verdict>& verdict) = 0;
    };

    /// `ranks`: of all hosts; `domain`: for errors.
    TreeAgreement(Host& host, size_t neighbours, int ranks, std::string domain);

    /// All ranks of this host have published their rows of this operator, the next one.
    void publish(uint64_t seq);
    /// Returns false if the message makes no sense.
    [[nodiscard]] bool hear(size_t neighbour, const Header& header, const char* body, size_t bytes);
    /// The operator that is not decided yet.
    uint64_t next() const { return next_; }
    /// True if this neighbour has had all that this host can tell about an operator.
    bool has_told(size_t neighbour, uint64_t seq) const;
    bool has_heard(size_t neighbour, uint64_t seq) const;

    static constexpr size_t most_neighbours = 64;
    static constexpr size_t most_body = sizeof(RowFacts) * 2 + ranges * sizeof(Digest128) + sizeof(FailedRow);

  private:
    /// What has come of one round.
    struct Round {
        std::optional<Stage> stage;
        std::string sum;
        uint64_t heard = 0, told = 0;  // neighbours, a bit each
        bool here = false;             // this host's part is in the sum
    };
    using Number = std::pair<uint64_t, uint16_t>;

    bool fits(Stage stage, size_t bytes) const;
    static void add(Stage stage, std::string& sum, const std::string& more);
    std::string own(Stage stage);
    void start(Stage stage);
    void look(Round& round, uint16_t number);
    void conclude(Stage stage, const std::string& sum);
    void narrow(const std::string& sum);
    void decide(const std::optional<Verdict>& verdict);
    std::string operator_text(OpKind op) const;
    uint64_t all() const { return neighbours_ == 64 ? ~uint64_t{0} : (uint64_t{1} << neighbours_) - 1; }

    Host& host_;
    const size_t neighbours_;
    const int ranks_;
    const std::string domain_;
    uint64_t next_ = 1;
    uint16_t round_ = 0;
    std::map<Number, Round> rounds_;  // of this operator and the next one, which a neighbour may have begun
    // of the present operator
    Summary total_;
    Search search_;
    bool published_ = false;
};

}  // namespace alltoallv
