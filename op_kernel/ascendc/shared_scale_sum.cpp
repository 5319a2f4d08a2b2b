// The sum of several ranks' int8 values with a common scale and offset: (sum of x + ranks * offset) * scale.
#include "quantized_tiling.h"
#include "shared_scale.h"
#include "tiling.h"

namespace alltoallv_kernels {

template <class Out>
__aicore__ inline void SharedScaleSum(GM_ADDR x, GM_ADDR scale, GM_ADDR offset, GM_ADDR y,
                                      const SharedScaleTiling& tiling) {
    const uint64_t cores = GetBlockNum(), core = GetBlockIdx();
    const uint64_t cells = (tiling.count + 31) / 32;
    const uint64_t first = cells * core / cores * 32;
    uint64_t end = cells * (core + 1) / cores * 32;
    if (end > tiling.count) end = tiling.count;
    if (first >= end) return;
    GlobalTensor<int8_t> input;
    GlobalTensor<Out> output;
    input.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(x), tiling.ranks * tiling.count);
    output.SetGlobalBuffer(reinterpret_cast<__gm__ Out*>(y), tiling.count);
    TPipe pipe;
    SharedScaleSummer<Out> summer;
    summer.Init(static_cast<Type>(tiling.type), static_cast<Type>(tiling.scale_type), tiling.saturate != 0,
                tiling.channels, &pipe);
    summer.SetScale(scale, offset, tiling.ranks);
    summer.Run(
        first, end - first, tiling.ranks, [&](uint32_t j) { return input[j * tiling.count + first]; }, output[first]);
}

}  // namespace alltoallv_kernels

extern "C" __global__ __aicore__ void alltoallv_shared_scale_sum(GM_ADDR x, GM_ADDR scale, GM_ADDR offset, GM_ADDR y,
                                                                 GM_ADDR tiling) {
    using namespace alltoallv_kernels;
    const SharedScaleTiling numbers = TilingOf<SharedScaleTiling>(tiling);
    const Type type = static_cast<Type>(numbers.type);
    if (type == Type::float32) SharedScaleSum<float>(x, scale, offset, y, numbers);
    if (type == Type::float16) SharedScaleSum<half>(x, scale, offset, y, numbers);
    if (type == Type::bfloat16) SharedScaleSum<bfloat16_t>(x, scale, offset, y, numbers);
}
