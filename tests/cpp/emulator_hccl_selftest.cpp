// The emulated HCCL between processes: every function against what it should give.
#include <deque>

#include "hccl_group.h"
#include "runtime/abi/hccl_windows.h"

using namespace testing;

namespace {

TEST(movement, Group& g) {
    const auto size = static_cast<size_t>(g.size);
    all_to_all_v(g, 1);
    all_to_all_v(g, 100000);
    {  // all_to_all and its matrix form
        std::vector<int> input, expected;
        for (int j = 0; j < g.size; ++j) {
            input.insert(input.end(), {10 * g.rank + j, -j});
            expected.insert(expected.end(), {10 * j + g.rank, -g.rank});
        }
        const DeviceArray<int> x(input), y(2 * size), z(2 * size);
        CHECK_EQ(HcclAlltoAll(x.data(), 2, int32, y.data(), 2, int32, g.comm, g.stream), 0);
        const std::vector<uint64_t> matrix(size * size, 2);
        CHECK_EQ(HcclAlltoAllVC(x.data(), matrix.data(), int32, z.data(), int32, g.comm, g.stream), 0);
        g.synchronize();
        check_values(y, expected);
        check_values(z, expected);
    }
    {  // all-gather, also in place and with unequal parts
        const DeviceArray<int> x(range(10 * g.rank, 3)), y(3 * size), z(3 * size);
        CHECK_EQ(HcclAllGather(x.data(), y.data(), 3, int32, g.comm, g.stream), 0);
        int* own = static_cast<int*>(z.data()) + 3 * g.rank;
        CHECK_EQ(aclrtMemcpyAsync(own, 12, x.data(), 12, ACL_MEMCPY_DEVICE_TO_DEVICE, g.stream), 0);
        CHECK_EQ(HcclAllGather(own, z.data(), 3, int32, g.comm, g.stream), 0);
        std::vector<uint64_t> counts, displs;
        std::vector<int> expected, unequal;
        for (int j = 0; j < g.size; ++j) {
            displs.push_back(unequal.size());
            counts.push_back(static_cast<uint64_t>(j % 3));
            for (const int value : range(10 * j, 3)) expected.push_back(value);
            for (const int value : range(10 * j, counts.back())) unequal.push_back(value);
        }
        const DeviceArray<int> v(unequal.size());
        CHECK_EQ(HcclAllGatherV(x.data(), counts[static_cast<size_t>(g.rank)], v.data(), counts.data(), displs.data(),
                                int32, g.comm, g.stream),
                 0);
        g.synchronize();
        check_values(y, expected);
        check_values(z, expected);
        check_values(v, unequal);
    }
    const uint32_t last = static_cast<uint32_t>(g.size - 1);
    {
        const DeviceArray<int> x(range(g.rank, 4));
        CHECK_EQ(HcclBroadcast(x.data(), 4, int32, last, g.comm, g.stream), 0);
        g.synchronize();
        check_values(x, range(g.size - 1, 4));
    }
    {
        const DeviceArray<int> x(range(1000 * g.rank, 2 * size)), y(2);
        CHECK_EQ(HcclScatter(x.data(), y.data(), 2, int32, last, g.comm, g.stream), 0);
        CHECK_EQ(HcclBarrier(g.comm, g.stream), 0);
        g.synchronize();
        check_values(y, range(1000 * (g.size - 1) + 2 * g.rank, 2));
    }
}

TEST(reductions, Group& g) {
    const auto size = static_cast<size_t>(g.size);
    const DeviceArray<int> x(range(g.rank + 1, 5)), sum(5), in_place(range(g.rank + 1, 5));
    CHECK_EQ(HcclAllReduce(x.data(), sum.data(), 5, int32, HCCL_REDUCE_SUM, g.comm, g.stream), 0);
    CHECK_EQ(HcclAllReduce(in_place.data(), in_place.data(), 5, int32, HCCL_REDUCE_MAX, g.comm, g.stream), 0);
    g.synchronize();
    const int ranks = g.size;
    for (int i = 0; i < 5; ++i) {
        CHECK_EQ(sum.values()[static_cast<size_t>(i)], ranks * (ranks + 1) / 2 + i * ranks);
        CHECK_EQ(in_place.values()[static_cast<size_t>(i)], ranks + i);
    }
    const DeviceArray<float> f(std::vector<float>{static_cast<float>(g.rank + 1)}), product(1), least(1);
    CHECK_EQ(HcclAllReduce(f.data(), product.data(), 1, HCCL_DATA_TYPE_FP32, HCCL_REDUCE_PROD, g.comm, g.stream), 0);
    CHECK_EQ(HcclAllReduce(f.data(), least.data(), 1, HCCL_DATA_TYPE_FP32, HCCL_REDUCE_MIN, g.comm, g.stream), 0);
    for (const HcclDataType type : {HCCL_DATA_TYPE_INT16, HCCL_DATA_TYPE_BFP16})
        CHECK_EQ(HcclAllReduce(f.data(), product.data(), 1, type, HCCL_REDUCE_PROD, g.comm, g.stream),
                 HCCL_E_NOT_SUPPORT);
    const DeviceArray<int> rooted(std::vector<int>(5, -1)), parts(range(g.rank, 2 * size)), part(2), unequal(2);
    CHECK_EQ(HcclReduce(x.data(), rooted.data(), 5, int32, HCCL_REDUCE_SUM, 0, g.comm, g.stream), 0);
    CHECK_EQ(HcclReduceScatter(parts.data(), part.data(), 2, int32, HCCL_REDUCE_SUM, g.comm, g.stream), 0);
    std::vector<uint64_t> counts(size), displs(size);
    for (size_t j = 0; j < size; ++j) {
        counts[j] = j == 0 ? 2 : 1;
        displs[j] = size - 1 - j;  // regions may overlap where they are read
    }
    CHECK_EQ(HcclReduceScatterV(parts.data(), counts.data(), displs.data(), unequal.data(), g.rank == 0 ? 2 : 1, int32,
                                HCCL_REDUCE_SUM, g.comm, g.stream),
             0);
    g.synchronize();
    float factorial = 1;
    for (int j = 1; j <= ranks; ++j) factorial *= static_cast<float>(j);
    CHECK_EQ(product.values()[0], factorial);
    CHECK_EQ(least.values()[0], 1.0f);
    const int ranks_sum = ranks * (ranks - 1) / 2;
    check_values(rooted, g.rank == 0 ? sum.values() : std::vector<int>(5, -1));
    check_values(part, {ranks_sum + ranks * 2 * g.rank, ranks_sum + ranks * (2 * g.rank + 1)});
    check_values(unequal, {ranks_sum + ranks * (ranks - 1 - g.rank)});
}

TEST(sub_communicators, Group& g) {
    HcclCommConfig config = hccl_default_config();
    std::strcpy(config.hcclCommName, "reversed");
    std::vector<uint32_t> ranks;
    for (int j = g.size - 1; j >= 0; --j) ranks.push_back(static_cast<uint32_t>(j));
    HcclComm sub = nullptr;
    CHECK_EQ(HcclCreateSubCommConfig(&g.comm, static_cast<uint32_t>(g.size), ranks.data(), 5,
                                     static_cast<uint32_t>(g.size - 1 - g.rank), &config, &sub),
             0);
    char name[hccl_comm_name_bytes];
    CHECK_EQ(HcclGetCommName(sub, name), 0);
    CHECK_EQ(std::string(name), std::string("reversed"));
    uint32_t rank = 99, size = 99;
    CHECK_EQ(HcclGetRankId(sub, &rank), 0);
    CHECK_EQ(HcclGetRankSize(sub, &size), 0);
    CHECK_EQ(rank, static_cast<uint32_t>(g.size - 1 - g.rank));
    CHECK_EQ(size, static_cast<uint32_t>(g.size));
    const DeviceArray<int> x(std::vector<int>{g.rank}), y(static_cast<size_t>(g.size));
    CHECK_EQ(HcclAllGather(x.data(), y.data(), 1, int32, sub, g.stream), 0);
    g.synchronize();
    check_values(y, std::vector<int>(ranks.begin(), ranks.end()));
    CHECK_EQ(HcclCommDestroy(sub), 0);
    CHECK_EQ(HcclAllGather(x.data(), y.data(), 1, int32, sub, g.stream), HCCL_E_PARA);
    check_message("comm has been destroyed");
    CHECK_EQ(HcclCommDestroy(sub), HCCL_E_PARA);
}

/// The name that a sub-communicator gets after a long one fits what HcclGetCommName has room for.
TEST(long_names) {
    HcclRootInfo info;
    CHECK_EQ(HcclGetRootInfo(&info), 0);
    HcclCommConfig config = hccl_default_config();
    std::memset(config.hcclCommName, 'x', hccl_comm_name_bytes - 1);
    HcclComm comm = nullptr, sub = nullptr;
    CHECK_EQ(HcclCommInitRootInfoConfig(1, &info, 0, &config, &comm), 0);
    config = hccl_default_config();
    uint32_t rank = 0;
    CHECK_EQ(HcclCreateSubCommConfig(&comm, 1, &rank, 7, 0, &config, &sub), 0);
    std::string name(2 * hccl_comm_name_bytes, '?');
    CHECK_EQ(HcclGetCommName(sub, name.data()), 0);
    CHECK_EQ(name,
             std::string(hccl_comm_name_bytes - 7, 'x') + "_sub_7" + '\0' + std::string(hccl_comm_name_bytes, '?'));
    CHECK_EQ(HcclCommDestroy(sub), 0);
    CHECK_EQ(HcclCommDestroy(comm), 0);
}

/// As HCCL: between one rank and itself the displacements are ignored.
TEST(one_rank) {
    in_group(1, [](Group& g) {
        const DeviceArray<int> x(range(0, 8)), y(std::vector<int>(8, -1));
        const uint64_t count = 2, sdispl = 3, rdispl = 5;
        CHECK_EQ(HcclAlltoAllV(x.data(), &count, &sdispl, int32, y.data(), &count, &rdispl, int32, g.comm, g.stream),
                 0);
        g.synchronize();
        check_values(y, {0, 1, -1, -1, -1, -1, -1, -1});
    });
}

/// Twice what the configuration says, or HCCL_BUFFSIZE, until the communicator is destroyed.
TEST(buffers_take_device_memory, Group&) {
    const auto free_mb = [] {
        size_t left = 0, total = 0;
        CHECK_EQ(aclrtGetMemInfo(ACL_HBM_MEM, &left, &total), 0);
        return static_cast<int64_t>(left >> 20);
    };
    HcclRootInfo info;
    CHECK_EQ(HcclGetRootInfo(&info), 0);
    HcclCommConfig config = hccl_default_config();
    for (const auto& [configured, variable, taken] :
         {std::tuple{hccl_config_not_set, "", 400}, {hccl_config_not_set, "100", 200}, {300u, "100", 600}}) {
        CHECK_EQ(setenv("HCCL_BUFFSIZE", variable, 1), 0);
        config.hcclBufferSize = configured;
        const int64_t before = free_mb();
        HcclComm comm = nullptr;
        CHECK_EQ(HcclCommInitRootInfoConfig(1, &info, 0, &config, &comm), 0);
        CHECK_EQ(before - free_mb(), int64_t{taken});
        CHECK_EQ(HcclCommDestroy(comm), 0);
        CHECK_EQ(free_mb(), before);
    }
    HcclComm none = nullptr;
    config.hcclBufferSize = static_cast<uint32_t>(free_mb() / 2 + 1);
    CHECK_EQ(HcclCommInitRootInfoConfig(1, &info, 0, &config, &none), HCCL_E_OOM);
    check_message("bytes free");
    CHECK_EQ(setenv("HCCL_BUFFSIZE", "many", 1), 0);
    CHECK_EQ(HcclCommInitRootInfo(1, &info, 0, &none), HCCL_E_PARA);
    check_message("HCCL_BUFFSIZE is 'many'");
}

/// A rank table as a file.
TEST(windows, Group& g) {
    void *own = nullptr, *args = nullptr, *context = nullptr, *peer = nullptr;
    uint64_t bytes = 0, peer_bytes = 0;
    char name[hccl_comm_name_bytes] = {};
    HcclComm by_name = nullptr;
    CHECK_EQ(HcclGetCommName(g.comm, name), 0);
    CHECK_EQ(HcclCommGetHandleWithName(name, &by_name), 0);
    CHECK(by_name == g.comm);
    CHECK_EQ(HcclCommGetHandleWithName("nobody", &by_name), HCCL_E_NOT_FOUND);

    CHECK_EQ(HcclGetHcclBuffer(g.comm, &own, &bytes), 0);
    CHECK(bytes > 0 && *static_cast<unsigned char*>(own) == 0xA5);
    const auto next = static_cast<uint64_t>((g.rank + 1) % g.size);
    if (g.size > 1) CHECK_EQ(HcclGetRemoteIpcHcclBuf(g.comm, next, &peer, &peer_bytes), HCCL_E_NOT_FOUND);
    CHECK_EQ(HcclGetRemoteIpcHcclBuf(g.comm, static_cast<uint64_t>(g.size), &peer, &peer_bytes), HCCL_E_PARA);

    CHECK_EQ(HcclKfcAllocOpArgs(&args), 0);
    CHECK_EQ(HcclCreateOpResCtx(g.comm, 8, args, &context), HCCL_E_PARA);  // no engine yet
    CHECK_EQ(HcclKfcOpArgsSetCommEngine(args, 3), HCCL_E_NOT_SUPPORT);
    CHECK_EQ(HcclKfcOpArgsSetCommEngine(args, 4), 0);
    CHECK_EQ(HcclCreateOpResCtx(g.comm, 2, args, &context), HCCL_E_NOT_SUPPORT);
    CHECK_EQ(HcclCreateOpResCtx(g.comm, 8, args, &context), 0);
    CHECK_EQ(HcclKfcFreeOpArgs(args), 0);
    CHECK_EQ(HcclKfcFreeOpArgs(args), HCCL_E_PARA);

    CHECK_EQ(HcclGetRemoteIpcHcclBuf(g.comm, next, &peer, &peer_bytes), 0);
    CHECK_EQ(peer_bytes, bytes);
    static_cast<int*>(peer)[(bytes / sizeof(int)) - 1] = 100 + g.rank;  // the last word of the peer's buffer
    CHECK_EQ(HcclBarrier(g.comm, g.stream), 0);
    g.synchronize();
    CHECK_EQ(static_cast<int*>(own)[(bytes / sizeof(int)) - 1], 100 + (g.rank + g.size - 1) % g.size);
    CHECK_EQ(aclrtMemcpyAsync(peer, 8, own, 8, ACL_MEMCPY_DEVICE_TO_DEVICE, g.stream), 0);  // they are device memory
    g.synchronize();
}

TEST(rank_table) {
    const std::string path = "/tmp/emulator-rank-table-" + std::to_string(getpid()) + ".json";
    const auto write = [&](const std::string& status, const std::string& second) {
        FILE* file = std::fopen(path.c_str(), "w");
        std::fprintf(
            file,
            "{\"status\": \"%s\", \"version\": \"1.0\", \"server_count\": \"1\", \"server_list\": [{\"server_id\":"
            " \"a\", \"device\": [{\"device_id\": \"0\", \"rank_id\": \"0\"}, {\"device_id\": \"1\", \"rank_id\":"
            " \"%s\"}]}]}",
            status.c_str(), second.c_str());
        std::fclose(file);
    };
    write("completed", "1");
    all_pass(run_processes(2, [&](int rank) {
        HcclComm comm = nullptr;
        CHECK_EQ(HcclCommInitClusterInfo(path.c_str(), static_cast<uint32_t>(rank), &comm), 0);
        uint32_t size = 0;
        CHECK_EQ(HcclGetRankSize(comm, &size), 0);
        CHECK_EQ(size, 2u);
        CHECK_EQ(HcclCommDestroy(comm), 0);
    }));
    HcclComm comm = nullptr;
    CHECK_EQ(HcclCommInitClusterInfo(path.c_str(), 2, &comm), HCCL_E_PARA);
    write("completed", "0");
    CHECK_EQ(HcclCommInitClusterInfo(path.c_str(), 0, &comm), HCCL_E_PARA);
    write("initializing", "1");
    CHECK_EQ(HcclCommInitClusterInfo(path.c_str(), 0, &comm), HCCL_E_UNAVAIL);
    unlink(path.c_str());
    CHECK_EQ(HcclCommInitClusterInfo(path.c_str(), 0, &comm), HCCL_E_OPEN_FILE_FAILURE);
}

/// The ranks are devices of one process. The last test, because it leaves threads.
TEST(one_process) {
    HcclComm comms[3] = {};
    int32_t devices[3] = {0, 1, 2};
    CHECK_EQ(HcclCommInitAll(3, devices, comms), 0);
    std::deque<Stream> streams;
    std::deque<DeviceArray<int>> buffers;
    for (int i = 0; i < 3; ++i) {
        CHECK_EQ(aclrtSetDevice(i), 0);
        void* data = buffers.emplace_back(std::vector<int>{1 << i}).data();
        CHECK_EQ(HcclAllReduce(data, data, 1, int32, HCCL_REDUCE_SUM, comms[i], streams.emplace_back()), 0);
    }
    for (int i = 0; i < 3; ++i) {
        CHECK_EQ(aclrtSetDevice(i), 0);
        CHECK_EQ(aclrtSynchronizeStream(streams[static_cast<size_t>(i)]), 0);
        check_values(buffers[static_cast<size_t>(i)], {7});
        CHECK_EQ(HcclCommDestroy(comms[i]), 0);
    }
    CHECK_EQ(aclrtSetDevice(0), 0);
}

}  // namespace
