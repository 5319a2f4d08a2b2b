// all_to_all_v with counts in device memory, and a quantized all-reduce, by their aclnn interface: a thread per device.
//
//     c++ -std=c++20 -Iop_host examples/aclnn_all_to_all_v.cpp -LLIBRARIES -lcust_opapi -lnnopbase -lhccl -lascendcl
//
// LIBRARIES is the folder that `python -c "import alltoallv_emulator as e; print(e.library_folder())"` prints; set
// LD_LIBRARY_PATH to it as well. The first argument is the number of devices (4).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "all_to_all_v/op_api/aclnn_all_to_all_v.h"
#include "quant_all_reduce/op_api/aclnn_quant_all_reduce.h"
#include "runtime/abi/hccl.h"

extern "C" HcclResult HcclCommInitAll(uint32_t ndev, int32_t* devices, HcclComm* comms);

namespace {

void check(const char* call, int status) {
    if (status == 0) return;
    std::fprintf(stderr, "%s returned %d: %s\n", call, status, aclGetRecentErrMsg());
    std::exit(1);
}
#define CHECKED(call) check(#call, call)

/// A tensor of one type on the device.
template <class T>
struct Tensor {
    aclTensor* tensor;
    void* data = nullptr;
    size_t bytes;

    Tensor(aclDataType dtype, const std::vector<int64_t>& shape, const std::vector<T>& values)
        : bytes(values.size() * sizeof(T)) {
        CHECKED(aclrtMalloc(&data, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
        CHECKED(aclrtMemcpy(data, bytes, values.data(), bytes, ACL_MEMCPY_HOST_TO_DEVICE));
        std::vector<int64_t> strides(shape.size(), 1);
        for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
        tensor = aclCreateTensor(shape.data(), shape.size(), dtype, strides.data(), 0, ACL_FORMAT_ND, shape.data(),
                                 shape.size(), data);
    }
    ~Tensor() {
        aclDestroyTensor(tensor);
        aclrtFree(data);
    }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    std::vector<T> values() const {
        std::vector<T> host(bytes / sizeof(T));
        CHECKED(aclrtMemcpy(host.data(), bytes, data, bytes, ACL_MEMCPY_DEVICE_TO_HOST));
        return host;
    }
};

/// The second call, with a workspace of the size that the first has asked for.
template <class Operator>
void run(Operator operation, uint64_t bytes, aclOpExecutor* executor, aclrtStream stream) {
    void* workspace = nullptr;
    if (bytes > 0) CHECKED(aclrtMalloc(&workspace, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    CHECKED(operation(workspace, bytes, executor, stream));
    CHECKED(aclrtSynchronizeStreamWithTimeout(stream, -1));
    if (workspace != nullptr) CHECKED(aclrtFree(workspace));
}

/// Rank r sends r + 1 rows of two numbers, r and j, to every rank j.
void exchange(int rank, int size, const char* group, aclrtStream stream) {
    const int64_t ranks = size, rows = ranks * (rank + 1), capacity = ranks * (ranks + 1) / 2;
    std::vector<float> input;
    for (int64_t row = 0; row < rows; ++row)
        input.insert(input.end(), {static_cast<float>(rank), static_cast<float>(row / (rank + 1))});
    const Tensor<float> x(ACL_FLOAT, {rows, 2}, input);
    const Tensor<float> out(ACL_FLOAT, {capacity, 2}, std::vector<float>(static_cast<size_t>(2 * capacity), -1.0F));
    const std::vector<int64_t> zeros(static_cast<size_t>(ranks), 0);
    const Tensor<int64_t> counts(ACL_INT64, {ranks}, std::vector<int64_t>(static_cast<size_t>(ranks), rank + 1));
    const Tensor<int64_t> received(ACL_INT64, {ranks}, zeros);
    uint32_t lanes = 0;
    uint64_t bytes = 0;
    CHECKED(aclnnAlltoallvGetWindows(group, &lanes, &bytes));
    if (lanes == 0) lanes = 1;  // HCCL's calls serve
    const Tensor<int32_t> status(ACL_INT32, {lanes, 8}, std::vector<int32_t>(8 * lanes, -1));
    aclOpExecutor* executor = nullptr;
    CHECKED(aclnnAlltoallvAllToAllVGetWorkspaceSize(x.tensor, counts.tensor, nullptr, group, false, out.tensor,
                                                    received.tensor, status.tensor, &bytes, &executor));
    run(aclnnAlltoallvAllToAllV, bytes, executor, stream);
    std::vector<float> expected;
    for (int j = 0; j < size; ++j)
        for (int k = 0; k <= j; ++k) expected.insert(expected.end(), {static_cast<float>(j), static_cast<float>(rank)});
    const bool right = status.values()[0] == 0 && out.values() == expected;
    std::printf("rank %d of %d: %lld rows, %s\n", rank, size, static_cast<long long>(capacity),
                right ? "right" : "WRONG");
    if (!right) std::exit(1);
}

/// Every rank gives 127, 126, ... 0: int8 codes hold them exactly, so the sum is also exact.
void reduce(int rank, int size, const char* group, aclrtStream stream) {
    std::vector<float> values;
    for (int i = 0; i < 128; ++i) values.push_back(static_cast<float>(127 - i));
    const Tensor<float> x(ACL_FLOAT, {128}, values), out(ACL_FLOAT, {128}, std::vector<float>(128, -1.0F));
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    CHECKED(aclnnAlltoallvQuantAllReduceGetWorkspaceSize(x.tensor, nullptr, nullptr, group, 8, 128, false, true,
                                                         out.tensor, nullptr, &bytes, &executor));
    run(aclnnAlltoallvQuantAllReduce, bytes, executor, stream);
    for (float& value : values) value *= static_cast<float>(size);
    const bool right = out.values() == values;
    std::printf("rank %d of %d: sum of 128 elements, %s\n", rank, size, right ? "right" : "WRONG");
    if (!right) std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
    const int size = argc > 1 ? std::atoi(argv[1]) : 4;
    std::vector<int32_t> devices;
    for (int i = 0; i < size; ++i) devices.push_back(i);
    std::vector<HcclComm> comms(devices.size());
    CHECKED(aclInit(nullptr));
    CHECKED(HcclCommInitAll(static_cast<uint32_t>(size), devices.data(), comms.data()));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) {
        threads.emplace_back([=, &comms] {
            CHECKED(aclrtSetDevice(rank));
            aclrtStream stream = nullptr;
            CHECKED(aclrtCreateStream(&stream));
            const HcclComm comm = comms[static_cast<size_t>(rank)];
            char group[hccl_comm_name_bytes] = {};
            CHECKED(HcclGetCommName(comm, group));
            exchange(rank, size, group, stream);
            reduce(rank, size, group, stream);
            CHECKED(aclrtDestroyStream(stream));
            CHECKED(HcclCommDestroy(comm));
        });
    }
    for (std::thread& thread : threads) thread.join();
    return 0;
}
