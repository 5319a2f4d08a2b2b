// Steps on float32 vectors that several kernels take, in instructions of 2201, so that every bit is defined: what the
// chip leaves open (NaN in comparisons, casts that overflow) is done on the bits, as integers.
#pragma once

#include "kernel_operator.h"

namespace alltoallv_kernels {

using namespace AscendC;

constexpr uint32_t tile_elements = 3072;  // what the buffers of quantizer and summer together leave room for
constexpr int32_t inf_bits = 0x7F800000, nan_bits = 0x7FC00000, least_normal_bits = 0x00800000;

/// Data types by ACL's numbers.
enum class Type : uint32_t { float32 = 0, float16 = 1, bfloat16 = 27 };

constexpr uint32_t bytes_of(Type type) {
    return type == Type::float32 ? 4 : 2;
}

constexpr uint32_t round_up(uint32_t n, uint32_t unit) {
    return (n + unit - 1) / unit * unit;
}

/// Bytes of so many codes of 8 or 4 bits that begin at a byte.
template <class Count>
constexpr Count code_bytes(Count codes, uint32_t bits) {
    return bits == 8 ? codes : (codes + 1) / 2;
}

/// Blocks of `bytes` in device memory, `ub_bytes` apart in the unified buffer (a multiple of 32).
__aicore__ inline DataCopyExtParams BlocksIn(uint32_t count, uint32_t bytes, uint32_t ub_bytes) {
    return {static_cast<uint16_t>(count), bytes, 0, (ub_bytes - round_up(bytes, 32)) / 32, 0};
}
__aicore__ inline DataCopyExtParams BlocksOut(uint32_t count, uint32_t bytes, uint32_t ub_bytes) {
    return {static_cast<uint16_t>(count), bytes, (ub_bytes - round_up(bytes, 32)) / 32, 0, 0};
}
template <class T>
__aicore__ inline DataCopyPadExtParams<T> NoPadding() {
    return {false, 0, 0, T()};
}

/// A tensor of 4 bytes an element, as 2 elements of 16 bits, which And and Or take.
template <class T>
__aicore__ inline LocalTensor<uint16_t> Words(const LocalTensor<T>& tensor) {
    return tensor.template ReinterpretCast<uint16_t>();
}

/// Bits of float32 without their signs.
class Magnitudes {
  public:
    __aicore__ inline void Init(TPipe* pipe) {
        pipe->InitBuffer(mask_, tile_elements * sizeof(int32_t));
        Duplicate(mask_.Get<int32_t>(), 0x7FFFFFFF, tile_elements);
    }

    __aicore__ inline void Of(const LocalTensor<int32_t>& to, const LocalTensor<float>& x, uint32_t count) const {
        And(Words(to), Words(x), Words(mask_.Get<int32_t>()), 2 * count);
        PipeBarrier<PIPE_V>();
    }

  private:
    TBuf<TPosition::VECCALC> mask_;
};

/// Sets to[i] to 1 where magnitude[i] > limit, else 0.
__aicore__ inline void Above(const LocalTensor<int32_t>& to, const LocalTensor<int32_t>& magnitude, int32_t limit,
                             uint32_t count) {
    Maxs(to, magnitude, limit, count);
    PipeBarrier<PIPE_V>();
    Adds(to, to, -limit, count);
    PipeBarrier<PIPE_V>();
    Mins(to, to, 1, count);
    PipeBarrier<PIPE_V>();
}

/// Rounds float32 to the type of the output, half to even, with one NaN.
class Rounding {
  public:
    __aicore__ inline void Init(Type type, bool saturate, TPipe* pipe) {
        type_ = type;
        saturate_ = saturate;
        magnitudes_.Init(pipe);
        for (TBuf<TPosition::VECCALC>* each : {&magnitude_, &flags_, &keep_})
            pipe->InitBuffer(*each, tile_elements * sizeof(int32_t));
    }

    __aicore__ inline void MagnitudesOf(const LocalTensor<int32_t>& to, const LocalTensor<float>& x, uint32_t count) {
        magnitudes_.Of(to, x, count);
    }

    /// Overwrites `x`. Finite values that do not fit become the largest; with `every` set so do infinite ones, except
    /// where `spared` is 1.
    template <class Out>
    __aicore__ inline void Run(const LocalTensor<Out>& out, const LocalTensor<float>& x, uint32_t count,
                               bool every = false, const LocalTensor<int32_t>* spared = nullptr) {
        const LocalTensor<int32_t> magnitude = magnitude_.Get<int32_t>(), flags = flags_.Get<int32_t>();
        const LocalTensor<int32_t> keep = keep_.Get<int32_t>(), bits = x.template ReinterpretCast<int32_t>();
        magnitudes_.Of(magnitude, x, count);
        Above(flags, magnitude, inf_bits, count);  // NaN
        Adds(keep, flags, -1, count);              // all bits, or none for a NaN
        Sub(bits, bits, magnitude, count);         // the sign
        PipeBarrier<PIPE_V>();
        And(Words(bits), Words(bits), Words(keep), 2 * count);
        And(Words(magnitude), Words(magnitude), Words(keep), 2 * count);
        PipeBarrier<PIPE_V>();
        if (saturate_) Clamp<Out>(magnitude, keep, count, every, spared);
        Add(bits, bits, magnitude, count);
        PipeBarrier<PIPE_V>();
        Finish(out, x, flags, count);
    }

  private:
    template <class Out>
    __aicore__ inline void Clamp(const LocalTensor<int32_t>& magnitude, const LocalTensor<int32_t>& infinite,
                                 uint32_t count, bool every, const LocalTensor<int32_t>* spared) {
        const int32_t most = type_ == Type::float16 ? 0x477FE000 : type_ == Type::bfloat16 ? 0x7F7F0000 : 0x7F7FFFFF;
        Above(infinite, magnitude, inf_bits - 1, count);
        Mins(magnitude, magnitude, most, count);
        PipeBarrier<PIPE_V>();
        if (every && spared == nullptr) return;
        if (every) {
            Mul(infinite, infinite, *spared, count);
            PipeBarrier<PIPE_V>();
        }
        Muls(infinite, infinite, inf_bits - most, count);  // what stays infinite has become the largest
        PipeBarrier<PIPE_V>();
        Add(magnitude, magnitude, infinite, count);
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Finish(const LocalTensor<float>& out, const LocalTensor<float>& x,
                                  const LocalTensor<int32_t>& nans, uint32_t count) {
        Muls(nans, nans, nan_bits, count);
        PipeBarrier<PIPE_V>();
        Or(Words(out), Words(x), Words(nans), 2 * count);
    }

    template <class Out>
    __aicore__ inline void Finish(const LocalTensor<Out>& out, const LocalTensor<float>& x,
                                  const LocalTensor<int32_t>& nans, uint32_t count) {
        const LocalTensor<int16_t> narrow = keep_.Get<int16_t>();
        Cast(narrow, nans, RoundMode::CAST_NONE, count);
        Cast(out, x, RoundMode::CAST_RINT, count);
        PipeBarrier<PIPE_V>();
        Muls(narrow, narrow, static_cast<int16_t>(type_ == Type::float16 ? 0x7E00 : 0x7FC0), count);
        PipeBarrier<PIPE_V>();
        Or(Words(out), Words(out), Words(narrow), count);
    }

    Type type_;
    bool saturate_;
    Magnitudes magnitudes_;
    TBuf<TPosition::VECCALC> magnitude_, flags_, keep_;
};

}  // namespace alltoallv_kernels
