/// \file checks.cpp
/// \brief Create checks in ATB's order, and the bounds and overlap checks of regions.
#include "atb/checks.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <limits>
#include <system_error>
#include <vector>

#include "base/error.h"

namespace alltoallv {
namespace {

constexpr int64_t int64_max = std::numeric_limits<int64_t>::max();
constexpr std::array<std::string_view, 6> backends{"hccl", "shm", "gloo", "nccl", "mpi", "auto"};

std::string entry(std::string_view array, size_t index) {
    return std::string(array) + "[" + std::to_string(index) + "]";
}

std::string region(int64_t displ, int64_t count) {
    return "[" + std::to_string(displ) + ", " + std::to_string(displ + count) + ")";
}

void check_reserved(const AllToAllVParam& param) {
    for (size_t i = 0; i < param.rsv.size(); ++i) {
        if (param.rsv[i] == 0) continue;
        throw invalid_param(entry("rsv", i) + " is " + std::to_string(param.rsv[i]) +
                            ", expected 0: the reserved bytes belong to later versions");
    }
}

void check_backend(const AllToAllVParam& param) {
    if (std::ranges::find(backends, param.backend) != backends.end()) return;
    throw invalid_param("backend is \"" + param.backend +
                        "\", expected \"hccl\" or one of \"shm\", \"gloo\", \"nccl\", \"mpi\", \"auto\"");
}

void check_soc(const DeviceInfo& device) {
    constexpr std::string_view a2 = "Ascend910B", a3 = "Ascend910_93";
    const std::string& name = device.soc_name;
    const bool is_a2 = name.find(a2) != std::string::npos && name.size() > a2.size();
    if (is_a2 || name.find(a3) != std::string::npos) return;
    throw invalid_param("the device is \"" + name + "\", expected Ascend910B1 to B4 or Ascend910_93");
}

/// Ranks against the world; not asked when a rank table or an external communicator defines them.
void check_ranks(const AllToAllVParam& param, const DeviceInfo* device) {
    if (device != nullptr && device->device_count < 0) {
        throw invalid_param("the number of devices could not be queried");
    }
    if (param.rank_size <= 0) {
        throw invalid_param("rank_size is " + std::to_string(param.rank_size) + ", expected at least 1");
    }
    if (device != nullptr && param.rank_size > device->device_count) {
        throw invalid_param("rank_size is " + std::to_string(param.rank_size) + ", expected at most " +
                            std::to_string(device->device_count) + ", the number of devices");
    }
    const auto check_rank = [&](std::string_view name, int value) {
        if (value >= 0 && value < param.rank_size) return;
        throw invalid_param(std::string(name) + " is " + std::to_string(value) + ", expected 0 to " +
                            std::to_string(param.rank_size - 1) + " for rank_size " + std::to_string(param.rank_size));
    };
    check_rank("rank", param.rank);
    check_rank("rank_root", param.rank_root);
}

bool is_existing_path(const std::string& path) {
    std::error_code ignored;
    return path.find('\0') == std::string::npos && std::filesystem::exists(path, ignored);
}

void check_communicator(const AllToAllVParam& param, const DeviceInfo* device) {
    if (param.comm_mode != CommMode::MULTI_PROCESS && param.comm_mode != CommMode::MULTI_THREAD) {
        throw invalid_param("comm_mode is " + std::to_string(static_cast<int>(param.comm_mode)) +
                            ", expected 0 (MULTI_PROCESS) or 1 (MULTI_THREAD)");
    }
    parse_domain(param.comm_domain);
    if (!param.rank_table_file.empty()) {
        if (is_existing_path(param.rank_table_file)) return;
        throw invalid_param("rank_table_file names a path that does not exist: \"" + param.rank_table_file + "\"");
    }
    if (param.hccl_comm == nullptr) check_ranks(param, device);
}

void check_length(std::string_view name, std::span<const int64_t> values, int world_size) {
    if (world_size >= 0 && values.size() == static_cast<size_t>(world_size)) return;
    throw invalid_param(std::string(name) + " has " + std::to_string(values.size()) + " entries, expected " +
                        std::to_string(world_size) + ", one per rank");
}

void check_signs(std::string_view name, std::span<const int64_t> values) {
    for (size_t i = 0; i < values.size(); ++i) {
        if (values[i] >= 0) continue;
        throw invalid_param(entry(name, i) + " is " + std::to_string(values[i]) + ", expected at least 0");
    }
}

struct Names {
    std::string_view counts, displs, tensor;
};

constexpr Names send_names{"send_counts", "sdispls", "input"};
constexpr Names receive_names{"recv_counts", "rdispls", "output"};

/// Lengths, signs, overflow, and bounds where `numel` is known. Returns the end of the last non-empty region.
int64_t check_regions(const Names& names, int64_t numel, std::span<const int64_t> counts,
                      std::span<const int64_t> displs, int world_size) {
    check_length(names.counts, counts, world_size);
    check_length(names.displs, displs, world_size);
    check_signs(names.counts, counts);
    check_signs(names.displs, displs);
    const int64_t limit = numel < 0 ? int64_max : numel;
    int64_t span = 0;
    for (size_t j = 0; j < counts.size(); ++j) {
        if (counts[j] == 0) continue;
        if (counts[j] > limit || displs[j] > limit - counts[j]) {
            throw invalid_param(entry(names.displs, j) + " + " + entry(names.counts, j) + " is " +
                                std::to_string(displs[j]) + " + " + std::to_string(counts[j]) + ", expected at most " +
                                std::to_string(limit) +
                                (numel < 0 ? std::string(", the largest 64-bit count")
                                           : ", the elements of the " + std::string(names.tensor)));
        }
        span = std::max(span, displs[j] + counts[j]);
    }
    return span;
}

[[noreturn]] void throw_overlap(std::span<const int64_t> counts, std::span<const int64_t> displs, size_t a, size_t b) {
    if (a > b) std::swap(a, b);
    throw invalid_param("the receive regions of ranks " + std::to_string(a) + " and " + std::to_string(b) +
                        " overlap: rank " + std::to_string(a) + " writes " + region(displs[a], counts[a]) +
                        " of the output, rank " + std::to_string(b) + " writes " + region(displs[b], counts[b]));
}

}  // namespace

Domain parse_domain(std::string_view text) {
    if (text.size() > max_domain_bytes) {
        throw invalid_param("comm_domain has " + std::to_string(text.size()) + " bytes, expected at most " +
                            std::to_string(max_domain_bytes));
    }
    const size_t colon = text.rfind(':');
    if (colon == std::string_view::npos) return {std::string(text), std::nullopt};
    const std::string_view digits = text.substr(colon + 1);
    int64_t megabytes = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), megabytes);
    const bool is_number = !digits.empty() && error == std::errc() && end == digits.data() + digits.size();
    // The upper bound keeps the size in bytes within 64 bits; from_chars has let a leading minus pass.
    if (!is_number || megabytes < min_domain_megabytes || megabytes > (int64_max >> 20)) {
        throw invalid_param("comm_domain is \"" + std::string(text) +
                            "\", expected \"name\" or \"name:MB\" with MB at " + "least " +
                            std::to_string(min_domain_megabytes) + " in decimal digits");
    }
    return {std::string(text.substr(0, colon)), megabytes};
}

