// The ATB-shaped quantized AllReduce: int8 with a scale and an offset that all ranks share, float16 out; and,
// as an extension, floats that every rank quantizes by scales of its own.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "atb/all_to_all_v.h"
#include "atb/checks.h"
#include "atb/member.h"
#include "atb/tensor_checks.h"
#include "base/tensor_view.h"
#include "core/quant_reduction.h"

namespace alltoallv {

/// Whether `scale` has one value, or one per entry of the last axis: ATB's numbers. DYNAMIC is ours: no scale is given,
/// every rank finds one per group of elements.
enum class QuantType : int { UNQUANT = 0, PER_TENSOR = 1, PER_CHANNEL = 2, MAX = 3, DYNAMIC = 16 };

/// The fields of ATB's AllReduceParam, as far as its quantized form has them, and those of DYNAMIC.
struct QuantAllReduceParam {
    AllToAllVParam group;                 ///< rank to comm_domain and rsv, without counts; backend "lccl"
    std::string all_reduce_type = "sum";  ///< with DYNAMIC also "avg"
    QuantType quant_type = QuantType::PER_TENSOR;
    /// ACL's number: 1 float16, with DYNAMIC also 0 float32 and 27 bfloat16; -1: float16, with DYNAMIC the input's
    int out_data_type = -1;

    /// --- DYNAMIC; see QuantReduction ---
    CodeFormat format = CodeFormat::int8;
    int64_t group_size = 128;
    bool requantizes = false;
    Overflow overflow = Overflow::saturate;

    QuantAllReduceParam() { group.backend = "lccl"; }

    bool operator==(const QuantAllReduceParam&) const = default;
};

/// Throws invalid_param, code 1: "lccl" (on a CPU the same as "auto" and "shm") and the sum alone are quantized.
void check_create(const QuantAllReduceParam& param, const DeviceInfo* device = nullptr);

/// Output, in the shape of x: with DYNAMIC for the input x of float32, float16 or bfloat16, of any size; else for the
/// inputs x, scale, offset, float16. Throws `Error` with ATB's codes: 5 for the number
/// of inputs, 8 and 9 for the shape of x, 13 for dtypes and formats, 16 for a scale of more than two dimensions, 8 for
/// sizes: the last axis of x a multiple of 16 (and at most 2^22 with PER_CHANNEL), scale [1], or [n] or [1, n] with
/// PER_CHANNEL, offset [1].
TensorDesc infer_shape(const QuantAllReduceParam& param, std::span<const TensorDesc> inputs);

/// A plan, as AllToAllVOperation is: infer_shape and setup are collective where they fail.
class QuantAllReduceOperation {
  public:
    QuantAllReduceOperation(QuantAllReduceParam param, std::optional<DeviceInfo> device, Connect connect);

    const QuantAllReduceParam& param() const { return param_; }
    /// The output of these inputs, after the checks of infer_shape, with outputs also those of setup. Connects to
    /// nobody and tells nobody: for callers that move the data themselves.
    TensorDesc check(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const;
    TensorDesc infer_shape(std::span<const TensorDesc> inputs);
    void setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs);
    uint64_t workspace_size() const { return 0; }

    /// Blocks until the output is complete. Inputs as in infer_shape. With DYNAMIC more outputs may follow the first,
    /// states that are read and replaced, float32: the error feedback, of as many elements as x, and if the sum is
    /// quantized too that of the sum, of quant_part(). The output may be the input, if their dtypes are equal.
    void execute(std::span<const Buffer> inputs, std::span<const Buffer> outputs, double timeout = -1);

    void announce(const Error& error) { member_.announce(error); }

  private:
    struct Plan {
        CommunicatorPtr communicator;  ///< null until set up
        int64_t count = 0;
        size_t scales = 0;
        DType dtype = DType::int8, out_dtype = DType::float16;
        size_t states = 0;         ///< outputs after the first
        int64_t gather_state = 0;  ///< elements of the second state
    };

    bool dynamic() const { return param_.quant_type == QuantType::DYNAMIC; }
    Plan check_setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const;
    Plan check_execute(std::span<const Buffer> inputs, std::span<const Buffer> outputs);

    const QuantAllReduceParam param_;
    Member member_;
    std::mutex planning_;
    Plan plan_;  ///< under planning_
};

}  // namespace alltoallv
