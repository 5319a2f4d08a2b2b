// Some CANN releases return success and move nothing. A tiny call with a known result finds them: HcclAlltoAllV is
// tested when a communicator is made, a reduction before the first one. The data then go through HcclAllGather, from
// which every rank keeps its slices; front ends then reduce by exchanges.
#include <algorithm>
#include <numeric>

#include "core/hooks.h"
#include "transport/hccl/hccl_communicator.h"

namespace alltoallv {
namespace {

constexpr int32_t passed = 0x600d, failed = 0xbad;

/// Returns the value that rank `from` sends to rank `to`: never 0, and different for every pair.
int32_t token(int from, int to, int size) {
    return 1 + from * size + to;
}

}  // namespace

void HcclCommunicator::on_device(const char* name, std::span<const std::byte> input, std::span<std::byte> heard,
                                 aclrtStream stream, Clock::time_point limit, const std::string& where,
                                 const std::function<void(char*, char*)>& call) {
    const DeviceMemory from(input.size(), where), to(heard.size(), where);
    Device::copy(from.data(), input.data(), input.size(), ACL_MEMCPY_HOST_TO_DEVICE, where);
    Device::copy(to.data(), heard.data(), heard.size(), ACL_MEMCPY_HOST_TO_DEVICE, where);
    call(from.data(), to.data());
    wait(name, stream, limit, where);
    Device::copy(heard.data(), to.data(), heard.size(), ACL_MEMCPY_DEVICE_TO_HOST, where);
}

void HcclCommunicator::check_data_path() {
    const std::string where = "the self-check of domain '" + domain() + "'";
    const auto ranks = static_cast<size_t>(size());
    aclrtStream stream = device_->stream();
    std::vector<int32_t> sent(ranks), heard(ranks, -1);
    for (int j = 0; j < size(); ++j) sent[static_cast<size_t>(j)] = token(rank(), j, size());
    WireLayout layout(4 * ranks, 1);
    std::iota(layout.begin() + static_cast<ptrdiff_t>(ranks), layout.begin() + static_cast<ptrdiff_t>(2 * ranks), 0);
    std::iota(layout.begin() + static_cast<ptrdiff_t>(3 * ranks), layout.end(), 0);
    on_device("check-wait", std::as_bytes(std::span(sent)), std::as_writable_bytes(std::span(heard)), stream,
              deadline(-1), where, [&](char* input, char* output) {
                  comm_->all_to_all_v(input, output, layout, HCCL_DATA_TYPE_INT32, stream, where);
              });
    bool right = true;
    for (int j = 0; j < size(); ++j) right = right && heard[static_cast<size_t>(j)] == token(j, rank(), size());
    falls_back_ = !all_saw(right, stream, where);
    if (falls_back_ && rank() == 0 && hooks().warn)
        hooks().warn("domain '" + domain() +
                     "': HcclAlltoAllV returned success and did not move the data, as some CANN releases do; "
                     "exchanges go through HcclAllGather, which moves more and takes more memory");
}

/// Returns true on all ranks if `right` is true on all: they must make the same decision.
bool HcclCommunicator::all_saw(bool right, aclrtStream stream, const std::string& where) {
    const int32_t verdict = right ? passed : failed;
    std::vector<int32_t> heard(static_cast<size_t>(size()), -1);
    on_device("verdict-wait", std::as_bytes(std::span(&verdict, 1)), std::as_writable_bytes(std::span(heard)), stream,
              deadline(-1), where, [&](char* input, char* output) {
                  comm_->all_gather(input, output, 1, HCCL_DATA_TYPE_INT32, stream, where);
              });
    for (const int32_t other : heard)
        if (other != passed && other != failed)
            throw Error(ErrorClass::hccl, ErrorType::HCCL_FAIL,
                        where + ": HcclAllGather returned success and did not move the data; use another CANN release");
    return std::ranges::count(heard, failed) == 0;
}

/// Runs a tiny reduction with a known result before the first one of a kind. Throws if the result is wrong.
void HcclCommunicator::check_reduction(OpKind op, aclrtStream stream) {
    if (!comm_) return;
    const std::string where = "the self-check of domain '" + domain() + "'", name(name_of(op));
    const bool first = !reduces_.contains(op);
    try {
        if (first) reduces_[op] = reduces_rightly(op, stream, where);
    } catch (const Error& error) {
        end(error);
        throw;
    }
    if (reduces_.at(op)) return;
    (op == OpKind::all_reduce ? all_reduce_falls_back_ : reduce_scatter_falls_back_) = true;
    const std::string text = where + ": HCCL's " + name + " returned success and did not reduce the data";
    if (first && rank() == 0 && hooks().warn)
        hooks().warn(text + "; alltoallv.torch gathers them and adds them itself, which moves more");
    throw Error(ErrorClass::hccl, ErrorType::HCCL_FAIL, text + "; use another CANN release");
}

bool HcclCommunicator::reduces_rightly(OpKind op, aclrtStream stream, const std::string& where) {
    const bool scatters = op == OpKind::reduce_scatter;
    const auto ranks = static_cast<size_t>(size());
    std::vector<int32_t> mine(scatters ? ranks : 1);
    std::iota(mine.begin(), mine.end(), 1 + rank());
    int32_t expected = 0, heard = -1;
    for (int i = 0; i < size(); ++i) expected += 1 + i + (scatters ? rank() : 0);
    const auto reduce = scatters ? &HcclGroup::reduce_scatter : &HcclGroup::all_reduce;
    begin_launch(stream, where);
    on_device("reduction-check-wait", std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(&heard, 1)),
              stream, deadline(-1), where, [&](char* input, char* output) {
                  (*comm_.*reduce)(input, output, 1, HCCL_DATA_TYPE_INT32, HCCL_REDUCE_SUM, stream, where);
              });
    return all_saw(heard == expected, stream, where);
}

