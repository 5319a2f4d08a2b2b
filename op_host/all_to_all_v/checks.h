// ATB's checks of one rank's own param.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "all_to_all_v/param.h"

namespace alltoallv {

/// The NPU that an operation will run on. Absent on other devices, where the family and count checks do not apply.
struct DeviceInfo {
    std::string soc_name;  ///< as aclrtGetSocName returns it, e.g. "Ascend910B3"
    int device_count = 0;  ///< visible devices; negative: the query failed
};

/// A communication domain: "name" or "name:MB".
struct Domain {
    std::string name;
    std::optional<int64_t> megabytes;  ///< buffer budget per rank, if the text has one
};

inline constexpr int64_t min_domain_megabytes = 200;
inline constexpr size_t max_domain_bytes = 128;

/// Parses the argument `name`. Throws code 1 if the size is not a number or below 200 MB, or the text is above 128
/// bytes.
Domain parse_domain(std::string_view text, std::string_view name = "comm_domain");

/// Makes ATB's CreateOperation checks, in ATB's order (docs/compatibility.md). Throws invalid_param, code 1.
void check_create(const AllToAllVParam& param, const std::optional<DeviceInfo>& device = {});

/// Makes the checks of the group and the device: reserved bytes, family, comm_mode, domain, rank table, ranks.
void check_group(const AllToAllVParam& param, const std::optional<DeviceInfo>& device = {});

/// Makes the last two checks: every array has rank_size entries, none negative.
void check_arrays(const AllToAllVParam& param);

}  // namespace alltoallv
