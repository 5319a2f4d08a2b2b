// The quantized all-reduce in one kernel: quantize, all-to-all of codes, sum in the order of the ranks, dequantize,
// all-gather, through the windows of all ranks.
//
// A lane takes its slice of the tensor in chunks that fit into its half of the window. A chunk is a round of two
// phases: each rank's codes of all parts are in its window; then each rank's own part of the result is.
#include "group_codes.h"
#include "lane.h"
#include "quantized_tiling.h"
#include "shared_scale.h"
#include "tiling.h"

namespace alltoallv_kernels {

/// A lane's data in a half of a window: codes, their scales, and the results of this rank's part.
struct ChunkPlaces {
    uint64_t units;       ///< of a chunk: groups, or 32 elements
    uint64_t unit;        ///< elements of a unit
    uint64_t unit_bytes;  ///< codes of a unit
    uint64_t scales, results;
};

__aicore__ inline ChunkPlaces PlacesOf(const QuantAllReduceTiling& tiling, uint32_t out_bytes) {
    const uint64_t unit = unit_of(tiling.group);
    const uint64_t unit_bytes = code_bytes(unit, tiling.bits), bytes = tiling.window.lane_bytes - 3 * 512;
    uint64_t units = bytes / (unit_bytes + unit * out_bytes + sizeof(float));
    units = units / tiling.window.size * tiling.window.size;
    const uint64_t scales = (units * unit_bytes + 511) / 512 * 512;
    return {units, unit, unit_bytes, scales, (scales + units * sizeof(float) + 511) / 512 * 512};
}

template <class Quantizer, class Summer, class Out>
class QuantAllReduce {
  public:
    __aicore__ inline QuantAllReduce(const QuantAllReduceTiling* tiling, Lane* lane, TPipe* pipe)
        : tiling_(*tiling), lane_(*lane), places_(PlacesOf(*tiling, sizeof(Out))) {
        pipe->InitBuffer(tiles_, 1, tile_elements);
    }

    /// `quantize(first unit, units, codes, scales)` and `sum(first unit, units, where ranks' codes begin, out)`.
    __aicore__ inline void Run(Quantizer& quantizer, Summer& summer, GM_ADDR y) {
        const uint64_t unit = places_.unit, all = (tiling_.count + unit - 1) / unit;
        const uint64_t end = all * (lane_.Number() + 1) / lane_.Lanes();
        GlobalTensor<Out> output;
        output.SetGlobalBuffer(reinterpret_cast<__gm__ Out*>(y), tiling_.count);
        for (uint64_t first = all * lane_.Number() / lane_.Lanes(); first < end; first += places_.units) {
            const uint64_t units = end - first < places_.units ? end - first : places_.units;
            lane_.Begin();
            quantizer(first, units, Codes(lane_.Rank()), Scales(lane_.Rank()));
            lane_.Signal(0);
            if (!lane_.Wait(0)) return;
            const uint64_t begin = Part(units, lane_.Rank()), part = Part(units, lane_.Rank() + 1) - begin;
            if (part > 0)
                summer(*this, first + begin, part, begin,
                       lane_.template Data<Out>(lane_.Rank(), places_.results, part * unit));
            lane_.Signal(1);
            if (!lane_.Wait(1)) return;
            for (uint32_t j = 0; j < lane_.Size(); ++j) Gather(j, first, units, output);
        }
    }

    /// From a unit on.
    __aicore__ inline GlobalTensor<int8_t> Codes(uint32_t rank, uint64_t unit = 0) const {
        return lane_.template Data<int8_t>(rank, 0, places_.units * places_.unit_bytes)[unit * places_.unit_bytes];
    }
    __aicore__ inline GlobalTensor<float> Scales(uint32_t rank) const {
        return lane_.template Data<float>(rank, places_.scales, places_.units);
    }
    __aicore__ inline uint32_t Ranks() const { return lane_.Size(); }

  private:
    /// Where a rank's part of a chunk begins, in units.
    __aicore__ inline uint64_t Part(uint64_t units, uint32_t rank) const { return units * rank / lane_.Size(); }

    __aicore__ inline void Gather(uint32_t rank, uint64_t first, uint64_t units, const GlobalTensor<Out>& output) {
        const uint64_t unit = places_.unit;
        const uint64_t begin = (first + Part(units, rank)) * unit;
        uint64_t end = (first + Part(units, rank + 1)) * unit;
        if (end > tiling_.count) end = tiling_.count;
        if (begin >= end) return;
        const GlobalTensor<Out> from = lane_.template Data<Out>(rank, places_.results, end - begin);
        constexpr uint64_t tile = tile_elements / sizeof(Out);
        for (uint64_t at = 0; at < end - begin; at += tile) {
            const uint64_t left = end - begin - at;
            const uint32_t bytes = static_cast<uint32_t>((left < tile ? left : tile) * sizeof(Out));
            LocalTensor<Out> piece = tiles_.template AllocTensor<Out>();
            DataCopyPad(piece, from[at], BlocksIn(1, bytes, round_up(bytes, 32)), NoPadding<Out>());
            tiles_.EnQue(piece);
            piece = tiles_.template DeQue<Out>();
            DataCopyPad(output[begin + at], piece, BlocksOut(1, bytes, round_up(bytes, 32)));
            tiles_.FreeTensor(piece);
        }
    }

