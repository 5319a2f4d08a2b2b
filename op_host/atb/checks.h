/// \file checks.h
/// \brief Checks of one rank's own arguments: ATB's for the param, bounds and overlap for every all-to-all-v.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "atb/all_to_all_v_param.h"

namespace alltoallv {

/// The NPU an operation will run on. Absent on other devices, where the family and count checks do not apply.
struct DeviceInfo {
    std::string soc_name;  ///< as aclrtGetSocName gives it, e.g. "Ascend910B3"
    int device_count = 0;  ///< visible devices; negative: the query failed
};

/// A communication domain: "name" or "name:MB".
struct Domain {
    std::string name;
    std::optional<int64_t> megabytes;  ///< buffer budget per rank, where the text says it
};

inline constexpr int64_t min_domain_megabytes = 200;
inline constexpr size_t max_domain_bytes = 128;

/// Reads `comm_domain`. Throws code 1 for a size that is no number or below 200 MB, or a text above 128 bytes.
Domain parse_domain(std::string_view text);

/// ATB's CreateOperation checks, in ATB's order (docs/compatibility.md). Throws invalid_param, code 1.
void check_create(const AllToAllVParam& param, const DeviceInfo* device = nullptr);

/// Those of them that concern the group and the device: reserved bytes, family, comm_mode, domain, rank table, ranks.
void check_group(const AllToAllVParam& param, const DeviceInfo* device = nullptr);

/// The last two of them: every array has rank_size entries, none negative.
void check_arrays(const AllToAllVParam& param);

/// Checks that the send regions [displs[j], displs[j] + counts[j]) lie in an input of `numel` elements. They may
/// overlap and leave gaps. Throws code 1 naming the array, the index, the value and what was expected.
void check_send(int64_t numel, std::span<const int64_t> counts, std::span<const int64_t> displs, int world_size);

/// Checks that the receive regions lie in an output of `numel` elements (-1: not allocated yet) and do not overlap.
/// Empty regions have no place: they never overlap, and their displacement need only be >= 0.
/// Returns the elements that the output needs, gaps included. O(W) without allocation when non-empty regions ascend,
/// else O(W log W).
int64_t check_receive(int64_t numel, std::span<const int64_t> counts, std::span<const int64_t> displs, int world_size);

/// Both. Returns the elements that the output needs.
int64_t check_exchange(int64_t numel_in, int64_t numel_out, std::span<const int64_t> send_counts,
                       std::span<const int64_t> sdispls, std::span<const int64_t> recv_counts,
                       std::span<const int64_t> rdispls, int world_size);

/// Throws code 1, naming the two ranks and both regions, if two non-empty receive regions share an element.
/// Lengths, signs and overflow have been checked.
void check_no_overlap(std::span<const int64_t> counts, std::span<const int64_t> displs);

}  // namespace alltoallv
