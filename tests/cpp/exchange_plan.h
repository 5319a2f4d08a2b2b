// Random exchanges that every rank derives from the same seed, run and compared with what they must give.
#pragma once

#include <algorithm>
#include <numeric>

#include "transport_fixture.h"

namespace testing {

using Matrix = std::vector<std::vector<int64_t>>;

inline constexpr DType plan_dtypes[] = {DType::bool_,   DType::int16,     DType::bfloat16,
                                        DType::float32, DType::complex64, DType::complex128};

/// Counts and displacements of all ranks, in elements: `send[i][j]` go from rank i to rank j.
struct Plan {
    DType dtype = DType::uint8;
    uint64_t seed = 0;
    Matrix send, sdispls, recv, rdispls;
    std::vector<int64_t> input_length, output_length;

    size_t ranks() const { return send.size(); }
    size_t element() const { return size_of(dtype); }

    /// Bytes from (or to) all other ranks.
    size_t bytes_sent(int rank) const { return bytes_of_peers(send, rank); }
    size_t bytes_received(int rank) const { return bytes_of_peers(recv, rank); }

  private:
    size_t bytes_of_peers(const Matrix& counts, int rank) const {
        const auto& row = counts[static_cast<size_t>(rank)];
        const int64_t all = std::accumulate(row.begin(), row.end(), int64_t{0});
        return static_cast<size_t>(all - row[static_cast<size_t>(rank)]) * element();
    }
};

/// Regions of the given lengths in random order with gaps between them, or all over each other; returns their end.
inline int64_t place(Random& random, const std::vector<int64_t>& counts, bool overlap, std::vector<int64_t>& displs) {
    std::vector<size_t> order(counts.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    displs.assign(counts.size(), 0);
    int64_t at = 0, end = 0;
    for (const size_t j : order) {
        const auto gap = static_cast<int64_t>(random.below(6));
        displs[j] = overlap ? gap : at + gap;
        at = displs[j] + counts[j];
        end = std::max(end, at);
    }
    return end + static_cast<int64_t>(random.below(4));
}

/// Counts up to `longest` elements; about a third of the pairs, and now and then a whole rank, are empty.
inline Plan random_plan(int ranks, uint64_t seed, size_t longest) {
    Random random(seed);
    const auto n = static_cast<size_t>(ranks);
    Plan plan;
    plan.seed = seed;
    plan.dtype = plan_dtypes[random.below(std::size(plan_dtypes))];
    plan.send.assign(n, std::vector<int64_t>(n));
    plan.recv = plan.sdispls = plan.rdispls = plan.send;
    for (size_t i = 0; i < n; ++i) {
        const bool silent = random.chance(10);
        for (size_t j = 0; j < n; ++j)
            if (!silent && !random.chance(30))
                plan.send[i][j] = plan.recv[j][i] = static_cast<int64_t>(random.below(longest) + 1);
    }
    for (size_t i = 0; i < n; ++i) {
        plan.input_length.push_back(place(random, plan.send[i], random.chance(20), plan.sdispls[i]));
        plan.output_length.push_back(place(random, plan.recv[i], false, plan.rdispls[i]));
    }
    return plan;
}

/// The bytes that one rank sends to another.
inline std::vector<char> sent_bytes(const Plan& plan, size_t from, size_t to) {
    const size_t element = plan.element();
    std::vector<char> input(static_cast<size_t>(plan.input_length[from]) * element);
    fill(input.data(), input.size(), plan.seed, static_cast<int>(from));
    const auto begin =
        input.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(plan.sdispls[from][to]) * element);
    return {begin, begin + static_cast<std::ptrdiff_t>(static_cast<size_t>(plan.send[from][to]) * element)};
}

/// One rank's part of a plan: the input is filled, and nothing is written to the output yet.
struct Attempt {
    static constexpr char untouched = 0x5a;
    Plan plan;
    Buffer input, output;
    std::vector<Steps> send_steps, recv_steps;
    Exchange exchange;