    const QuantAllReduceTiling& tiling_;
    Lane& lane_;
    const ChunkPlaces places_;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> tiles_;
};

/// Scales of each rank's own.
template <class In, class Out>
__aicore__ inline void Dynamic(GM_ADDR x, GM_ADDR y, const QuantAllReduceTiling& tiling, Lane& lane, TPipe& pipe) {
    GlobalTensor<In> input;
    input.SetGlobalBuffer(reinterpret_cast<__gm__ In*>(x), tiling.count);
    GroupQuantizer<In> codes;
    GroupSummer<Out> sums;
    codes.Init(tiling.bits, &pipe);
    sums.Init(static_cast<Type>(tiling.output_type), tiling.saturate != 0, tiling.average != 0, &pipe);
    auto quantize = [&](uint64_t first, uint64_t units, const GlobalTensor<int8_t>& code,
                        const GlobalTensor<float>& scale) {
        codes.Run({tiling.count, tiling.group, first, units, tiling.bits}, input, code, scale);
    };
    auto sum = [&](const auto& all, uint64_t first, uint64_t units, uint64_t begin, const GlobalTensor<Out>& out) {
        const Groups groups{tiling.count, tiling.group, first, units, tiling.bits};
        sums.Run(
            groups, all.Ranks(), [&](uint32_t j, uint64_t i) { return all.Codes(j, begin + i); },
            [&](uint32_t j, uint64_t i) { return all.Scales(j)[begin + i]; }, out);
    };
    QuantAllReduce<decltype(quantize), decltype(sum), Out> reduce(&tiling, &lane, &pipe);
    reduce.Run(quantize, sum, y);
}

/// One scale for all.
template <class Out>
__aicore__ inline void Shared(GM_ADDR x, GM_ADDR scale, GM_ADDR offset, GM_ADDR y, const QuantAllReduceTiling& tiling,
                              Lane& lane, TPipe& pipe) {
    GlobalTensor<int8_t> input;
    input.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(x), tiling.count);
    SharedScaleSummer<Out> sums;
    sums.Init(static_cast<Type>(tiling.output_type), static_cast<Type>(tiling.scale_type), tiling.saturate != 0,
              tiling.channels, &pipe);
    sums.SetScale(scale, offset, lane.Size());
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> tiles;
    pipe.InitBuffer(tiles, 1, tile_elements);
    const auto elements = [&](uint64_t first, uint64_t units) {
        const uint64_t end = (first + units) * 32;
        return static_cast<uint64_t>((end < tiling.count ? end : tiling.count) - first * 32);
    };
    auto copy = [&](uint64_t first, uint64_t units, const GlobalTensor<int8_t>& code, const GlobalTensor<float>&) {
        const uint64_t count = elements(first, units);
        for (uint64_t at = 0; at < count; at += tile_elements) {
            const uint32_t bytes = static_cast<uint32_t>(count - at < tile_elements ? count - at : tile_elements);
            LocalTensor<int8_t> tile = tiles.AllocTensor<int8_t>();
            DataCopyPad(tile, input[first * 32 + at], BlocksIn(1, bytes, round_up(bytes, 32)), NoPadding<int8_t>());
            tiles.EnQue(tile);
            tile = tiles.DeQue<int8_t>();
            DataCopyPad(code[at], tile, BlocksOut(1, bytes, round_up(bytes, 32)));
            tiles.FreeTensor(tile);
        }
    };
    auto sum = [&](const auto& all, uint64_t first, uint64_t units, uint64_t begin, const GlobalTensor<Out>& out) {
        sums.Run(first * 32, elements(first, units), all.Ranks(), [&](uint32_t j) { return all.Codes(j, begin); }, out);
    };
    QuantAllReduce<decltype(copy), decltype(sum), Out> reduce(&tiling, &lane, &pipe);
    reduce.Run(copy, sum, y);
}

template <class Out>
__aicore__ inline void Reduce(GM_ADDR x, GM_ADDR scale, GM_ADDR offset, GM_ADDR y, const QuantAllReduceTiling& tiling,
                              Lane& lane, TPipe& pipe) {
    const Type type = static_cast<Type>(tiling.type);
    if (tiling.group == 0)
        Shared<Out>(x, scale, offset, y, tiling, lane, pipe);
    else if (type == Type::float32)
        Dynamic<float, Out>(x, y, tiling, lane, pipe);
    else if (type == Type::float16)
        Dynamic<half, Out>(x, y, tiling, lane, pipe);
    else
        Dynamic<bfloat16_t, Out>(x, y, tiling, lane, pipe);
}

}  // namespace alltoallv_kernels

/// x, y: count elements; scale and offset are read where the input is int8; status: int32 [lanes, 8].
extern "C" __global__ __aicore__ void alltoallv_quant_all_reduce(GM_ADDR x, GM_ADDR scale, GM_ADDR offset, GM_ADDR y,
                                                                 GM_ADDR status, GM_ADDR tiling) {
    using namespace alltoallv_kernels;
    const QuantAllReduceTiling numbers = TilingOf<QuantAllReduceTiling>(tiling);
    const Type type = static_cast<Type>(numbers.output_type);
    TPipe pipe;
    Lane lane;
    lane.Init(&numbers.window, &pipe);
    if (lane.Works()) {
        if (type == Type::float32) Reduce<float>(x, scale, offset, y, numbers, lane, pipe);
        if (type == Type::float16) Reduce<half>(x, scale, offset, y, numbers, lane, pipe);
        if (type == Type::bfloat16) Reduce<bfloat16_t>(x, scale, offset, y, numbers, lane, pipe);
    }
    lane.End(status);
}