void HcclCommunicator::gather_and_slice(const Exchange& x, void* output, std::span<const int64_t> recv_counts,
                                        std::span<const int64_t> rdispls, aclrtStream stream, Clock::time_point limit,
                                        const std::string& where) {
    const auto ranks = static_cast<size_t>(size()), mine = static_cast<size_t>(rank());
    const size_t element = size_of(x.dtype), unit = x.byte_displs ? 1 : element;

    // Gathers every rank's send counts, then every rank's packed input, padded to the longest.
    std::vector<int64_t> rows(ranks * ranks);
    on_device("fallback-counts", std::as_bytes(x.send_counts), std::as_writable_bytes(std::span(rows)), stream, limit,
              where, [&](char* counts, char* all_counts) {
                  comm_->all_gather(counts, all_counts, ranks, HCCL_DATA_TYPE_INT64, stream, where);
              });
    size_t longest = 0;
    for (size_t j = 0; j < ranks; ++j) {
        const std::span<const int64_t> row(rows.data() + j * ranks, ranks);
        longest = std::max(longest, static_cast<size_t>(std::accumulate(row.begin(), row.end(), int64_t{0})) * element);
        if (row[mine] != recv_counts[j])
            throw peer_mismatch(where + ": rank " + std::to_string(j) + " sends " + std::to_string(row[mine]) +
                                " elements to rank " + std::to_string(mine) + ", which expects " +
                                std::to_string(recv_counts[j]));
    }
    if (longest == 0) return;
    const DeviceMemory part(longest, where), all(ranks * longest, where);
    size_t at = 0;
    for (size_t j = 0; j < ranks; ++j) {
        const size_t bytes = static_cast<size_t>(x.send_counts[j]) * element;
        Device::copy_async(part.data() + at,
                           static_cast<const char*>(x.input) + static_cast<size_t>(x.sdispls[j]) * unit, bytes, stream,
                           where);
        at += bytes;
    }
    comm_->all_gather(part.data(), all.data(), longest, HCCL_DATA_TYPE_UINT8, stream, where);
    for (size_t j = 0; j < ranks; ++j) {
        const auto row = rows.begin() + static_cast<ptrdiff_t>(j * ranks);
        const auto before = std::accumulate(row, row + static_cast<ptrdiff_t>(mine), int64_t{0});
        Device::copy_async(static_cast<char*>(output) + static_cast<size_t>(rdispls[j]) * unit,
                           all.data() + j * longest + static_cast<size_t>(before) * element,
                           static_cast<size_t>(recv_counts[j]) * element, stream, where);
    }
    wait("fallback-memory", stream, limit, where);  // before the memory is freed
}

}  // namespace alltoallv
