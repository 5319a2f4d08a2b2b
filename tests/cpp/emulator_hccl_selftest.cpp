// The emulated HCCL between processes: every function against what it should give, then all ways to use it wrongly.
#include <chrono>
#include <csignal>
#include <numeric>

#include "emulator_fixture.h"

using namespace testing;

namespace {

HcclRootInfo root;  // made before the processes fork

struct Group {
    HcclComm comm = nullptr;
    aclrtStream stream = nullptr;
    int rank, size;

    Group(int rank_, int size_) : rank(rank_), size(size_) {
        CHECK_EQ(setenv("RANK", std::to_string(rank).c_str(), 1), 0);
        CHECK_EQ(aclrtSetDevice(rank % 8), 0);
        CHECK_EQ(HcclCommInitRootInfo(static_cast<uint32_t>(size), &root, static_cast<uint32_t>(rank), &comm), 0);
        stream = new_stream();
    }
    ~Group() {
        aclrtSynchronizeStream(stream);
        aclrtDestroyStream(stream);
        HcclCommDestroy(comm);
    }
    void synchronize() const { CHECK_EQ(aclrtSynchronizeStream(stream), 0); }
};

/// Runs the body in `size` processes, each with a communicator of its own.
void in_group(int size, const std::function<void(Group&)>& body) {
    CHECK_EQ(HcclGetRootInfo(&root), 0);
    all_pass(run_processes(size, [&](int rank) {
        Group group(rank, size);
        body(group);
    }));
}

std::vector<int> range(int first, size_t count) {
    std::vector<int> values(count);
    std::iota(values.begin(), values.end(), first);
    return values;
}

void check_values(const DeviceArray<int>& array, const std::vector<int>& expected) {
    const std::vector<int> values = array.values();
    for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(values[i], expected[i]);
}

constexpr HcclDataType int32 = HCCL_DATA_TYPE_INT32;

/// Rank r sends (r + j) % 3 elements, 100 r + 10 j + k, to rank j; a gap of one element after every region.
void all_to_all_v(Group& g, size_t scale) {
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

void movement(Group& g) {
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

void reductions(Group& g) {
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

void messages(Group& g) {
    const uint32_t next = static_cast<uint32_t>((g.rank + 1) % g.size),
                   previous = static_cast<uint32_t>((g.rank + g.size - 1) % g.size);
    const DeviceArray<int> x(range(10 * g.rank, 3)), y(3), z(3);
    HcclSendRecvItem items[] = {{HCCL_SEND, x.data(), 3, int32, next}, {HCCL_RECV, y.data(), 3, int32, previous}};
    CHECK_EQ(HcclBatchSendRecv(items, 2, g.comm, g.stream), 0);
    CHECK_EQ(HcclGroupStart(), 0);
    CHECK_EQ(HcclSend(x.data(), 3, int32, next, g.comm, g.stream), 0);
    CHECK_EQ(HcclRecv(z.data(), 3, int32, previous, g.comm, g.stream), 0);
    CHECK_EQ(HcclGroupEnd(), 0);
    g.synchronize();
    check_values(y, range(10 * static_cast<int>(previous), 3));
    check_values(z, range(10 * static_cast<int>(previous), 3));
    if (g.size == 1) return;
    const DeviceArray<int> w(std::vector<int>{g.rank});
    if (g.rank == 0) CHECK_EQ(HcclSend(w.data(), 1, int32, 1, g.comm, g.stream), 0);
    if (g.rank == 1) CHECK_EQ(HcclRecv(w.data(), 1, int32, 0, g.comm, g.stream), 0);
    g.synchronize();
    if (g.rank == 1) check_values(w, {0});
}

void sub_communicators(Group& g) {
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

/// Called wrongly by one rank alone: refused at once, and the others hear nothing of it.
void refused_at_once(Group& g) {
    const DeviceArray<int> x(8), y(8);
    const std::vector<uint64_t> ones(static_cast<size_t>(g.size), 1), wide(static_cast<size_t>(g.size), 100);
    int host[8] = {};
    const auto v = [&](const void* in, const uint64_t* counts, const void* out, HcclComm comm, aclrtStream stream) {
        return HcclAlltoAllV(in, counts, ones.data(), int32, out, counts, ones.data(), int32, comm, stream);
    };
    CHECK_EQ(v(x.data(), ones.data(), y.data(), nullptr, g.stream), HCCL_E_PTR);
    CHECK_EQ(v(x.data(), ones.data(), y.data(), g.comm, nullptr), HCCL_E_PTR);
    check_message("stream is null");
    CHECK_EQ(v(x.data(), nullptr, y.data(), g.comm, g.stream), HCCL_E_PTR);
    check_message("sendCounts is null");
    CHECK_EQ(v(nullptr, ones.data(), y.data(), g.comm, g.stream), HCCL_E_PTR);
    CHECK_EQ(v(x.data(), ones.data(), x.data(), g.comm, g.stream), HCCL_E_PARA);
    check_message("sendBuf and recvBuf share memory");
    CHECK_EQ(v(host, ones.data(), y.data(), g.comm, g.stream), HCCL_E_PARA);
    check_message("is no device memory");
    CHECK_EQ(v(x.data(), wide.data(), y.data(), g.comm, g.stream), HCCL_E_PARA);
    check_message("of an allocation of 32 bytes");
    const std::vector<uint64_t> huge(static_cast<size_t>(g.size), uint64_t{1} << 40);
    CHECK_EQ(v(x.data(), huge.data(), y.data(), g.comm, g.stream), HCCL_E_PARA);
    CHECK_EQ(HcclAllReduce(x.data(), y.data(), 9, int32, HCCL_REDUCE_SUM, g.comm, g.stream), HCCL_E_PARA);
    CHECK_EQ(HcclAllReduce(x.data(), y.data(), 1, HCCL_DATA_TYPE_UINT8, HCCL_REDUCE_SUM, g.comm, g.stream),
             HCCL_E_NOT_SUPPORT);
    CHECK_EQ(HcclAllReduce(x.data(), y.data(), 1, static_cast<HcclDataType>(13), HCCL_REDUCE_SUM, g.comm, g.stream),
             HCCL_E_PARA);
    CHECK_EQ(HcclBroadcast(x.data(), 1, int32, 9, g.comm, g.stream), HCCL_E_PARA);
    CHECK_EQ(HcclSend(x.data(), 1, int32, 9, g.comm, g.stream), HCCL_E_PARA);
    CHECK_EQ(HcclGroupEnd(), HCCL_E_PARA);
    HcclResult error = HCCL_E_RESERVED;
    CHECK_EQ(HcclGetCommAsyncError(g.comm, &error), 0);
    CHECK_EQ(error, HCCL_SUCCESS);
    all_to_all_v(g, 1);
}

/// Every rank meets the failure when it synchronizes, and the communicator remembers it.
void check_async(const Group& g, HcclResult expected, const std::string& message = "") {
    CHECK(aclrtSynchronizeStream(g.stream) != 0);
    HcclResult error = HCCL_SUCCESS;
    CHECK_EQ(HcclGetCommAsyncError(g.comm, &error), 0);
    CHECK_EQ(error, expected);
    if (!message.empty()) check_message(message);
}

/// What only the ranks together can see.
void disagreements() {
    const auto disagree = [](const std::function<HcclResult(Group&, void*, void*)>& call) {
        in_group(3, [&](Group& g) {
            const DeviceArray<int> x(8), y(std::vector<int>(8, -1));
            CHECK_EQ(call(g, x.data(), y.data()), 0);
            check_async(g, HCCL_E_PARA);
            check_values(y, std::vector<int>(8, -1));
        });
    };
    disagree([](Group& g, void* x, void* y) {
        return HcclAllReduce(x, y, g.rank == 1 ? 2 : 1, int32, HCCL_REDUCE_SUM, g.comm, g.stream);
    });
    disagree([](Group& g, void* x, void* y) {
        return HcclAllReduce(x, y, 1, g.rank == 2 ? HCCL_DATA_TYPE_FP32 : int32, HCCL_REDUCE_SUM, g.comm, g.stream);
    });
    disagree([](Group& g, void* x, void* y) {
        return HcclAllReduce(x, y, 1, int32, g.rank == 0 ? HCCL_REDUCE_MAX : HCCL_REDUCE_SUM, g.comm, g.stream);
    });
    disagree([](Group& g, void* x, void* y) {
        return g.rank == 0 ? HcclAllGather(x, y, 1, int32, g.comm, g.stream)
                           : HcclAllReduce(x, y, 1, int32, HCCL_REDUCE_SUM, g.comm, g.stream);
    });
    disagree([](Group& g, void* x, void*) {
        return HcclBroadcast(x, 1, int32, static_cast<uint32_t>(g.rank % 2), g.comm, g.stream);
    });
    disagree([](Group& g, void* x, void* y) {  // rank 1 sends 2 where 1 is expected
        const std::vector<uint64_t> ones(3, 1), twos{1, 1, 2}, places{0, 2, 4};
        return HcclAlltoAllV(x, g.rank == 1 ? twos.data() : ones.data(), places.data(), int32, y, ones.data(),
                             places.data(), int32, g.comm, g.stream);
    });
}

/// A buffer that is freed while its collective is queued: all ranks fail, none waits for ever.
void freed_too_early(Group& g) {
    option("task_delay_us", "100000");
    void* memory = nullptr;
    CHECK_EQ(aclrtMalloc(&memory, 64, ACL_MEM_MALLOC_HUGE_FIRST), 0);
    CHECK_EQ(HcclAllReduce(memory, memory, 4, int32, HCCL_REDUCE_SUM, g.comm, g.stream), 0);
    CHECK_EQ(HcclCommDestroy(g.comm), HCCL_E_AGAIN);
    if (g.rank == 0) CHECK_EQ(aclrtFree(memory), 0);
    check_async(g, HCCL_E_PARA);
    option("task_delay_us", "0");
}

void faults() {
    in_group(2, [](Group& g) {  // zeros and success
        option("faults", "HcclAllGather@1=zeros");
        const DeviceArray<int> x(std::vector<int>{g.rank + 1}), y(2);
        CHECK_EQ(HcclAllGather(x.data(), y.data(), 1, int32, g.comm, g.stream), 0);
        g.synchronize();
        check_values(y, g.rank == 1 ? std::vector<int>{0, 0} : std::vector<int>{1, 2});
    });
    in_group(2, [](Group& g) {  // the second call fails at once, on rank 0 alone; the other waits in vain
        option("faults", "HcclAllGather@0#2=fail:4");
        option("exec_timeout", "0.5");
        const DeviceArray<int> x(1), y(2);
        CHECK_EQ(HcclAllGather(x.data(), y.data(), 1, int32, g.comm, g.stream), 0);
        g.synchronize();
        const HcclResult second = HcclAllGather(x.data(), y.data(), 1, int32, g.comm, g.stream);
        CHECK_EQ(second, g.rank == 0 ? HCCL_E_INTERNAL : HCCL_SUCCESS);
        if (g.rank == 1) check_async(g, HCCL_E_TIMEOUT);
        if (g.rank == 0) sleep(2);  // once it has left, it is lost
    });
    in_group(2, [](Group& g) {
        option("faults", "HcclAllGather@0=async:21;HcclAllGather@1=delay:50");
        const DeviceArray<int> x(1), y(2);
        CHECK_EQ(HcclAllGather(x.data(), y.data(), 1, int32, g.comm, g.stream), 0);
        if (g.rank == 0)
            check_async(g, HCCL_E_REMOTE);
        else
            g.synchronize();
    });
    in_group(2, [](Group& g) {  // takes no part
        option("faults", "HcclAllGather@0=skip");
        option("exec_timeout", "0.5");
        const DeviceArray<int> x(1), y(2);
        CHECK_EQ(HcclAllGather(x.data(), y.data(), 1, int32, g.comm, g.stream), 0);
        if (g.rank == 1)
            check_async(g, HCCL_E_TIMEOUT);
        else
            sleep(2);
    });
}

/// A rank that dies in a collective is lost to the others at once; one that dies before it joins, after the timeout.
void deaths() {
    CHECK_EQ(HcclGetRootInfo(&root), 0);
    const std::vector<int> in_collective = run_processes(3, [](int rank) {
        option("faults", "HcclAllGather@1=die");
        Group g(rank, 3);
        const DeviceArray<int> x(1), y(3);
        CHECK_EQ(HcclAllGather(x.data(), y.data(), 1, int32, g.comm, g.stream), 0);
        check_async(g, HCCL_E_REMOTE);
    });
    CHECK(in_collective == (std::vector<int>{0, 128 + SIGKILL, 0}));
    CHECK_EQ(HcclGetRootInfo(&root), 0);
    const std::vector<int> in_init = run_processes(3, [](int rank) {
        CHECK_EQ(setenv("RANK", std::to_string(rank).c_str(), 1), 0);
        option("faults", "HcclCommInitRootInfo@2=die");
        option("connect_timeout", "1");
        HcclComm comm = nullptr;
        CHECK_EQ(HcclCommInitRootInfo(3, &root, static_cast<uint32_t>(rank), &comm), HCCL_E_TIMEOUT);
    });
    CHECK(in_init == (std::vector<int>{0, 0, 128 + SIGKILL}));
}

/// As HCCL: between one rank and itself the displacements are ignored.
void one_rank(Group& g) {
    const DeviceArray<int> x(range(0, 8)), y(std::vector<int>(8, -1));
    const uint64_t count = 2, sdispl = 3, rdispl = 5;
    CHECK_EQ(HcclAlltoAllV(x.data(), &count, &sdispl, int32, y.data(), &count, &rdispl, int32, g.comm, g.stream), 0);
    g.synchronize();
    check_values(y, {0, 1, -1, -1, -1, -1, -1, -1});
    reductions(g);
    messages(g);
}

/// Twice what the configuration says, or HCCL_BUFFSIZE, until the communicator is destroyed.
void buffers_take_device_memory(Group&) {
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

/// The ranks are devices of one process.
void one_process() {
    HcclComm comms[3] = {};
    int32_t devices[3] = {0, 1, 2};
    CHECK_EQ(HcclCommInitAll(3, devices, comms), 0);
    std::vector<aclrtStream> streams;
    std::vector<std::unique_ptr<DeviceArray<int>>> buffers;
    for (int i = 0; i < 3; ++i) {
        CHECK_EQ(aclrtSetDevice(i), 0);
        streams.push_back(new_stream());
        buffers.push_back(std::make_unique<DeviceArray<int>>(std::vector<int>{1 << i}));
        void* data = buffers.back()->data();
        CHECK_EQ(HcclAllReduce(data, data, 1, int32, HCCL_REDUCE_SUM, comms[i], streams.back()), 0);
    }
    for (int i = 0; i < 3; ++i) {
        CHECK_EQ(aclrtSetDevice(i), 0);
        CHECK_EQ(aclrtSynchronizeStream(streams[static_cast<size_t>(i)]), 0);
        check_values(*buffers[static_cast<size_t>(i)], {7});
        CHECK_EQ(aclrtDestroyStream(streams[static_cast<size_t>(i)]), 0);
        CHECK_EQ(HcclCommDestroy(comms[i]), 0);
    }
    CHECK_EQ(aclrtSetDevice(0), 0);
}

/// A rank table as a file.
void rank_table() {
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

}  // namespace

int main(int argc, char** argv) {
    option("verbose", std::getenv("VERBOSE") != nullptr ? "1" : "0");
    aclrtSetDevice(0);
    const auto group = [](int size, void (*body)(Group&)) { return [=] { in_group(size, body); }; };
    return run_all(argc, argv,
                   {{"movement, 2 ranks", group(2, movement)},
                    {"movement, 4 ranks", group(4, movement)},
                    {"reductions", group(3, reductions)},
                    {"messages", group(3, messages)},
                    {"sub-communicators", group(3, sub_communicators)},
                    {"refused at once", group(2, refused_at_once)},
                    {"disagreements", disagreements},
                    {"freed too early", group(2, freed_too_early)},
                    {"faults", faults},
                    {"deaths", deaths},
                    {"one rank", group(1, one_rank)},
                    {"buffers take device memory", group(1, buffers_take_device_memory)},
                    {"rank table", rank_table},
                    {"one process", one_process}});  // last: it leaves threads in this process
}
