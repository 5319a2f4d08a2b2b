// The sum of int8 values that have one scale and one offset on all ranks: exact in int32, then one addition, one
// multiplication, one rounding.
#pragma once

#include "vectors.h"

namespace alltoallv_kernels {

template <class Out>
class SharedScaleSummer {
  public:
    __aicore__ inline void Init(Type type, Type scale_type, bool saturate, uint64_t channels, TPipe* pipe) {
        scale_type_ = scale_type;
        channels_ = channels;
        rounding_.Init(type, saturate, pipe);
        pipe->InitBuffer(inputs_, 1, tile_elements);
        pipe->InitBuffer(outputs_, 1, tile_elements * sizeof(Out));
        pipe->InitBuffer(halves_, tile_elements * sizeof(half));
        pipe->InitBuffer(values_, tile_elements * sizeof(int32_t));
        pipe->InitBuffer(sums_, tile_elements * sizeof(int32_t));
        pipe->InitBuffer(scales_, tile_elements * sizeof(float));
        pipe->InitBuffer(narrow_, 1, tile_elements * sizeof(float));
        pipe->InitBuffer(scale_bits_, tile_elements * sizeof(int32_t));
    }

    /// Scale and offset are read once, before the first sum; with channels scales are read for each piece.
    __aicore__ inline void SetScale(GM_ADDR scale, GM_ADDR offset, uint32_t ranks) {
        scale_ = scale;
        const LocalTensor<float> scales = scales_.template Get<float>();
        ReadScales(scales, offset, 0, 1);
        Muls(scales, scales, static_cast<float>(ranks), 1);
        Wait();
        offset_ = scales.GetValue(0);
        offset_finite_ = (scales.template ReinterpretCast<int32_t>().GetValue(0) & 0x7FFFFFFF) < inf_bits;
        Release();
        if (channels_ > 1) return;
        ReadScales(scales, scale, 0, 1);
        Wait();
        one_ = scales.GetValue(0);
        one_finite_ = (scales.template ReinterpretCast<int32_t>().GetValue(0) & 0x7FFFFFFF) < inf_bits;
        Release();
    }

    /// Elements `first` to `first + count` of the tensor; `x(j)` gives where rank j's begin.
    template <class Inputs>
    __aicore__ inline void Run(uint64_t first, uint64_t count, uint32_t ranks, const Inputs& x,
                               const GlobalTensor<Out>& out) {
        for (uint64_t at = 0; at < count;) {
            uint64_t length = count - at < tile_elements ? count - at : tile_elements;
            const uint64_t channel = channels_ > 1 ? (first + at) % channels_ : 0;
            if (channels_ > 1 && length > channels_ - channel) length = channels_ - channel;
            Piece(at, static_cast<uint32_t>(length), channel, ranks, x, out);
            at += length;
        }
    }

