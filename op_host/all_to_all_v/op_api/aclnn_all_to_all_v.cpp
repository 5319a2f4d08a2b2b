#include "all_to_all_v/op_api/aclnn_all_to_all_v.h"

#include <numeric>

#include "op_kernel/ascendc/all_to_all_v_tiling.h"
#include "runtime/aclnn/call.h"
#include "runtime/aclnn/platform.h"
#include "runtime/aclnn/windows.h"

using namespace alltoallv::aclnn;

namespace {

// The kernel's numbers (LaneStatus).
constexpr int64_t done = 0, overflow = 4, bad_counts = 5, mismatch = 6, unexpected = 7;

/// What a rank tells the others before data move.
struct Verdict {
    int64_t code, row_bytes;
};

struct Call {
    View x, send_counts, sdispls, out, recv_counts, status;
    Group group;
    bool expects;

    int64_t row_bytes() const { return row_bytes_of(x); }
    size_t ranks() const { return group.size; }
};

void synchronize(aclrtStream stream) {
    require_success("aclrtSynchronizeStreamWithTimeout", aclrtSynchronizeStreamWithTimeout(stream, -1));
}

std::vector<int64_t> read(const void* device, size_t count) {
    std::vector<int64_t> values(count);
    const size_t bytes = count * sizeof(int64_t);
    require_success("aclrtMemcpy", aclrtMemcpy(values.data(), bytes, device, bytes, ACL_MEMCPY_DEVICE_TO_HOST));
    return values;
}

void write(void* device, const void* host, size_t bytes) {
    require_success("aclrtMemcpy", aclrtMemcpy(device, bytes, host, bytes, ACL_MEMCPY_HOST_TO_DEVICE));
}

/// True if all blocks are rows of the input.
bool inside(const std::vector<int64_t>& counts, const std::vector<int64_t>& displs, int64_t rows) {
    for (size_t j = 0; j < counts.size(); ++j)
        if (counts[j] < 0 || displs[j] < 0 || counts[j] > rows || displs[j] > rows - counts[j]) return false;
    return true;
}

std::vector<int64_t> packed(const std::vector<int64_t>& counts) {
    std::vector<int64_t> displs;
    uint64_t next = 0;  // wraps for counts that are refused
    for (const int64_t count : counts) {
        displs.push_back(static_cast<int64_t>(next));
        next += static_cast<uint64_t>(count);
    }
    return displs;
}

std::vector<uint64_t> in_bytes(const std::vector<int64_t>& rows, int64_t row_bytes) {
    std::vector<uint64_t> bytes;
    for (const int64_t count : rows) bytes.push_back(static_cast<uint64_t>(count * row_bytes));
    return bytes;
}

/// Sends every rank its count; `received` is device memory. Counts of ranks that have failed also travel.
void exchange_counts(const Call& call, void* sent, void* received, aclrtStream stream) {
    const std::vector<uint64_t> ones(call.ranks(), 1);
    std::vector<uint64_t> places(call.ranks());
    std::iota(places.begin(), places.end(), 0);
    const auto type = HCCL_DATA_TYPE_INT64;
    require_success("HcclAlltoAllV", HcclAlltoAllV(sent, ones.data(), places.data(), type, received, ones.data(),
                                                   places.data(), type, call.group.comm, stream));
    synchronize(stream);
}

/// Returns the code that all ranks agree on, and the first rank that has it.
std::pair<int64_t, int64_t> agree(const Call& call, int64_t code, char* memory, aclrtStream stream) {
    const Verdict own{code, call.row_bytes()};
    char* all = memory + sizeof own;
    write(memory, &own, sizeof own);
    require_success("HcclAllGather", HcclAllGather(memory, all, 2, HCCL_DATA_TYPE_INT64, call.group.comm, stream));
    synchronize(stream);
    const std::vector<int64_t> verdicts = read(all, 2 * call.ranks());
    for (size_t j = 0; j < call.ranks(); ++j)
        if (verdicts[2 * j] != done) return {verdicts[2 * j], static_cast<int64_t>(j)};
    for (size_t j = 0; j < call.ranks(); ++j)
        if (verdicts[2 * j + 1] != verdicts[1]) return {mismatch, static_cast<int64_t>(j)};
    return {done, 0};
}

/// One kernel through the windows: the host waits for nothing.
Run on_device(const Call& call, std::shared_ptr<const alltoallv_kernels::WindowTiling> windows) {
    const alltoallv_kernels::AllToAllVTiling numbers{*windows,
                                                     static_cast<uint64_t>(call.row_bytes()),
                                                     static_cast<uint64_t>(call.x.shape[0]),
                                                     static_cast<uint64_t>(call.out.shape[0]),
                                                     call.sdispls.data != nullptr,
                                                     call.expects};
    return [=](char* tiling, aclrtStream stream) {
        (void)windows;  // live as long as the executor
        std::vector<Argument> arguments;
        for (const View& view : {call.x, call.send_counts, call.sdispls, call.out, call.recv_counts, call.status})
            arguments.push_back(view.argument());
        launch("alltoallv_all_to_all_v", numbers.window.lanes, arguments, numbers, tiling, stream);
    };
}

/// Where there are no windows: HCCL's calls, after the host has read the counts.
void on_host(const Call& call, char* memory, aclrtStream stream) {
    synchronize(stream);
    const std::vector<int64_t> counts = read(call.send_counts.data, call.ranks());
    const std::vector<int64_t> displs =
        call.sdispls.data == nullptr ? packed(counts) : read(call.sdispls.data, call.ranks());
    int64_t code = inside(counts, displs, call.x.shape[0]) ? done : bad_counts;
    const std::vector<int64_t> expected = read(call.recv_counts.data, call.ranks());
    exchange_counts(call, call.send_counts.data, call.recv_counts.data, stream);
    const std::vector<int64_t> received = read(call.recv_counts.data, call.ranks());
    if (call.expects) write(call.recv_counts.data, expected.data(), expected.size() * sizeof(int64_t));
    if (code == done && call.expects && expected != received) code = unexpected;
    int64_t room = call.out.shape[0];
    for (const int64_t rows : received) {
        if (code == done && rows > room) code = overflow;
        if (rows > 0) room -= std::min(rows, room);
    }
    const auto [agreed, rank] = agree(call, code, memory, stream);
    std::vector<int32_t> status(static_cast<size_t>(call.status.numel()), 0);
    for (size_t i = 0; i < status.size(); i += 8) {
        status[i] = static_cast<int32_t>(agreed);
        status[i + 1] = static_cast<int32_t>(rank);
    }
    write(call.status.data, status.data(), status.size() * sizeof(int32_t));
    if (agreed != done) return;
    const int64_t bytes = call.row_bytes();
    std::vector<std::vector<uint64_t>> arrays = {in_bytes(counts, bytes), in_bytes(displs, bytes),
                                                 in_bytes(received, bytes), in_bytes(packed(received), bytes)};
    const auto type = HCCL_DATA_TYPE_INT8;
    require_success("HcclAlltoAllV", HcclAlltoAllV(call.x.data, arrays[0].data(), arrays[1].data(), type, call.out.data,
                                                   arrays[2].data(), arrays[3].data(), type, call.group.comm, stream));
    keep_until_done(stream, std::make_shared<const std::vector<std::vector<uint64_t>>>(std::move(arrays)));
}

void get_windows(const char* group, const Highest& highest, uint32_t* lanes, uint64_t* lane_bytes) {
    require_pointer("lanes", lanes);
    require_pointer("laneBytes", lane_bytes);
    const auto windows = windows_of(group_named(group), highest);
    *lanes = windows ? windows->lanes : 0;
    *lane_bytes = windows ? windows->lane_bytes : 0;
}

void check_ranks(const View& array, size_t ranks) {
    if (array.numel() != static_cast<int64_t>(ranks))
        refuse(array.text() + ", expected " + std::to_string(ranks) + " elements, one per rank");
}

}  // namespace

