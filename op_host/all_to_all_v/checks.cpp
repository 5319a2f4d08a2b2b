// Create checks in ATB's order.
#include "all_to_all_v/checks.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <system_error>

#include "runtime/base/error.h"
#include "runtime/core/regions.h"

namespace alltoallv {
namespace {

constexpr std::array<std::string_view, 6> backends{"hccl", "shm", "gloo", "nccl", "mpi", "auto"};

void check_reserved(const AllToAllVParam& param) {
    for (size_t i = 0; i < param.rsv.size(); ++i) {
        if (param.rsv[i] == 0) continue;
        throw invalid_param(1004, "rsv[", i, "] is ", param.rsv[i],
                            ", expected 0: the reserved bytes belong to later versions");
    }
}

void check_backend(const AllToAllVParam& param) {
    if (std::ranges::find(backends, param.backend) != backends.end()) return;
    throw invalid_param(1005, "backend is \"", param.backend,
                        "\", expected \"hccl\" or one of \"shm\", \"gloo\", \"nccl\", \"mpi\", \"auto\"");
}

void check_soc(const DeviceInfo& device) {
    constexpr std::string_view a2 = "Ascend910B", a3 = "Ascend910_93";
    const std::string& name = device.soc_name;
    const bool is_a2 = name.find(a2) != std::string::npos && name.size() > a2.size();
    if (is_a2 || name.find(a3) != std::string::npos) return;
    throw invalid_param(1006, "the device is \"", name, "\", expected Ascend910B1 to B4 or Ascend910_93");
}

/// Checks rank and size; not called if a rank table or an external communicator defines them.
void check_ranks(const AllToAllVParam& param, const std::optional<DeviceInfo>& device) {
    if (device && device->device_count < 0) throw invalid_param(1007, "the number of devices could not be queried");
    if (param.rank_size <= 0) throw too_small("rank_size", std::to_string(param.rank_size), 1);
    if (device && param.rank_size > device->device_count) {
        throw invalid_param(1009, "rank_size is ", param.rank_size, ", expected at most ", device->device_count,
                            ", the number of devices");
    }
    const auto check_rank = [&](std::string_view name, int value) {
        if (value >= 0 && value < param.rank_size) return;
        throw invalid_param(1010, name, " is ", value, ", expected 0 to ", param.rank_size - 1, " for rank_size ",
                            param.rank_size);
    };
    check_rank("rank", param.rank);
    check_rank("rank_root", param.rank_root);
}

bool is_existing_path(const std::string& path) {
    std::error_code ignored;
    return path.find('\0') == std::string::npos && std::filesystem::exists(path, ignored);
}

void check_communicator(const AllToAllVParam& param, const std::optional<DeviceInfo>& device) {
    if (param.comm_mode != CommMode::MULTI_PROCESS && param.comm_mode != CommMode::MULTI_THREAD) {
        throw invalid_param(1011, "comm_mode is ", static_cast<int>(param.comm_mode),
                            ", expected 0 (MULTI_PROCESS) or 1 (MULTI_THREAD)");
    }
    parse_domain(param.comm_domain);
    if (!param.rank_table_file.empty()) {
        if (is_existing_path(param.rank_table_file)) return;
        throw invalid_param(1012, "rank_table_file names a path that does not exist: \"", param.rank_table_file, "\"");
    }
    if (param.hccl_comm == nullptr) check_ranks(param, device);
}

}  // namespace

Domain parse_domain(std::string_view text, std::string_view name) {
    if (text.size() > max_domain_bytes) {
        throw invalid_param(1013, name, " has ", text.size(), " bytes, expected at most ", max_domain_bytes);
    }
    const size_t colon = text.rfind(':');
    if (colon == std::string_view::npos) return {std::string(text), std::nullopt};
    const std::string_view digits = text.substr(colon + 1);
    int64_t megabytes = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), megabytes);
    const bool is_number = !digits.empty() && error == std::errc() && end == digits.data() + digits.size();
    // The upper bound keeps the size in bytes within 64 bits; from_chars accepts a leading minus.
    if (!is_number || megabytes < min_domain_megabytes || megabytes > (int64_max >> 20)) {
        throw invalid_param(1014, name, " is \"", text, "\", expected \"name\" or \"name:MB\" with MB at least ",
                            min_domain_megabytes, " in decimal digits");
    }
    return {std::string(text.substr(0, colon)), megabytes};
}

void check_create(const AllToAllVParam& param, const std::optional<DeviceInfo>& device) {
    check_reserved(param);
    check_backend(param);
    if (device) check_soc(*device);
    check_communicator(param, device);
    check_arrays(param);
}

void check_group(const AllToAllVParam& param, const std::optional<DeviceInfo>& device) {
    check_reserved(param);
    if (device) check_soc(*device);
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

}  // namespace alltoallv
