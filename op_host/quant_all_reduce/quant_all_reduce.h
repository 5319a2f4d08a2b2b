// The ATB-shaped quantized AllReduce: int8 input with a scale and an offset that all ranks share, float16 output. As an
// extension, floats that every rank quantizes with its own scales.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "all_to_all_v/checks.h"
#include "all_to_all_v/operation.h"
#include "all_to_all_v/param.h"
#include "runtime/core/quant_reduction.h"

namespace alltoallv {

/// `scale` has one value, or one per entry of the last axis; the numbers are ATB's. DYNAMIC is our extension: no scale
/// is given, every rank computes one per group of elements.
enum class QuantType : int { UNQUANT = 0, PER_TENSOR = 1, PER_CHANNEL = 2, MAX = 3, DYNAMIC = 16 };

/// The fields of ATB's AllReduceParam that the quantized form uses, and the fields of DYNAMIC.
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

/// infer_shape gives the output, in the shape of x: with DYNAMIC for the input x of float32, float16 or bfloat16, of
/// any size; else for the inputs x, scale, offset, float16. It throws `Error` with ATB's codes: 5 for the number
/// of inputs, 8 and 9 for the shape of x, 13 for dtypes and formats, 16 for a scale of more than two dimensions, 8 for
/// sizes: the last axis of x a multiple of 16 (and at most 2^22 with PER_CHANNEL), scale [1], or [n] or [1, n] with
/// PER_CHANNEL, offset [1].
///
/// With DYNAMIC more outputs may follow the first, states that are read and replaced, float32: the error feedback, of
/// as many elements as x, and if the sum is quantized as well the sum's, of quant_part().
class QuantAllReduceOperation final : public Operation {
  public:
    /// Throws invalid_param, code 1: only "lccl" (on a CPU the same as "auto" and "shm") and the sum are quantized.
    QuantAllReduceOperation(QuantAllReduceParam param, std::optional<DeviceInfo> device, Connect connect);

  private:
    bool dynamic() const { return param_.quant_type == QuantType::DYNAMIC; }
    DType output_dtype(DType input) const;
    void check_create(const std::optional<DeviceInfo>& device) const;
    TensorDesc infer_dynamic(std::span<const TensorDesc> inputs) const;
    TensorDesc infer(std::span<const TensorDesc> inputs) const override;
    void check_setup(std::span<const TensorDesc> inputs, std::span<const TensorDesc> outputs) const override;
    bool works_in_place() const override { return true; }
    void run(const Plan& plan, std::span<const ByteRange> inputs, std::span<const ByteRange> outputs, double timeout,
             void* stream) const override;

    const QuantAllReduceParam param_;
};

}  // namespace alltoallv
