// Quantizes: a float32 scale for each group of elements, and int8 or int4 codes.
#include "group_codes.h"
#include "quantized_tiling.h"
#include "tiling.h"

namespace alltoallv_kernels {

template <class In>
__aicore__ inline void Quantize(GM_ADDR x, GM_ADDR codes, GM_ADDR scales, const QuantizeTiling& tiling) {
    const Groups groups = Groups::OfCore(tiling.count, tiling.group, tiling.bits);
    if (groups.number == 0) return;
    GlobalTensor<In> input;
    GlobalTensor<int8_t> code;
    GlobalTensor<float> scale;
    input.SetGlobalBuffer(reinterpret_cast<__gm__ In*>(x), tiling.count);
    code.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(codes), groups.AllCodes());
    scale.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(scales), groups.All());
    TPipe pipe;
    GroupQuantizer<In> quantizer;
    quantizer.Init(tiling.bits, &pipe);
    quantizer.Run(groups, input, code[groups.CodesOf(groups.first)], scale[groups.first]);
}

}  // namespace alltoallv_kernels

extern "C" __global__ __aicore__ void alltoallv_quantize(GM_ADDR x, GM_ADDR codes, GM_ADDR scales, GM_ADDR tiling) {
    using namespace alltoallv_kernels;
    const QuantizeTiling numbers = TilingOf<QuantizeTiling>(tiling);
    const Type type = static_cast<Type>(numbers.type);
    if (type == Type::float32) Quantize<float>(x, codes, scales, numbers);
    if (type == Type::float16) Quantize<half>(x, codes, scales, numbers);
    if (type == Type::bfloat16) Quantize<bfloat16_t>(x, codes, scales, numbers);
}
