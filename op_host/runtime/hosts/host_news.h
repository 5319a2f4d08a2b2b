/// \file host_news.h
/// \brief What a leader has heard of other hosts, in the memory of the ranks of its own: it follows the control
/// segment.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/control/agreement.h"
#include "runtime/control/control.h"

namespace alltoallv {

/// Of the hosts behind one neighbour in the tree. Like rows, what is said of two operators is kept.
struct alignas(cache_line) NewsOfNeighbour {
    static constexpr size_t most_absent = 32;
    struct Said {
        Summary summary;
        uint32_t of_all;  // 1: it is of the ranks of all hosts
    };

    std::atomic<uint64_t> heard;  // the last operator that all ranks behind it have begun; published with release
    Said said[2];
    std::atomic<uint64_t> absent_from;  // an operator, and the first of the ranks that have not begun it
    std::atomic<uint32_t> absent_count;
    std::atomic<int32_t> absent[most_absent];
};

/// The verdict about an operator that does not go on at once.
struct alignas(cache_line) SaidVerdict {
    std::atomic<uint64_t> seq;  // published with release
    uint32_t fails, unmet;
    ErrorClass kind;
    ErrorType code;
    char text[1024];
};

class HostNews {
  public:
    static size_t bytes(size_t neighbours) { return 2 * sizeof(SaidVerdict) + neighbours * sizeof(NewsOfNeighbour); }

    HostNews(const ControlPlane& control, size_t neighbours)
        : base_(control.memory()->data() + control.layout().without_data()), neighbours_(neighbours) {}

    size_t neighbours() const { return neighbours_; }
    SaidVerdict& verdict(uint64_t seq) const { return reinterpret_cast<SaidVerdict*>(base_)[seq & 1]; }
    NewsOfNeighbour& of(size_t neighbour) const {
        return reinterpret_cast<NewsOfNeighbour*>(base_ + 2 * sizeof(SaidVerdict))[neighbour];
    }
    bool has_heard(size_t neighbour, uint64_t seq) const {
        return of(neighbour).heard.load(std::memory_order_acquire) >= seq;
    }
    bool has_heard_all(uint64_t seq) const {
        for (size_t i = 0; i < neighbours_; ++i)
            if (!has_heard(i, seq)) return false;
        return true;
    }
    void note_absent(size_t neighbour, uint64_t seq, std::span<const int32_t> ranks) const {
        NewsOfNeighbour& news = of(neighbour);
        news.absent_from.store(0, std::memory_order_relaxed);
        const size_t count = std::min(ranks.size(), NewsOfNeighbour::most_absent);
        for (size_t i = 0; i < count; ++i) news.absent[i].store(ranks[i], std::memory_order_relaxed);
        news.absent_count.store(static_cast<uint32_t>(count), std::memory_order_relaxed);
        news.absent_from.store(seq, std::memory_order_release);
    }
    /// Returns ranks behind a neighbour that have not begun an operator; empty if that is not known.
    std::vector<int> absent(size_t neighbour, uint64_t seq) const {
        const NewsOfNeighbour& news = of(neighbour);
        std::vector<int> ranks;
        if (news.absent_from.load(std::memory_order_acquire) != seq) return ranks;
        const size_t count = std::min<size_t>(news.absent_count.load(std::memory_order_relaxed), news.most_absent);
        for (size_t i = 0; i < count; ++i) ranks.push_back(news.absent[i].load(std::memory_order_relaxed));
        return ranks;
    }

  private:
    char* base_;
    size_t neighbours_;
};

}  // namespace alltoallv