    Attempt(Plan the_plan, int rank, bool input_shared, bool output_shared)
        : plan(std::move(the_plan)),
          input(bytes_of(plan.input_length, rank), input_shared),
          output(bytes_of(plan.output_length, rank), output_shared) {
        const auto r = static_cast<size_t>(rank);
        exchange.dtype = plan.dtype;
        exchange.input = input.data();
        exchange.output = output.data();
        exchange.send_counts = plan.send[r];
        exchange.sdispls = plan.sdispls[r];
        exchange.recv_counts = plan.recv[r];
        exchange.rdispls = plan.rdispls[r];
        // Rows without gaps between them are the same bytes; some of the ranks say so, where the path stays the same.
        const auto rows = static_cast<int64_t>(plan.seed % 5);
        if (rows > 0 && (input_shared || output_shared) && (plan.seed / 5 + r) % 3 == 0) {
            send_steps.assign(plan.ranks(), {rows, rows});
            recv_steps.assign(plan.ranks(), {rows + 1, rows + 1});
            exchange.send_steps = send_steps;
            exchange.recv_steps = recv_steps;
        }
        fill(input.data(), input.size(), plan.seed, rank);
        std::memset(output.data(), untouched, output.size());
    }

  private:
    size_t bytes_of(const std::vector<int64_t>& lengths, int rank) const {
        return static_cast<size_t>(lengths[static_cast<size_t>(rank)]) * plan.element();
    }
};

/// Every byte of the output, those between the regions too, against the value that (sender, receiver, index) gives.
inline void check_output(const Plan& plan, int rank, const char* output, const std::vector<int64_t>& rdispls,
                         char untouched) {
    const size_t element = plan.element(), r = static_cast<size_t>(rank);
    const auto length = static_cast<size_t>(plan.output_length[r]) * element;
    std::vector<char> expected(length, untouched);
    for (size_t j = 0; j < plan.ranks(); ++j) {
        const std::vector<char> sent = sent_bytes(plan, j, r);
        std::ranges::copy(sent, expected.data() + static_cast<size_t>(rdispls[j]) * element);
    }
    if (length == 0 || std::memcmp(output, expected.data(), length) == 0) return;
    const size_t at =
        static_cast<size_t>(std::mismatch(expected.begin(), expected.end(), output).first - expected.begin());
    std::string where = "between the regions";
    for (size_t j = 0; j < plan.ranks(); ++j) {
        const size_t begin = static_cast<size_t>(rdispls[j]) * element;
        const size_t bytes = static_cast<size_t>(plan.recv[r][j]) * element;
        if (at >= begin && at - begin < bytes)
            where = "element " + std::to_string((at - begin) / element) + " from rank " + std::to_string(j);
    }
    throw std::runtime_error("seed " + std::to_string(plan.seed) + ", " + std::string(name_of(plan.dtype)) + ": byte " +
                             std::to_string(at) + " of the output of rank " + std::to_string(rank) + " is wrong (" +
                             where + ")");
}

/// One exchange with the buffers where asked, checked.
inline void run_plan(Communicator& communicator, const Plan& plan, bool input_shared, bool output_shared) {
    const int rank = communicator.rank();
    const Attempt attempt(plan, rank, input_shared, output_shared);
    communicator.exchange(attempt.exchange, -1);
    check_output(plan, rank, attempt.output.data(), plan.rdispls[static_cast<size_t>(rank)], Attempt::untouched);
}

/// The same without receive counts: they are learnt, and the output is packed in rank order.
inline void run_learning(Communicator& communicator, Plan plan, bool input_shared, bool output_shared) {
    const int rank = communicator.rank();
    const auto r = static_cast<size_t>(rank);
    const Attempt attempt(plan, rank, input_shared, false);
    std::optional<Buffer> output;
    std::vector<int64_t> learnt, displs;
    int calls = 0;
    Exchange exchange = attempt.exchange;
    exchange.output = nullptr;
    exchange.recv_counts = exchange.rdispls = {};
    exchange.allocate = [&](std::span<const int64_t> counts) -> void* {
        ++calls;
        learnt.assign(counts.begin(), counts.end());
        const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
        if (total == 0) return nullptr;
        output.emplace(static_cast<size_t>(total) * plan.element(), output_shared);
        return output->data();
    };
    communicator.exchange(exchange, -1);
    CHECK_EQ(calls, 1);
    CHECK(learnt == plan.recv[r]);
    int64_t at = 0;
    for (const int64_t n : learnt) {
        displs.push_back(at);
        at += n;
    }
    plan.output_length[r] = at;
    check_output(plan, rank, output ? output->data() : nullptr, displs, 0);
}

}  // namespace testing