  private:
    template <class Inputs>
    __aicore__ inline void Piece(uint64_t at, uint32_t length, uint64_t channel, uint32_t ranks, const Inputs& x,
                                 const GlobalTensor<Out>& out) {
        const uint32_t count = round_up(length, 32);
        const LocalTensor<int32_t> sums = sums_.template Get<int32_t>(), values = values_.template Get<int32_t>();
        const LocalTensor<half> halves = halves_.template Get<half>();
        for (uint32_t j = 0; j < ranks; ++j) {
            LocalTensor<int8_t> input = inputs_.template AllocTensor<int8_t>();
            DataCopyPad(input, x(j)[at], BlocksIn(1, length, count), NoPadding<int8_t>());
            inputs_.EnQue(input);
            input = inputs_.template DeQue<int8_t>();
            Cast(halves, input, RoundMode::CAST_NONE, count);
            inputs_.FreeTensor(input);
            PipeBarrier<PIPE_V>();
            Cast(j == 0 ? sums : values, halves, RoundMode::CAST_RINT, count);
            PipeBarrier<PIPE_V>();
            if (j > 0) Add(sums, sums, values, count);
            PipeBarrier<PIPE_V>();
        }
        const LocalTensor<float> result = values_.template Get<float>();
        Cast(result, sums, RoundMode::CAST_NONE, count);
        PipeBarrier<PIPE_V>();
        Adds(result, result, offset_, count);
        PipeBarrier<PIPE_V>();
        LocalTensor<Out> output = outputs_.template AllocTensor<Out>();
        if (channels_ > 1) {
            const LocalTensor<float> scales = scales_.template Get<float>();
            const LocalTensor<int32_t> finite = scale_bits_.template Get<int32_t>();
            Duplicate(scales, 0.0f, count);
            PipeBarrier<PIPE_ALL>();
            ReadScales(scales, scale_, channel, length);
            Mul(result, result, scales, count);
            rounding_.MagnitudesOf(finite, scales, count);
            Above(finite, finite, inf_bits - 1, count);
            if (offset_finite_)
                rounding_.Run(output, result, count, true, &finite);
            else
                rounding_.Run(output, result, count);
        } else {
            Muls(result, result, one_, count);
            PipeBarrier<PIPE_V>();
            rounding_.Run(output, result, count, offset_finite_ && one_finite_);
        }
        outputs_.EnQue(output);
        output = outputs_.template DeQue<Out>();
        DataCopyPad(
            out[at], output,
            BlocksOut(1, length * static_cast<uint32_t>(sizeof(Out)), count * static_cast<uint32_t>(sizeof(Out))));
        outputs_.FreeTensor(output);
    }

    __aicore__ inline void ReadScales(const LocalTensor<float>& to, GM_ADDR from, uint64_t first, uint32_t count) {
        if (scale_type_ == Type::float32) Widened<float>(to, from, first, count);
        if (scale_type_ == Type::float16) Widened<half>(to, from, first, count);
        if (scale_type_ == Type::bfloat16) Widened<bfloat16_t>(to, from, first, count);
        PipeBarrier<PIPE_V>();
    }

    template <class T>
    __aicore__ inline void Widened(const LocalTensor<float>& to, GM_ADDR from, uint64_t first, uint32_t count) {
        GlobalTensor<T> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(from), first + count);
        LocalTensor<T> narrow = narrow_.template AllocTensor<T>();
        const uint32_t bytes = count * static_cast<uint32_t>(sizeof(T));
        DataCopyPad(narrow, source[first], BlocksIn(1, bytes, round_up(bytes, 32)), NoPadding<T>());
        narrow_.EnQue(narrow);
        narrow = narrow_.template DeQue<T>();
        Copy(to, narrow, count);
        narrow_.FreeTensor(narrow);
    }

    __aicore__ inline static void Copy(const LocalTensor<float>& to, const LocalTensor<float>& from, uint32_t count) {
        Or(Words(to), Words(from), Words(from), 2 * count);
    }
    template <class T>
    __aicore__ inline static void Copy(const LocalTensor<float>& to, const LocalTensor<T>& from, uint32_t count) {
        Cast(to, from, RoundMode::CAST_NONE, count);
    }

    /// Scalars may read what the vector unit has written, and back.
    __aicore__ inline static void Wait() {
        SetFlag<HardEvent::V_S>(0);
        WaitFlag<HardEvent::V_S>(0);
    }
    __aicore__ inline static void Release() {
        SetFlag<HardEvent::S_V>(0);
        WaitFlag<HardEvent::S_V>(0);
    }

    Type scale_type_;
    uint64_t channels_;
    GM_ADDR scale_;
    float one_ = 1, offset_ = 0;
    bool one_finite_ = true, offset_finite_ = true;
    Rounding rounding_;
    TQue<TPosition::VECIN, 1> inputs_, narrow_;
    TQue<TPosition::VECOUT, 1> outputs_;
    TBuf<TPosition::VECCALC> halves_, values_, sums_, scales_, scale_bits_;
};

}  // namespace alltoallv_kernels
