// What the self-tests of the emulated HCCL share: ranks in processes, each with a communicator, and one exchange.
#pragma once

#include <numeric>

#include "emulator_fixture.h"

namespace testing {

inline HcclRootInfo root;  // made before the processes fork

struct Group {
    HcclComm comm = nullptr;
    aclrtStream stream = nullptr;
    int rank, size;

    Group(int rank_, int size_) : rank(rank_), size(size_) {
        CHECK_EQ(setenv("RANK", std::to_string(rank).c_str(), 1), 0);
        CHECK_EQ(aclrtSetDevice(rank % 8), 0);
        CHECK_EQ(HcclCommInitRootInfo(static_cast<uint32_t>(size), &root, static_cast<uint32_t>(rank), &comm), 0);
        CHECK_EQ(aclrtCreateStream(&stream), 0);
    }
    ~Group() {
        aclrtSynchronizeStream(stream);
        aclrtDestroyStream(stream);
        HcclCommDestroy(comm);
    }
    void synchronize() const { CHECK_EQ(aclrtSynchronizeStream(stream), 0); }
};

/// Runs the body in `size` processes, each with a communicator of its own.
inline void in_group(int size, const std::function<void(Group&)>& body) {
    CHECK_EQ(HcclGetRootInfo(&root), 0);
    all_pass(run_processes(size, [&](int rank) {
        Group group(rank, size);
        body(group);
    }));
}

/// Adds a test of groups of one and of several ranks.
inline bool add_test(const std::string& name, void (*body)(Group&)) {
    for (const int size : {1, 3, 4})
        add_test(name + ", " + std::to_string(size) + " ranks", [=] { in_group(size, body); });
    return true;
}

inline std::vector<int> range(int first, size_t count) {
    std::vector<int> values(count);
    std::iota(values.begin(), values.end(), first);
    return values;
}

inline void check_values(const DeviceArray<int>& array, const std::vector<int>& expected) {
    const std::vector<int> values = array.values();
    for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(values[i], expected[i]);
}

inline constexpr HcclDataType int32 = HCCL_DATA_TYPE_INT32;

/// Rank r sends (r + j) % 3 elements, 100 r + 10 j + k, to rank j; a gap of one element after every region.
inline void all_to_all_v(Group& g, size_t scale) {
    const auto count = [&](int from, int to) { return static_cast<uint64_t>((from + to) % 3) * scale; };
    std::vector<uint64_t> send_counts, sdispls, recv_counts, rdispls;
    std::vector<int> input;
    uint64_t end = 0;
    for (int j = 0; j < g.size; ++j) {
        send_counts.push_back(count(g.rank, j));
        sdispls.push_back(input.size());
        for (const int value : range(100 * g.rank + 10 * j, count(g.rank, j))) input.push_back(value);
        input.push_back(-7);
        recv_counts.push_back(count(j, g.rank));
        rdispls.push_back(end);
        end += count(j, g.rank) + 1;
    }
    const DeviceArray<int> x(input), y(std::vector<int>(end, -1));
    CHECK_EQ(HcclAlltoAllV(x.data(), send_counts.data(), sdispls.data(), int32, y.data(), recv_counts.data(),
                           rdispls.data(), int32, g.comm, g.stream),
             0);
    g.synchronize();
    std::vector<int> expected(end, -1);
    for (int j = 0; j < g.size; ++j) {
        const std::vector<int> part = range(100 * j + 10 * g.rank, count(j, g.rank));
        std::copy(part.begin(), part.end(),
                  expected.begin() + static_cast<std::ptrdiff_t>(rdispls[static_cast<size_t>(j)]));
    }
    check_values(y, expected);
}

}  // namespace testing