void check_create(const AllToAllVParam& param, const DeviceInfo* device) {
    check_reserved(param);
    check_backend(param);
    if (device != nullptr) check_soc(*device);
    check_communicator(param, device);
    check_arrays(param);
}

void check_group(const AllToAllVParam& param, const DeviceInfo* device) {
    check_reserved(param);
    if (device != nullptr) check_soc(*device);
    check_communicator(param, device);
}

void check_arrays(const AllToAllVParam& param) {
    check_length("send_counts", param.send_counts, param.rank_size);
    check_length("sdispls", param.sdispls, param.rank_size);
    check_length("recv_counts", param.recv_counts, param.rank_size);
    check_length("rdispls", param.rdispls, param.rank_size);
    check_signs("send_counts", param.send_counts);
    check_signs("sdispls", param.sdispls);
    check_signs("recv_counts", param.recv_counts);
    check_signs("rdispls", param.rdispls);
}

void check_send(int64_t numel, std::span<const int64_t> counts, std::span<const int64_t> displs, int world_size) {
    check_regions(send_names, std::max<int64_t>(numel, 0), counts, displs, world_size);
}

int64_t check_receive(int64_t numel, std::span<const int64_t> counts, std::span<const int64_t> displs, int world_size) {
    const int64_t span = check_regions(receive_names, numel, counts, displs, world_size);
    check_no_overlap(counts, displs);
    return span;
}

int64_t check_exchange(int64_t numel_in, int64_t numel_out, std::span<const int64_t> send_counts,
                       std::span<const int64_t> sdispls, std::span<const int64_t> recv_counts,
                       std::span<const int64_t> rdispls, int world_size) {
    check_send(numel_in, send_counts, sdispls, world_size);
    return check_receive(numel_out, recv_counts, rdispls, world_size);
}

void check_no_overlap(std::span<const int64_t> counts, std::span<const int64_t> displs) {
    size_t last = counts.size();  // the last non-empty region seen; none yet
    bool is_ascending = true;
    for (size_t j = 0; j < counts.size() && is_ascending; ++j) {
        if (counts[j] == 0) continue;
        if (last != counts.size()) {
            is_ascending = displs[j] >= displs[last];
            if (is_ascending && displs[j] < displs[last] + counts[last]) throw_overlap(counts, displs, last, j);
        }
        last = j;
    }
    if (is_ascending) return;

    std::vector<size_t> order;
    order.reserve(counts.size());
    for (size_t j = 0; j < counts.size(); ++j) {
        if (counts[j] != 0) order.push_back(j);
    }
    std::ranges::sort(order,
                      [&](size_t a, size_t b) { return displs[a] != displs[b] ? displs[a] < displs[b] : a < b; });
    // If any two regions overlap, then so do two neighbours in this order.
    for (size_t k = 1; k < order.size(); ++k) {
        const size_t before = order[k - 1], after = order[k];
        if (displs[after] < displs[before] + counts[before]) throw_overlap(counts, displs, before, after);
    }
}

}  // namespace alltoallv
