// Some CANN releases return success and move nothing. A tiny call with a known result finds them: HcclAlltoAllV is
// tested when a communicator is made, a reduction before the first one. The data then go through HcclAllGather, from
// which every rank keeps its slices; front ends then reduce by exchanges.
#include <algorithm>
#include <numeric>

#include "runtime/core/hooks.h"
#include "runtime/core/mismatch.h"
#include "runtime/hccl/hccl_communicator.h"

namespace alltoallv {
namespace {

constexpr int32_t passed = 0x600d, failed = 0xbad;

/// Returns the value that rank `from` sends to rank `to`: never 0, and different for every pair.
int32_t token(int from, int to, int size) {
    return 1 + from * size + to;
}

}  // namespace

void HcclCommunicator::on_device(const char* name, std::span<const std::byte> input, std::span<std::byte> heard,
                                 const OnStream& on, const std::function<void(char*, char*)>& call) {
    const DeviceMemory from(input.size(), on.where), to(heard.size(), on.where);
    Device::copy(from.data(), input.data(), input.size(), ACL_MEMCPY_HOST_TO_DEVICE, on.where);
    Device::copy(to.data(), heard.data(), heard.size(), ACL_MEMCPY_HOST_TO_DEVICE, on.where);
    call(from.data(), to.data());
    wait(name, on);
    Device::copy(heard.data(), to.data(), heard.size(), ACL_MEMCPY_DEVICE_TO_HOST, on.where);
}

void HcclCommunicator::gather_to_host(const char* name, std::span<const std::byte> input, std::span<std::byte> heard,
                                      uint64_t count, HcclDataType type, const OnStream& on) {
    on_device(name, input, heard, on, [&](char* from, char* to) { comm_->all_gather(from, to, count, type, on); });
}

OnStream HcclCommunicator::self_check(aclrtStream stream) const {
    return {stream, deadline(-1), "the self-check of domain '" + domain() + "'"};
}

void HcclCommunicator::check_data_path() {
    const OnStream on = self_check(device_->stream());
    const auto ranks = static_cast<size_t>(size());
    std::vector<int32_t> sent(ranks), heard(ranks, -1);
    for (int j = 0; j < size(); ++j) sent[static_cast<size_t>(j)] = token(rank(), j, size());
    WireLayout layout(4 * ranks, 1);
    for (size_t j = 0; j < ranks; ++j) layout[ranks + j] = layout[3 * ranks + j] = j;
    on_device("check-wait", std::as_bytes(std::span(sent)), std::as_writable_bytes(std::span(heard)), on,
              [&](char* input, char* output) { comm_->all_to_all_v(input, output, layout, HCCL_DATA_TYPE_INT32, on); });
    bool right = true;
    for (int j = 0; j < size(); ++j) right = right && heard[static_cast<size_t>(j)] == token(j, rank(), size());
    falls_back_ = !all_saw(right, on);
    if (falls_back_ && rank() == 0 && hooks().warn)
        hooks().warn("domain '" + domain() +
                     "': HcclAlltoAllV returned success and did not move the data, as some CANN releases do; "
                     "exchanges go through HcclAllGather, which moves more and takes more memory");
}

/// Returns true on all ranks if `right` is true on all: they must make the same decision.
bool HcclCommunicator::all_saw(bool right, const OnStream& on) {
    const int32_t verdict = right ? passed : failed;
    std::vector<int32_t> heard(static_cast<size_t>(size()), -1);
    gather_to_host("verdict-wait", std::as_bytes(std::span(&verdict, 1)), std::as_writable_bytes(std::span(heard)), 1,
                   HCCL_DATA_TYPE_INT32, {on.stream, deadline(-1), on.where});
    for (const int32_t other : heard)
        if (other != passed && other != failed)
            throw Error(
                ErrorClass::hccl, ErrorType::HCCL_FAIL,
                with_id(
                    7005,
                    on.where + ": HcclAllGather returned success and did not move the data; use another CANN release"));
    return std::ranges::count(heard, failed) == 0;
}

/// Runs a tiny reduction with a known result before the first one of a kind. Throws if the result is wrong.
void HcclCommunicator::check_reduction(OpKind op, aclrtStream stream) {
    if (!comm_) return;
    const OnStream on = self_check(stream);
    const bool first = !reduces_.contains(op);
    try {
        if (first) reduces_[op] = reduces_rightly(op, on);
    } catch (const Error& error) {
        end(error);
        throw;
    }
    if (reduces_.at(op)) return;
    (op == OpKind::all_reduce ? all_reduce_falls_back_ : reduce_scatter_falls_back_) = true;
    const std::string text =
        on.where + ": HCCL's " + std::string(name_of(op)) + " returned success and did not reduce the data";
    if (first && rank() == 0 && hooks().warn)
        hooks().warn(text + "; alltoallv.torch gathers them and adds them itself, which moves more");
    throw Error(ErrorClass::hccl, ErrorType::HCCL_FAIL, with_id(7006, text + "; use another CANN release"));
}

bool HcclCommunicator::reduces_rightly(OpKind op, const OnStream& on) {
    const bool scatters = op == OpKind::reduce_scatter;
    std::vector<int32_t> own(scatters ? static_cast<size_t>(size()) : 1);
    std::iota(own.begin(), own.end(), 1 + rank());
    int32_t expected = 0, heard = -1;
    for (int i = 0; i < size(); ++i) expected += 1 + i + (scatters ? rank() : 0);
    begin_launch(on);
    on_device("reduction-check-wait", std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(&heard, 1)), on,
              [&](char* input, char* output) {
                  comm_->reduce(op, input, output, 1, HCCL_DATA_TYPE_INT32, HCCL_REDUCE_SUM, on);
              });
    return all_saw(heard == expected, on);
}

