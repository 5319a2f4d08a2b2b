#include "moe/routing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>

#include "runtime/base/error.h"

namespace alltoallv::moe {
namespace {

constexpr size_t aligned = 16;  // so that a row has room for what a header begins with
constexpr int64_t digest_bits = 0x7fffffff;

constexpr size_t padded(size_t bytes) {
    return (bytes + aligned - 1) / aligned * aligned;
}

int64_t total(Span values) {
    return std::accumulate(values.begin(), values.end(), int64_t{0});
}

size_t header_rows(int64_t pairs, std::span<const size_t> widths, size_t stride) {
    size_t bytes = aligned;
    for (const size_t width : widths) bytes += padded(static_cast<size_t>(pairs) * width);
    return (bytes + stride - 1) / stride;
}

/// Distinct tokens, ascending, and for every token its place among them.
struct Numbered {
    Numbers tokens, lines;
};

Numbered numbered(Span tokens) {
    Numbered result{{}, Numbers(tokens.size())};
    Numbers place(tokens.empty() ? 0 : static_cast<size_t>(*std::ranges::max_element(tokens)) + 1, -1);
    for (const int64_t token : tokens) place[static_cast<size_t>(token)] = 0;
    for (size_t token = 0; token < place.size(); ++token) {
        if (place[token] < 0) continue;
        place[token] = static_cast<int64_t>(result.tokens.size());
        result.tokens.push_back(static_cast<int64_t>(token));
    }
    for (size_t i = 0; i < tokens.size(); ++i) result.lines[i] = place[static_cast<size_t>(tokens[i])];
    return result;
}

std::vector<Numbered> numbered_by_rank(Span token, Span pairs) {
    std::vector<Numbered> by_rank;
    for (size_t j = 0, begin = 0; j < pairs.size(); begin += static_cast<size_t>(pairs[j++]))
        by_rank.push_back(numbered(token.subspan(begin, static_cast<size_t>(pairs[j]))));
    return by_rank;
}

/// Returns the part, of `parts` equal ones of `n`, that ends behind each position.
int64_t part_end(int64_t n, int64_t part, int64_t parts) {
    return n * (part + 1) / parts;
}

}  // namespace

std::optional<int64_t> Options::room(int64_t pairs) const {
    if (!factor) return rows;
    const double share = *factor * static_cast<double>(pairs) / static_cast<double>(slots.size());
    return share < 0x1p62 ? static_cast<int64_t>(std::ceil(share)) : INT64_MAX;
}

SendPlan send(const Options& options, Span ids, int64_t k, std::span<const double> weights) {
    const size_t places = static_cast<size_t>(options.ends.back()), pairs = ids.size();
    Numbers begin(places + 1);
    for (const int64_t expert : ids) {
        if (expert < 0 || expert >= static_cast<int64_t>(options.slots.size()))
            throw invalid_param(1026, "expert_ids holds ", expert, ", expected 0 to ", options.slots.size() - 1);
        const int64_t slot = options.slots[static_cast<size_t>(expert)];
        if (slot >= 0) ++begin[static_cast<size_t>(slot) + 1];
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    Numbers order(static_cast<size_t>(begin.back())), next(begin.begin(), begin.end() - 1);
    for (size_t pair = 0; pair < pairs; ++pair) {
        const int64_t slot = options.slots[static_cast<size_t>(ids[pair])];
        if (slot >= 0) order[static_cast<size_t>(next[static_cast<size_t>(slot)]++)] = static_cast<int64_t>(pair);
    }
    const std::optional<int64_t> room = options.room(static_cast<int64_t>(pairs));
    SendPlan plan{{}, Numbers(options.ends.size()), {}};
    plan.order.reserve(order.size());
    plan.tags.reserve(order.size());
    for (size_t slot = 0, rank = 0; slot < places; ++slot) {
        while (static_cast<int64_t>(slot) >= options.ends[rank]) ++rank;
        const auto first = order.begin() + begin[slot];
        auto last = order.begin() + begin[slot + 1];
        if (room && last - first > *room) {
            if (!weights.empty()) {
                const auto heavier = [&](int64_t a, int64_t b) {  // NaN is the lightest
                    const double x = weights[static_cast<size_t>(a)], y = weights[static_cast<size_t>(b)];
                    return x > y || (std::isnan(y) && !std::isnan(x));
                };
                std::stable_sort(first, last, heavier);
                std::sort(first, first + *room);
            }
            last = first + *room;
        }
        const auto local = static_cast<int32_t>(static_cast<int64_t>(slot) - (rank == 0 ? 0 : options.ends[rank - 1]));
        for (auto pair = first; pair != last; ++pair) {
            plan.order.push_back(*pair);
            plan.tags.push_back({local, static_cast<int32_t>(*pair / k)});
        }
        plan.sends[rank] += last - first;
    }
    return plan;
}

Numbers tokens_of(const Headers& headers) {
    const std::span<const Tag> tags = headers.tags();
    Numbers token;
    token.reserve(tags.size());
    for (size_t j = 0; j < headers.pairs.size(); ++j) {
        for (int64_t i = 0; i < headers.pairs[j]; ++i) {
            token.push_back(tags[token.size()].token);
            if (token.back() < 0 || token.back() >= headers.tokens[j])
                throw peer_mismatch(3001, "rank ", j, " sent a pair of token ", token.back(), " of ",
                                    headers.tokens[j]);
        }
    }
    return token;
}

ReceivePlan receive(std::span<const Tag> tags, int64_t experts, int64_t alignment) {
    const auto n = static_cast<size_t>(experts);
    ReceivePlan plan{{}, Numbers(n), Numbers(n)};
    for (const Tag& tag : tags) {
        if (tag.expert < 0 || tag.expert >= experts)
            throw peer_mismatch(3002, "a pair came for expert ", tag.expert, " of this rank, expected 0 to ",
                                experts - 1);
        ++plan.received[static_cast<size_t>(tag.expert)];
    }
    Numbers next(n);
    int64_t rows = 0;
    for (size_t e = 0; e < n; ++e) {
        next[e] = rows;
        rows += plan.counts[e] = (plan.received[e] + alignment - 1) / alignment * alignment;
    }
    plan.source.assign(static_cast<size_t>(rows), -1);
    for (size_t i = 0; i < tags.size(); ++i)
        plan.source[static_cast<size_t>(next[static_cast<size_t>(tags[i].expert)]++)] = static_cast<int64_t>(i);
    return plan;
}

size_t row_bytes(size_t width) {
    return std::max(padded(width), aligned);
}

Packed pack(Span order, Span sends, int64_t tokens, int64_t k, std::span<const Column> columns, size_t width,
            int64_t terms, bool follows) {
    Packed packed{row_bytes(width), {}, {}, {}, {}, {}};
    std::vector<size_t> widths;
    for (const Column& column : columns) widths.push_back(column.width);
    Numbers token(order.size());
    for (size_t i = 0; i < order.size(); ++i) token[i] = order[i] / k;
    size_t begin = 0;
    int64_t row = 0;
    for (const int64_t pairs : sends) {
        const auto count = static_cast<size_t>(pairs);
        const size_t rows = header_rows(pairs, widths, packed.stride), at = packed.headers.size();
        packed.headers.resize(at + rows * packed.stride);
        std::byte* to = packed.headers.data() + at;
        const int32_t head[] = {static_cast<int32_t>(terms & digest_bits), static_cast<int32_t>(pairs),
                                static_cast<int32_t>(tokens), static_cast<int32_t>(k)};
        std::memcpy(to, head, sizeof head);
        to += aligned;
        for (const Column& column : columns) {
            if (count > 0)
                std::memcpy(to, static_cast<const std::byte*>(column.data) + begin * column.width,
                            count * column.width);
            to += padded(count * column.width);
        }
        packed.tokens_of.push_back(numbered(Span(token).subspan(begin, count)).tokens);
        const int64_t first = row;
        for (size_t i = 0; i < rows; ++i) packed.header_at.push_back(row++);
        if (!follows) {
            for (const int64_t each : packed.tokens_of.back()) {
                packed.token.push_back(each);
                packed.token_at.push_back(row++);
            }
        }
        packed.counts.push_back(row - first);
        begin += count;
    }
    return packed;
}

Headers unpack(const Fetch& fetch, Span recvs, std::span<const size_t> widths, size_t stride, int64_t terms, int rank) {
    Headers headers;
    Numbers begins;
    int64_t rows = 0;
    for (size_t j = 0; j < recvs.size(); rows += recvs[j++]) {
        if (recvs[j] < 1) throw peer_mismatch(3003, "rank ", j, " sent no header of its tokens to rank ", rank);
        begins.push_back(rows);
    }
    std::vector<std::byte> first(recvs.size() * stride);
    fetch(begins, first.data());
    Numbers header;
    for (size_t j = 0; j < recvs.size(); ++j) {
        int32_t head[4];
        std::memcpy(head, first.data() + j * stride, sizeof head);
        if (head[0] != static_cast<int32_t>(terms & digest_bits))
            throw peer_mismatch(3004, "rank ", j, " dispatches other rows than rank ", rank,
                                ": expected one dtype and row shape of tokens, one dtype of gate_weights, one number "
                                "of experts and the same options on all ranks");
        headers.pairs.push_back(head[1]);
        headers.tokens.push_back(head[2]);
        headers.choices.push_back(head[3]);
        const auto lasts = head[1] < 0 ? INT64_MAX : static_cast<int64_t>(header_rows(head[1], widths, stride));
        if (lasts > recvs[j] || head[2] < 0 || head[3] < 0)
            throw peer_mismatch(3005, "rank ", j, " sent ", recvs[j], " rows to rank ", rank,
                                " and a header that does not "
                                "fit them");
        headers.firsts.push_back(begins[j] + lasts);
        for (int64_t i = 0; i < lasts; ++i) header.push_back(begins[j] + i);
    }
    std::vector<std::byte> texts(header.size() * stride);
    fetch(header, texts.data());
    headers.columns.resize(widths.size());
    size_t at = 0;
    for (size_t j = 0; j < recvs.size(); ++j) {
        const auto count = static_cast<size_t>(headers.pairs[j]);
        const std::byte* from = texts.data() + at + aligned;
        for (size_t i = 0; i < widths.size(); ++i) {
            headers.columns[i].insert(headers.columns[i].end(), from, from + count * widths[i]);
            from += padded(count * widths[i]);
        }
        at += static_cast<size_t>(headers.firsts[j] - begins[j]) * stride;
    }
    return headers;
}

Numbers lines(const Headers& headers, Span token, Span came, const std::vector<bool>& late) {
    Numbers rows;
    rows.reserve(token.size());
    const std::vector<Numbered> by_rank = numbered_by_rank(token, headers.pairs);
    int64_t end = 0;
    for (size_t j = 0; j < by_rank.size(); ++j) {
        end += came[j];
        const int64_t behind = end - headers.firsts[j];
        const auto expected = late[j] ? 0 : static_cast<int64_t>(by_rank[j].tokens.size());
        if (behind != expected)
            throw peer_mismatch(3006, "rank ", j, " sent ", behind, " tokens behind a header of ", expected);
        for (const int64_t line : by_rank[j].lines) rows.push_back(line + headers.firsts[j]);
    }
    return rows;
}

Numbers places(Span source, int64_t rows) {
    Numbers placed(static_cast<size_t>(rows));
    for (size_t i = 0; i < source.size(); ++i) {
        if (source[i] >= rows) throw invalid_param(1027, "source holds ", source[i], ", expected numbers below ", rows);
        if (source[i] >= 0) placed[static_cast<size_t>(source[i])] = static_cast<int64_t>(i);
    }
    return placed;
}

Numbers positions(Span order, int64_t tokens, int64_t k) {
    Numbers position(static_cast<size_t>(tokens * k), -1);
    for (size_t i = 0; i < order.size(); ++i) {
        if (order[i] < 0 || order[i] >= tokens * k)
            throw invalid_param(1028, "order holds ", order[i], ", expected 0 to ", tokens * k - 1);
        position[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
    }
    return position;
}

std::vector<Remainder> remainders(const Headers& headers, Span token, const std::vector<Numbers>& tokens_of,
                                  const std::vector<bool>& late, int rank, size_t stride) {
    const size_t size = late.size(), own = static_cast<size_t>(rank);
    Numbers behind;
    for (size_t j = 0; j < size; ++j) behind.push_back(late[j] ? headers.tokens[j] : 0);
    const int64_t most = *std::ranges::max_element(behind) * static_cast<int64_t>(stride);
    const int64_t count = (most + following_bytes - 1) / following_bytes;
    const std::vector<Numbered> by_rank = numbered_by_rank(token, headers.pairs);
    const auto span_of = [count](const Numbers& tokens, int64_t n, int64_t chunk) {
        const auto place = [&](int64_t end) { return std::ranges::lower_bound(tokens, end) - tokens.begin(); };
        return std::pair{place(chunk == 0 ? 0 : part_end(n, chunk - 1, count)), place(part_end(n, chunk, count))};
    };
    std::vector<Remainder> divided;
    for (int64_t chunk = 0; chunk < count; ++chunk) {
        Remainder remainder{part_end(behind[own], chunk, count), {}, {}, {}, {}};
        std::vector<std::pair<int64_t, int64_t>> arrived;  // the received row of each pair, and the pair
        int64_t pair = 0, row = 0;
        for (size_t j = 0; j < size; ++j) {
            const auto [first, last] =
                j == own ? std::pair<ptrdiff_t, ptrdiff_t>{0, 0} : span_of(by_rank[j].tokens, behind[j], chunk);
            for (const int64_t line : by_rank[j].lines) {
                if (line >= first && line < last) arrived.emplace_back(line - first + row, pair);
                ++pair;
            }
            remainder.recvs.push_back(last - first);
            row += last - first;
            const auto [from, to] = span_of(tokens_of[j], behind[own], chunk);
            remainder.going.emplace_back();
            if (j != own) remainder.going.back().assign(tokens_of[j].begin() + from, tokens_of[j].begin() + to);
        }
        std::ranges::stable_sort(arrived, {}, &std::pair<int64_t, int64_t>::first);
        for (const auto& [line, which] : arrived) {
            remainder.rows.push_back(line);
            remainder.pairs.push_back(which);
        }
        divided.push_back(std::move(remainder));
    }
    return divided;
}

std::vector<Chunk> chunks(const Route& route, int64_t tokens, int64_t k, size_t row) {
    int64_t count = 1;
    for (size_t j = 0; j < route.tokens.size(); ++j) {
        const int64_t bytes = route.tokens[j] * route.choices[j] * static_cast<int64_t>(row);
        count = std::max(count, (bytes + chunk_bytes - 1) / chunk_bytes);
    }
    Numbers there = places(route.source, total(route.arrived));
    const auto copied = [](Span values) { return Numbers(values.begin(), values.end()); };
    std::vector<Chunk> divided;
    if (count == 1) {
        divided.push_back({std::move(there), copied(route.arrived), copied(route.sent), 0, tokens,
                           positions(route.order, tokens, k)});
        return divided;
    }
    const size_t size = route.sent.size();
    for (int64_t chunk = 0; chunk < count; ++chunk)
        divided.push_back({{},
                           Numbers(size),
                           Numbers(size),
                           chunk == 0 ? 0 : part_end(tokens, chunk - 1, count),
                           part_end(tokens, chunk, count),
                           {}});
    for (Chunk& chunk : divided) chunk.places.assign(static_cast<size_t>((chunk.last - chunk.first) * k), -1);
    // The chunk of token t of n: the first whose end lies behind it.
    const auto chunk_of = [count](int64_t token, int64_t n) {
        int64_t chunk = n == 0 ? 0 : token * count / n;
        while (part_end(n, chunk, count) <= token) ++chunk;
        while (chunk > 0 && part_end(n, chunk - 1, count) > token) --chunk;
        return static_cast<size_t>(chunk);
    };
    size_t pair = 0;
    for (size_t j = 0; j < size; ++j) {
        for (int64_t i = 0; i < route.arrived[j]; ++i, ++pair) {
            Chunk& chunk = divided[chunk_of(route.token[pair], route.tokens[j])];
            chunk.rows.push_back(there[pair]);
            ++chunk.sends[j];
        }
    }
    size_t place = 0;
    Numbers next(divided.size());
    for (size_t j = 0; j < size; ++j) {
        for (int64_t i = 0; i < route.sent[j]; ++i, ++place) {
            const size_t which = chunk_of(route.order[place] / k, tokens);
            Chunk& chunk = divided[which];
            chunk.places[static_cast<size_t>(route.order[place] - chunk.first * k)] = next[which]++;
            ++chunk.recvs[j];
        }
    }
    return divided;
}

}  // namespace alltoallv::moe
