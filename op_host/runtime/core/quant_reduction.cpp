#include "runtime/core/quant_reduction.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "runtime/base/error.h"

namespace alltoallv {
namespace {

void check_scale(const char* name, std::span<const float> scale, int64_t count) {
    const auto size = static_cast<int64_t>(scale.size());
    if (size >= 1 && count % size == 0) return;
    throw invalid_param(1067, std::string(name) + " has " + std::to_string(size) +
                                  " values, expected 1, or one per entry " + "of the last axis of " +
                                  std::to_string(count) + " elements");
}

}  // namespace

void check_options(const QuantReduction& r) {
    const bool feeds_back = r.feeds_back || r.gather_feeds_back;
    if (r.tells_bound && r.mode != QuantMode::dynamic)
        throw invalid_param(1072, "bound is given with a shared scale, expected the dynamic mode");
    if (r.tells_bound && r.gather_feeds_back && info(r.format).scale == ScaleKind::e4m3)
        throw invalid_param(1073, "bound is given with error feedback of the second quantization in format ",
                            info(r.format).name, ", whose scale of the tensor may not hold it");
    if (r.leaves != 0 && (r.mode != QuantMode::dynamic || r.op == OpKind::quantized_reduce_scatter || feeds_back))
        throw invalid_param(1074, "leaves is ", r.leaves,
                            ", expected an all-reduce of the dynamic mode, without error feedback");
    if (feeds_back && r.mode != QuantMode::dynamic)
        throw invalid_param(1076, "error_feedback is given with a shared scale, expected the dynamic mode");
}

void check(const QuantReduction& r) {
    const bool shared = r.mode == QuantMode::shared_scale;
    if (shared ? r.dtype != DType::int8 : !info(r.dtype).quantizes)
        throw invalid_param(1068, "dtype is " + std::string(name_of(r.dtype)) + ", expected " +
                                      (shared ? "int8 with a shared scale" : "float32, float16 or bfloat16"));
    if (!info(r.out_dtype).quantizes)
        throw invalid_param(1069, "the output's dtype is " + std::string(name_of(r.out_dtype)) +
                                      ", expected float32, float16 or bfloat16");
    if (!takes_group(r.format, r.group_size))
        throw invalid_param(1070,
                            "group_size is " + std::to_string(r.group_size) + ", expected " + groups_taken(r.format));
    const bool scatters = r.op == OpKind::quantized_reduce_scatter;
    if (scatters && (r.mode != QuantMode::dynamic || r.requantizes))
        throw invalid_param(1071, "a quantized_reduce_scatter has neither a shared scale nor a second quantization");
    check_options(r);
    if (r.mode == QuantMode::dynamic) return;
    check_scale("scale", r.scale, total_count(r));
    if (r.mode == QuantMode::two_scales && r.scale_2.size() != r.scale.size())
        throw invalid_param(1075, "scale_2 has " + std::to_string(r.scale_2.size()) + " values, expected " +
                                      std::to_string(r.scale.size()) + ", as many as scale");
}

int64_t total_count(const QuantReduction& r) {
    return std::accumulate(r.counts.begin(), r.counts.end(), int64_t{0});
}

QuantPart quant_part(int64_t count, int64_t group_size, int size, int rank) {
    const int64_t groups = count / group_size + (count % group_size != 0);
    const int64_t groups_each = groups / size + (groups % size != 0);
    // A share that reaches beyond the end is everything: the product might not fit 64 bits.
    const int64_t share = groups_each > count / group_size ? count : groups_each * group_size;
    const int64_t begin = rank == 0 ? 0 : share > count / rank ? count : share * rank;
    return {begin, std::min(share, count - begin)};
}

}  // namespace alltoallv