void HcclCommunicator::gather_and_slice(const Exchange& x, const OnStream& on) {
    const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
    const size_t element = size_of(x.dtype);

    // Gathers every rank's send counts, then every rank's packed input, padded to the longest.
    std::vector<int64_t> rows(ranks * ranks);
    gather_to_host("fallback-counts", std::as_bytes(x.send_counts), std::as_writable_bytes(std::span(rows)), ranks,
                   HCCL_DATA_TYPE_INT64, on);
    size_t longest = 0;
    for (size_t j = 0; j < ranks; ++j) {
        const std::span<const int64_t> row(rows.data() + j * ranks, ranks);
        longest = std::max(longest, static_cast<size_t>(std::accumulate(row.begin(), row.end(), int64_t{0})) * element);
        if (row[me] != x.recv_counts[j])
            throw counts_disagree(on.where, joined("rank ", j), row[me], joined("rank ", me), x.recv_counts[j]);
    }
    if (longest == 0) return;
    const DeviceMemory part(longest, on.where), all(ranks * longest, on.where);
    size_t at = 0;
    for (size_t j = 0; j < ranks; ++j) {
        const size_t bytes = static_cast<size_t>(x.send_counts[j]) * element;
        Device::copy_async(part.data() + at, input_at(x, j), bytes, on);
        at += bytes;
    }
    comm_->all_gather(part.data(), all.data(), longest, HCCL_DATA_TYPE_UINT8, on);
    for (size_t j = 0; j < ranks; ++j) {
        const auto row = rows.begin() + static_cast<ptrdiff_t>(j * ranks);
        const auto before = std::accumulate(row, row + static_cast<ptrdiff_t>(me), int64_t{0});
        Device::copy_async(output_at(x, j), all.data() + j * longest + static_cast<size_t>(before) * element,
                           static_cast<size_t>(x.recv_counts[j]) * element, on);
    }
    wait("fallback-memory", on);  // before the memory is freed
}

}  // namespace alltoallv
