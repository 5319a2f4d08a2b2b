#include "runtime/hosts/tree_agreement.h"

#include <algorithm>
#include <utility>

namespace alltoallv {

TreeAgreement::TreeAgreement(const std::vector<Behind>& behind, bool check, Leader leader)
    : neighbours_(behind.size()), check_(check), leader_(std::move(leader)) {
    for (size_t i = 0; i < behind.size(); ++i) neighbours_[i].behind = behind[i];
}

void TreeAgreement::add_own(const Summary& own) {
    own_ = own;
    settle();
}

bool TreeAgreement::receive(size_t neighbour, uint64_t seq, const Summary& sum) {
    Neighbour& from = neighbours_[neighbour];
    if (seq != next_ || from.sum || sum.ranks != from.behind.ranks) return false;
    from.sum = sum;
    ++received_;
    settle();
    return true;
}

Summary TreeAgreement::sum_of_others(size_t except) const {
    Summary all;
    for (size_t i = 0; i < neighbours_.size(); ++i)
        if (i != except && neighbours_[i].sum) all.add(*neighbours_[i].sum, check_);
    return all;
}

/// What is sent precedes what lets the ranks of this host go on, because its leader may end at once.
void TreeAgreement::settle() {
    const bool all_received = received_ == neighbours_.size();
    const uint64_t seq = next_;
    if (own_ && received_ + 1 >= neighbours_.size()) {
        for (size_t i = 0; i < neighbours_.size(); ++i) {
            if (neighbours_[i].sent || (!all_received && neighbours_[i].sum)) continue;
            neighbours_[i].sent = true;
            Summary sum = sum_of_others(i);
            sum.add(*own_, check_);
            leader_.send(i, seq, sum);
        }
    }
    if (!all_received) return;
    const Summary others = sum_of_others();
    if (own_) {
        Summary all = others;
        all.add(*own_, check_);
        leader_.complete(seq, all);
    }
    if (!std::exchange(others_known_, true)) leader_.others_known(seq, others);
    if (!own_) return;
    ++next_;
    own_.reset();
    received_ = 0;
    others_known_ = false;
    for (Neighbour& neighbour : neighbours_) {
        neighbour.sum.reset();
        neighbour.absent.reset();
        neighbour.sent_absent.clear();
        neighbour.sent = neighbour.noted = false;
    }
}

TreeAgreement::Ranks TreeAgreement::absent_without(size_t neighbour) const {
    Ranks absent = own_ ? Ranks{} : leader_.absent_here(next_);
    for (size_t i = 0; i < neighbours_.size(); ++i) {
        const Neighbour& other = neighbours_[i];
        if (i == neighbour || other.sum) continue;
        const Ranks& more = other.absent ? *other.absent : other.behind.lowest;
        absent.insert(absent.end(), more.begin(), more.end());
    }
    std::ranges::sort(absent);
    absent.resize(std::min(absent.size(), most_absent));
    return absent;
}

void TreeAgreement::look() {
    for (size_t i = 0; i < neighbours_.size(); ++i) {
        Neighbour& neighbour = neighbours_[i];
        if (neighbour.sum && !std::exchange(neighbour.noted, true)) leader_.arrived(i, next_, {});
        if (neighbour.sent) continue;
        Ranks absent = absent_without(i);
        if (absent.empty() || absent == neighbour.sent_absent) continue;
        neighbour.sent_absent = absent;
        leader_.send_absent(i, next_, absent);
    }
}

bool TreeAgreement::receive_absent(size_t neighbour, uint64_t seq, const Ranks& absent) {
    Neighbour& from = neighbours_[neighbour];
    if (seq != next_ || from.sum || absent.empty() || absent.size() > most_absent) return false;
    leader_.arrived(neighbour, seq, absent);
    from.absent = absent;
    look();
    return true;
}

}  // namespace alltoallv
