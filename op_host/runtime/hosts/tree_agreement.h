/// \file tree_agreement.h
/// \brief How the leaders of hosts agree on an operator: summaries are added up over the tree of their connections.
///
/// Once only one neighbour is missing, a leader sends it the sum of its own host and of all other neighbours; once none
/// is, every other neighbour gets the sum of what is not behind it. So one summary goes over each connection in each
/// direction, of one size for any number of ranks; between two hosts both go at the same time.
///
/// While ranks wait, leaders also tell each other which ranks are absent: the lowest of those that are not behind the
/// receiver, again and again as they change.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "runtime/control/summary.h"

namespace alltoallv {

class TreeAgreement {
  public:
    static constexpr size_t most_absent = 32;
    using Ranks = std::vector<int32_t>;  // in order

    /// What a leader does with what comes out; all are called from within the functions below.
    struct Leader {
        std::function<void(size_t neighbour, uint64_t seq, const Summary& sum)> send;
        std::function<void(uint64_t seq, const Summary& others)> others_known;  // the ranks of this host may go on
        std::function<void(uint64_t seq, const Summary& all)> complete;         // all summaries are sent
        std::function<void(size_t neighbour, uint64_t seq, const Ranks& absent)> send_absent;
        /// All ranks behind a neighbour have begun the operator, but those, of which only the lowest are listed.
        std::function<void(size_t neighbour, uint64_t seq, const Ranks& absent)> arrived;
        std::function<Ranks(uint64_t seq)> absent_here;
    };

    /// The ranks that are reached through a neighbour: their number and the lowest of them.
    struct Behind {
        uint32_t ranks = 0;
        Ranks lowest{};
    };
    TreeAgreement(const std::vector<Behind>& behind, bool check, Leader leader);

    uint64_t next() const { return next_; }  ///< the operator on which the leaders agree
    bool has_own() const { return own_.has_value(); }
    /// All ranks of this host have begun the next operator. May complete it.
    void add_own(const Summary& own);
    /// Both return false if no healthy neighbour would say that.
    bool receive(size_t neighbour, uint64_t seq, const Summary& sum);
    bool receive_absent(size_t neighbour, uint64_t seq, const Ranks& absent);
    /// This host has waited for a while: notes who has arrived, and sends who is absent where that has changed.
    void look();

  private:
    struct Neighbour {
        Behind behind;
        std::optional<Summary> sum;
        bool sent = false, noted = false;  // `noted`: the leader knows that all have arrived
        std::optional<Ranks> absent;       // behind it, as last received
        Ranks sent_absent;                 // the last that it was sent
    };

    void settle();
    Summary sum_of_others(size_t except = SIZE_MAX) const;
    Ranks absent_without(size_t neighbour) const;

    std::vector<Neighbour> neighbours_;
    const bool check_;
    const Leader leader_;
    uint64_t next_ = 1;
    std::optional<Summary> own_;
    size_t received_ = 0;
    bool others_known_ = false;
};

}  // namespace alltoallv
