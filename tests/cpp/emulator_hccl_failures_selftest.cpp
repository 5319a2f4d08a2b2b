// The emulated HCCL used wrongly, and by ranks that disagree.
#include <pthread.h>
#include <sys/resource.h>

#include <fstream>

#include "hccl_group.h"

using namespace testing;

namespace {

/// Called wrongly by one rank alone: refused at once, and the others hear nothing of it.
TEST(refused_at_once, Group& g) {
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
    check_message("is not device memory");
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
void check_async(const Group& g, HcclResult expected) {
    CHECK(aclrtSynchronizeStream(g.stream) != 0);
    HcclResult error = HCCL_SUCCESS;
    CHECK_EQ(HcclGetCommAsyncError(g.comm, &error), 0);
    CHECK_EQ(error, expected);
}

/// What only the ranks together can see.
TEST(disagreements) {
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
TEST(freed_too_early, Group& g) {
    void* const memory = allocated(64);
    Held held(g.stream);
    CHECK_EQ(HcclAllReduce(memory, memory, 4, int32, HCCL_REDUCE_SUM, g.comm, g.stream), 0);
    CHECK_EQ(HcclCommDestroy(g.comm), HCCL_E_AGAIN);
    if (g.rank == 0) CHECK_EQ(aclrtFree(memory), 0);
    held.let_go();
    check_async(g, HCCL_E_PARA);
}

/// A rank that has memory for one of the threads of its messages alone fails; its peer waits for the timeout.
TEST(too_few_threads_for_messages) {
    in_group(2, [](Group& g) {
        option("exec_timeout", "1");
        const DeviceArray<int> x(8), y(8);
        const auto peer = static_cast<uint32_t>(1 - g.rank);
        HcclSendRecvItem items[] = {{HCCL_SEND, x.data(), 1, int32, peer}, {HCCL_RECV, y.data(), 1, int32, peer}};
        if (g.rank == 0) {
            pthread_attr_t attributes;
            CHECK_EQ(pthread_attr_init(&attributes), 0);
            CHECK_EQ(pthread_attr_setstacksize(&attributes, size_t{1} << 30), 0);
            CHECK_EQ(pthread_setattr_default_np(&attributes), 0);
            rlim_t pages = 0;
            std::ifstream("/proc/self/statm") >> pages;
            const rlimit limit{pages * 4096 + (rlim_t{3} << 29), RLIM_INFINITY};
            CHECK_EQ(setrlimit(RLIMIT_AS, &limit), 0);
        }
        CHECK_EQ(HcclBatchSendRecv(items, 2, g.comm, g.stream), 0);
        check_async(g, g.rank == 0 ? HCCL_E_INTERNAL : HCCL_E_TIMEOUT);
    });
}

}  // namespace
