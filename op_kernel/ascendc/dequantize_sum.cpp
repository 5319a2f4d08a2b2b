// Adds what the codes of several ranks stand for, in the order of the ranks, and rounds once.
#include "group_codes.h"
#include "quantized_tiling.h"
#include "tiling.h"

namespace alltoallv_kernels {

template <class Out>
__aicore__ inline void DequantizeSum(GM_ADDR codes, GM_ADDR scales, GM_ADDR y, const DequantizeSumTiling& tiling) {
    const Groups groups = Groups::OfCore(tiling.count, tiling.group, tiling.bits);
    if (groups.number == 0) return;
    const uint64_t bytes = groups.AllCodes(), all = groups.All(), first = groups.first;
    GlobalTensor<int8_t> code;
    GlobalTensor<float> scale;
    GlobalTensor<Out> output;
    code.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(codes), tiling.ranks * bytes);
    scale.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(scales), tiling.ranks * all);
    output.SetGlobalBuffer(reinterpret_cast<__gm__ Out*>(y), tiling.count);
    TPipe pipe;
    GroupSummer<Out> summer;
    summer.Init(static_cast<Type>(tiling.type), tiling.saturate != 0, tiling.average != 0, &pipe);
    summer.Run(
        groups, tiling.ranks, [&](uint32_t j, uint64_t i) { return code[j * bytes + groups.CodesOf(first + i)]; },
        [&](uint32_t j, uint64_t i) { return scale[j * all + first + i]; }, output[first * tiling.group]);
}

}  // namespace alltoallv_kernels

extern "C" __global__ __aicore__ void alltoallv_dequantize_sum(GM_ADDR codes, GM_ADDR scales, GM_ADDR y,
                                                               GM_ADDR tiling) {
    using namespace alltoallv_kernels;
    const DequantizeSumTiling numbers = TilingOf<DequantizeSumTiling>(tiling);
    const Type type = static_cast<Type>(numbers.type);
    if (type == Type::float32) DequantizeSum<float>(codes, scales, y, numbers);
    if (type == Type::float16) DequantizeSum<half>(codes, scales, y, numbers);
    if (type == Type::bfloat16) DequantizeSum<bfloat16_t>(codes, scales, y, numbers);
}
