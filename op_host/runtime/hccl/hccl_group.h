// An HcclGroup is made or borrowed; each of its collectives is checked.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/abi/hccl.h"
#include "runtime/core/communicator.h"
#include "runtime/hccl/device.h"

namespace alltoallv {

/// The options of a communicator over HCCL. The first of `comm`, `rank_table` that is set decides; without them rank 0
/// makes root info, and distributes it over the control communicator.
struct HcclOptions {
    int rank = 0;
    int size = 1;
    std::string domain = "default";
    std::optional<size_t> buffer_mb;  ///< HCCL's buffer of this communicator; unset: HCCL_BUFFSIZE decides
    double timeout = 600.0;           ///< seconds
    std::string check = "first";      ///< "first": the first 8 calls; "always"; "off"
    int device = -1;                  ///< < 0 means the current one
    HcclComm comm = nullptr;          ///< the caller's, not owned
    std::string rank_table;           ///< path; checked by the caller (alltoallv/rank_table.py)
    std::string root_info;            ///< HcclRootInfo, 4108 bytes, once it has been distributed
};

/// Send counts, send displacements, receive counts, receive displacements, W each, in units of the wire type.
using WireLayout = std::vector<uint64_t>;

/// Calls HcclGetRootInfo on the current device.
std::string make_root_info();

/// Returns HCCL's name of a communicator, which is equal on all of its ranks.
std::string name_of(HcclComm comm);

class HcclGroup {
  public:
    /// Blocks until all ranks have arrived, at most for `options.timeout`; calls `poll` meanwhile, which may throw. A
    /// communicator that HCCL makes later is destroyed.
    HcclGroup(const HcclOptions& options, const Device& device, const std::function<void()>& poll);
    ~HcclGroup();
    HcclGroup(const HcclGroup&) = delete;
    HcclGroup& operator=(const HcclGroup&) = delete;

    /// Frees it, if it is ours; waits up to 2 s while HCCL reports that it is in use, and may then be called again.
    void destroy();

    /// HCCL's name of it.
    std::string name() const { return name_of(comm_); }

    void all_to_all_v(const void* input, void* output, const WireLayout& layout, HcclDataType type,
                      const OnStream& on) const;
    void all_gather(const void* input, void* output, uint64_t count, HcclDataType type, const OnStream& on) const;
    /// `kind` is all_reduce, of `count` elements, or reduce_scatter, of which every rank keeps `count`.
    void reduce(OpKind kind, const void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op,
                const OnStream& on) const;

    /// Returns errors that HCCL has found after the calls; HCCL_SUCCESS if it cannot be asked.
    HcclResult async_error() const;

    /// Throws that error.
    void check_async_error(const std::string& where) const;

  private:
    /// `bytes` is what the call moves per rank.
    void check(HcclResult result, const char* call, const std::string& where, uint64_t bytes) const;

    HcclComm comm_ = nullptr;
    size_t size_ = 0;
    bool owned_ = false;
    std::string buffer_;  ///< the setting that decides HCCL's buffer, for advice
};

}  // namespace alltoallv
