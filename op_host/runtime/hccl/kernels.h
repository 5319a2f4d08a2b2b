// The Ascend C kernels of this package, behind their aclnn interface in libcust_opapi.so, and the rule by which they
// serve instead of HCCL's calls.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "runtime/base/dtype.h"
#include "runtime/core/quant_reduction.h"
#include "runtime/hccl/device.h"

namespace alltoallv {

/// The rule, for people.
inline constexpr const char* kernels_rule =
    "quantized_all_reduce, and all_to_all_v with a capacity, whose counts lie on the device, take one Ascend C "
    "kernel through the ranks' windows where every rank finds libcust_opapi.so and HCCL's calls for windows, and "
    "2 to 64 ranks share one server; a reduction also needs int8 or int4 codes, no error feedback, no second "
    "quantization, overflow other than 'raise', and groups that fit into a window. Elsewhere HcclAlltoAllV serves"
    " a reduction, and all_to_all_v with a capacity raises BackendUnavailableError";

/// Returns why the kernels cannot serve in this process; empty if they can.
std::string kernels_missing();

/// Returns why the kernels never serve such a reduction; empty if they do where its groups fit. The same on all ranks,
/// which have compared the reduction.
std::string why_no_kernel(const QuantReduction& reduction);

/// An all_to_all_v of rows whose counts are int64 in device memory, one per rank.
struct CountedOnDevice {
    DType dtype = DType::float32;
    int64_t row = 1;    ///< elements of a row
    int64_t ranks = 1;  ///< of the communicator
    const void* input = nullptr;
    int64_t input_rows = 0;
    const void* send_counts = nullptr;
    const void* sdispls = nullptr;  ///< null: packed in the order of the ranks
    void* output = nullptr;         ///< rows received, packed
    int64_t capacity = 0;           ///< rows of the output
    bool expects = false;           ///< recv_counts are those that must come; else they are filled
    void* recv_counts = nullptr;
    void* status = nullptr;  ///< int32, [most lanes, 8]: filled as aclnn_all_to_all_v.h says
    aclrtStream stream = nullptr;
};

/// The kernels of one communicator.
class Kernels {
  public:
    /// Returns the highest of all ranks' numbers.
    using Highest = std::function<uint32_t(uint32_t own)>;

    /// Collective: makes the windows of HCCL's communicator `group`; the ranks agree by `highest` before each step in
    /// which HCCL waits for all. Throws what that throws, or an error of class hccl.
    Kernels(std::string group, int rank, const Highest& highest, const std::string& where);
    /// Gives the windows back. All that has been launched must be done.
    ~Kernels();
    Kernels(const Kernels&) = delete;
    Kernels& operator=(const Kernels&) = delete;

    /// True if a window takes the groups of a reduction that `why_no_kernel` allows.
    bool fits(const QuantReduction& reduction, int ranks) const;

    void quant_all_reduce(const QuantReduction& reduction, const OnStream& on);
    void all_to_all_v(const CountedOnDevice& call, const OnStream& on);

    /// Once all launches are done: throws comm_timeout if the last reduction has not got what it waited for.
    void check(const std::string& where);

  private:
    template <class First, class Second>
    void run(const char* name, First first, Second second, const OnStream& on);
    char* workspace(uint64_t bytes, const OnStream& on);

    const std::string group_;
    const int rank_;
    uint32_t lanes_ = 0;
    uint64_t lane_bytes_ = 0;
    std::unique_ptr<DeviceMemory> status_, workspace_;
    uint64_t workspace_bytes_ = 0;
    bool unread_ = false;  ///< the status of a launched reduction
};

}  // namespace alltoallv