aclnnStatus aclnnAlltoallvAllToAllVGetWorkspaceSize(const aclTensor* x, const aclTensor* sendCounts,
                                                    const aclTensor* sdispls, const char* group, bool expects,
                                                    aclTensor* out, aclTensor* recvCounts, aclTensor* status,
                                                    uint64_t* workspaceSize, aclOpExecutor** executor) {
    return prepare(__func__, workspaceSize, executor, [&](Workspace& workspace) -> Run {
        Call call{view("x", x, all_types),
                  view("sendCounts", sendCounts, {ACL_INT64}),
                  sdispls == nullptr ? View{"sdispls", ACL_INT64, {0}, nullptr} : view("sdispls", sdispls, {ACL_INT64}),
                  view("out", out, all_types),
                  view("recvCounts", recvCounts, {ACL_INT64}),
                  view("status", status, {ACL_INT32}),
                  group_named(group),
                  expects};
        check_ranks(call.send_counts, call.ranks());
        if (sdispls != nullptr) check_ranks(call.sdispls, call.ranks());
        check_ranks(call.recv_counts, call.ranks());
        if (call.x.shape.empty()) refuse("x has no dimensions, expected rows");
        if (call.out.dtype != call.x.dtype) refuse("out has another type than x, expected the same");
        if (!has_rows_of(call.out, call.x)) refuse(call.out.text() + ", expected rows shaped as x's; " + call.x.text());
        if (call.status.numel() != 8 * int64_t{lanes()})
            refuse(call.status.text() + ", expected [" + std::to_string(lanes()) + ", 8]");
        require_apart({call.x, call.send_counts, call.sdispls}, {call.out, call.recv_counts, call.status});
        if (auto windows = windows_of(call.group)) {
            workspace.add(tiling_bytes);
            return on_device(call, std::move(windows));
        }
        workspace.add(sizeof(Verdict) * (call.ranks() + 1));
        return [call](char* memory, aclrtStream stream) { on_host(call, memory, stream); };
    });
}

aclnnStatus aclnnAlltoallvAllToAllV(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                    aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnAlltoallvReleaseGroup(const char* group) {
    return guarded(__func__, [&] {
        require_pointer("group", group);
        forget_windows(group);
    });
}

aclnnStatus aclnnAlltoallvGetWindows(const char* group, uint32_t* lanes, uint64_t* laneBytes) {
    return guarded(__func__, [&] { get_windows(group, {}, lanes, laneBytes); });
}

aclnnStatus aclnnAlltoallvMakeWindows(const char* group, AlltoallvHighest highest, void* context, uint32_t* lanes,
                                      uint64_t* laneBytes) {
    return guarded(__func__, [&] {
        require_pointer("highest", reinterpret_cast<const void*>(highest));
        const auto agreed = [=](uint32_t own) {
            uint32_t found = 0;
            require_success("highest", highest(context, own, &found));
            return found;
        };
        get_windows(group, agreed, lanes, laneBytes);
    });
}
