// int8 or int4 codes with a float32 scale for each group of elements: quantize, and sum what several ranks have
// quantized. Two codes of 4 bits share a byte, the even one in its low half; every group begins at a byte.
//
// Groups lie in rows of the unified buffer; a row begins at a block of 32 bytes for every type. A group that is longer
// than a tile is taken in pieces, and read twice.
#pragma once

#include "vectors.h"

namespace alltoallv_kernels {

constexpr uint32_t most_rows = 128;  // groups of a tile

/// Groups of `group` elements of a tensor of `count`, from group `first` on; the last one of the tensor may be shorter.
struct Groups {
    uint64_t count, group, first, number;
    uint32_t bits;  ///< of a code: 8 or 4

    /// This core's share of a tensor's groups.
    __aicore__ inline static Groups OfCore(uint64_t count, uint64_t group, uint32_t bits) {
        const uint64_t all = (count + group - 1) / group, cores = GetBlockNum(), core = GetBlockIdx();
        const uint64_t begin = all * core / cores;
        return {count, group, begin, all * (core + 1) / cores - begin, bits};
    }
    /// Of the tensor.
    __aicore__ inline uint64_t All() const { return (count + group - 1) / group; }
    /// Bytes of the codes of so many elements of one group.
    __aicore__ inline uint64_t CodeBytes(uint64_t elements) const { return code_bytes(elements, bits); }
    /// Bytes of the codes of `i` whole groups.
    __aicore__ inline uint64_t CodesOf(uint64_t i) const { return i * CodeBytes(group); }
    /// Bytes of the codes of the tensor.
    __aicore__ inline uint64_t AllCodes() const { return CodesOf(count / group) + CodeBytes(count % group); }
    /// Elements of a row that holds so many, of which the codes also begin at blocks.
    __aicore__ inline uint32_t Row(uint32_t length) const { return round_up(length, 256 / bits); }

    __aicore__ inline uint64_t Begin(uint64_t i) const { return (first + i) * group; }
    __aicore__ inline uint64_t End(uint64_t i) const { return Begin(i) + group < count ? Begin(i) + group : count; }
    /// Whole groups from the i-th on that fit into a tile: at least 1, unless they are longer.
    __aicore__ inline uint32_t Rows(uint64_t i) const {
        if (group > tile_elements) return 0;
        const uint64_t row = Row(static_cast<uint32_t>(group));
        uint64_t rows = tile_elements / row;
        if (rows > most_rows) rows = most_rows;
        if (rows > number - i) rows = number - i;
        const uint64_t whole = count / group;  // of the tensor
        if (first + i + rows > whole) rows = first + i < whole ? whole - first - i : 1;
        return static_cast<uint32_t>(rows);
    }
};

/// Quantizes groups: scale = largest magnitude / 127 or 7, code = x * (1 / scale), rounded half to even.
template <class In>
class GroupQuantizer {
  public:
    __aicore__ inline void Init(uint32_t bits, TPipe* pipe) {
        bits_ = bits;
        most_ = bits == 8 ? 127.0f : 7.0f;
        magnitudes_.Init(pipe);
        pipe->InitBuffer(inputs_, 1, tile_elements * sizeof(In));
        pipe->InitBuffer(codes_, 1, tile_elements);
        pipe->InitBuffer(values_, tile_elements * sizeof(float));
        pipe->InitBuffer(work_, tile_elements * sizeof(float));
        pipe->InitBuffer(halves_, tile_elements * sizeof(half));
        pipe->InitBuffer(rows_, 5 * most_rows * sizeof(float));
        Duplicate(Row(0), most_, most_rows);
        Duplicate(Row(1), 1.0f, most_rows);
    }

    /// `x` is the whole tensor; codes and scales belong to these groups.
    __aicore__ inline void Run(const Groups& groups, const GlobalTensor<In>& x, const GlobalTensor<int8_t>& codes,
                               const GlobalTensor<float>& scales) {
        for (uint64_t i = 0; i < groups.number;) {
            const uint32_t rows = groups.Rows(i);
            if (rows > 0) {
                Tile(groups, i, rows, x, codes, scales);
                i += rows;
            } else {
                Long(groups, i, x, codes, scales);
                i += 1;
            }
        }
    }

  private:
    // Rows of a number for each group.
    __aicore__ inline LocalTensor<float> Row(uint32_t i) { return rows_.template Get<float>()[i * most_rows]; }
    __aicore__ inline LocalTensor<float> Largest() { return Row(2); }
    __aicore__ inline LocalTensor<float> Scales() { return Row(3); }
    __aicore__ inline LocalTensor<float> Inverses() { return Row(4); }

    __aicore__ inline void Tile(const Groups& groups, uint64_t i, uint32_t rows, const GlobalTensor<In>& x,
                                const GlobalTensor<int8_t>& codes, const GlobalTensor<float>& scales) {
        const uint32_t length = static_cast<uint32_t>(groups.End(i) - groups.Begin(i)), row = groups.Row(length);
        Load(x[groups.Begin(i)], rows, length, row);
        Absolute(rows * row);
        Largest(rows, row);
        ScalesOf(rows);
        for (uint32_t r = 0; r < rows; ++r) Scale(r, r * row, row, Special(r, r * row, length, row));
        Store(codes[groups.CodesOf(i)], rows, length, row);
        StoreScales(scales[i], rows);
    }

    __aicore__ inline void Long(const Groups& groups, uint64_t i, const GlobalTensor<In>& x,
                                const GlobalTensor<int8_t>& codes, const GlobalTensor<float>& scales) {
        int32_t most = 0;
        bool nan = false;
        for (uint64_t at = groups.Begin(i); at < groups.End(i); at += tile_elements) {
            const uint32_t length = Piece(groups.End(i) - at), row = groups.Row(length);
            Load(x[at], 1, length, row);
            Absolute(row);
            Largest(1, row);
            SetFlag<HardEvent::V_S>(0);
            WaitFlag<HardEvent::V_S>(0);
            const int32_t bits = Largest().template ReinterpretCast<int32_t>().GetValue(0);
            if (bits > most) most = bits;
            if (bits >= inf_bits && HasNan(0, length)) nan = true;
            SetFlag<HardEvent::S_V>(0);
            WaitFlag<HardEvent::S_V>(0);
        }
        Largest().template ReinterpretCast<int32_t>().SetValue(0, most);
        SetFlag<HardEvent::S_V>(0);
        WaitFlag<HardEvent::S_V>(0);
        ScalesOf(1);
        if (nan) Scales().template ReinterpretCast<int32_t>().SetValue(0, nan_bits);
        for (uint64_t at = groups.Begin(i); at < groups.End(i); at += tile_elements) {
            const uint32_t length = Piece(groups.End(i) - at), row = groups.Row(length);
            Load(x[at], 1, length, row);
            PipeBarrier<PIPE_ALL>();
            if (most >= inf_bits) Signs(0, row, nan);
            Scale(0, 0, row, most >= inf_bits);
            Store(codes[groups.CodesOf(i) + groups.CodeBytes(at - groups.Begin(i))], 1, length, row);
        }
        StoreScales(scales[i], 1);
    }

    __aicore__ inline static uint32_t Piece(uint64_t left) {
        return static_cast<uint32_t>(left < tile_elements ? left : tile_elements);
    }

    __aicore__ inline LocalTensor<float> Values() { return values_.template Get<float>(); }
    __aicore__ inline LocalTensor<int32_t> ValueBits() { return values_.template Get<int32_t>(); }

    /// Reads rows and widens them; the rest of a row is filled with zeros.
    __aicore__ inline void Load(const GlobalTensor<In>& from, uint32_t rows, uint32_t length, uint32_t row) {
        LocalTensor<In> input = inputs_.template AllocTensor<In>();
        const uint32_t bytes = row * sizeof(In);
        const uint32_t filled = round_up(length * sizeof(In), 32) / sizeof(In);
        DataCopyPad(input, from, BlocksIn(rows, length * sizeof(In), bytes),
                    DataCopyPadExtParams<In>{true, 0, static_cast<uint8_t>(filled - length), In()});
        inputs_.EnQue(input);
        input = inputs_.template DeQue<In>();
        if (filled < row) Duplicate(Values(), 0.0f, rows * row);
        PipeBarrier<PIPE_V>();
        if (filled == row) {
            Widen(Values(), input, rows * row);
        } else {
            for (uint32_t r = 0; r < rows; ++r) Widen(Values()[r * row], input[r * row], filled);
        }
        PipeBarrier<PIPE_V>();
        inputs_.FreeTensor(input);
    }

    __aicore__ inline void Widen(const LocalTensor<float>& to, const LocalTensor<float>& from, uint32_t count) {
        Or(Words(to), Words(from), Words(from), 2 * count);  // a copy of the bits
    }
    template <class Narrow>
    __aicore__ inline void Widen(const LocalTensor<float>& to, const LocalTensor<Narrow>& from, uint32_t count) {
        Cast(to, from, RoundMode::CAST_NONE, count);
    }

    /// Magnitudes into work_; a NaN counts as infinite.
    __aicore__ inline void Absolute(uint32_t count) {
        const LocalTensor<int32_t> work = work_.template Get<int32_t>();
        magnitudes_.Of(work, Values(), count);
        Mins(work, work, inf_bits, count);
        PipeBarrier<PIPE_V>();
    }

    __aicore__ inline void Largest(uint32_t rows, uint32_t row) {
        const LocalTensor<float> work = work_.template Get<float>();
        for (uint32_t at = 64; at < row; at += 64) {
            const uint32_t count = row - at < 64 ? row - at : 64;
            for (uint32_t r = 0; r < rows; ++r) Max(work[r * row], work[r * row], work[r * row + at], count);
            PipeBarrier<PIPE_V>();
        }
        const uint32_t lanes = row < 64 ? row : 64;
        WholeReduceMax(Largest(), work, static_cast<int32_t>(lanes), static_cast<int32_t>(rows), 1, 1,
                       static_cast<int32_t>(row / 8), ReduceOrder::ORDER_ONLY_VALUE);
        PipeBarrier<PIPE_V>();
    }

    /// Scales and their inverses. A scale whose product with the largest code overflows is one step smaller.
    __aicore__ inline void ScalesOf(uint32_t rows) {
        Div(Scales(), Largest(), Row(0), rows);
        PipeBarrier<PIPE_V>();
        Maxs(Scales(), Scales(), 0x1p-125f, rows);
        PipeBarrier<PIPE_V>();
        Muls(Inverses(), Scales(), most_, rows);
        SetFlag<HardEvent::V_S>(0);
        WaitFlag<HardEvent::V_S>(0);
        const LocalTensor<int32_t> largest = Largest().template ReinterpretCast<int32_t>();
        const LocalTensor<int32_t> scales = Scales().template ReinterpretCast<int32_t>();
        const LocalTensor<int32_t> products = Inverses().template ReinterpretCast<int32_t>();
        for (uint32_t r = 0; r < rows; ++r) {
            if (largest.GetValue(r) >= inf_bits) {
                scales.SetValue(r, inf_bits);
            } else if (products.GetValue(r) >= inf_bits) {
                scales.SetValue(r, scales.GetValue(r) - 1);
            }
        }
        SetFlag<HardEvent::S_V>(0);
        WaitFlag<HardEvent::S_V>(0);
        Div(Inverses(), Row(1), Scales(), rows);
        SetFlag<HardEvent::V_S>(0);
        WaitFlag<HardEvent::V_S>(0);
    }

    /// True if group r has an infinite value or a NaN; then its values become its codes' values.
    __aicore__ inline bool Special(uint32_t r, uint32_t at, uint32_t length, uint32_t row) {
        const LocalTensor<int32_t> scales = Scales().template ReinterpretCast<int32_t>();
        if (scales.GetValue(r) < inf_bits) return false;
        const bool nan = HasNan(at, length);
        if (nan) scales.SetValue(r, nan_bits);
        Signs(at, row, nan);
        return true;
    }

    __aicore__ inline bool HasNan(uint32_t at, uint32_t length) {
        for (uint32_t i = 0; i < length; ++i)
            if ((ValueBits().GetValue(at + i) & 0x7FFFFFFF) > inf_bits) return true;
        return false;
    }

    /// Infinite values become the largest code with their sign, others 0; with a NaN in the group all become 0.
    __aicore__ inline void Signs(uint32_t at, uint32_t row, bool nan) {
        constexpr int32_t sign = static_cast<int32_t>(0x80000000);
        const int32_t most = bits_ == 8 ? 0x42FE0000 : 0x40E00000;
        for (uint32_t i = 0; i < row; ++i) {
            const int32_t bits = ValueBits().GetValue(at + i);
            const bool infinite = !nan && (bits & 0x7FFFFFFF) == inf_bits;
            ValueBits().SetValue(at + i, infinite ? (bits & sign) | most : 0);
        }
        SetFlag<HardEvent::S_V>(0);
        WaitFlag<HardEvent::S_V>(0);
    }

    __aicore__ inline void Scale(uint32_t r, uint32_t at, uint32_t row, bool special) {
        if (special) return;
        if (Largest().template ReinterpretCast<int32_t>().GetValue(r) < least_normal_bits) {
            Scales().template ReinterpretCast<int32_t>().SetValue(r, 0);
            Duplicate(Values()[at], 0.0f, row);
        } else {
            Muls(Values()[at], Values()[at], Inverses().GetValue(r), row);
        }
    }

    __aicore__ inline void Store(const GlobalTensor<int8_t>& to, uint32_t rows, uint32_t length, uint32_t row) {
        const LocalTensor<half> halves = halves_.template Get<half>();
        PipeBarrier<PIPE_V>();
        Cast(Values(), Values(), RoundMode::CAST_RINT, rows * row);
        PipeBarrier<PIPE_V>();
        Cast(halves, Values(), RoundMode::CAST_RINT, rows * row);
        PipeBarrier<PIPE_V>();
        LocalTensor<int8_t> codes = codes_.template AllocTensor<int8_t>();
        if (bits_ == 8)
            Cast(codes, halves, RoundMode::CAST_RINT, rows * row);
        else
            Cast(codes.template ReinterpretCast<int4b_t>(), halves, RoundMode::CAST_RINT, rows * row);
        codes_.EnQue(codes);
        codes = codes_.template DeQue<int8_t>();
        DataCopyPad(to, codes, BlocksOut(rows, code_bytes(length, bits_), code_bytes(row, bits_)));
        codes_.FreeTensor(codes);
    }

    __aicore__ inline void StoreScales(const GlobalTensor<float>& to, uint32_t rows) {
        SetFlag<HardEvent::S_MTE3>(1);
        WaitFlag<HardEvent::S_MTE3>(1);
        DataCopyPad(to, Scales(),
                    BlocksOut(1, rows * static_cast<uint32_t>(sizeof(float)),
                              round_up(rows * static_cast<uint32_t>(sizeof(float)), 32)));
        PipeBarrier<PIPE_ALL>();  // the next tile has other scales
    }

    uint32_t bits_;
    float most_;
    Magnitudes magnitudes_;
    TQue<TPosition::VECIN, 1> inputs_;
    TQue<TPosition::VECOUT, 1> codes_;
    TBuf<TPosition::VECCALC> values_, work_, halves_, rows_;
};

/// Adds what each rank's codes stand for, in the order of the ranks, and rounds once.
template <class Out>
class GroupSummer {
  public:
    __aicore__ inline void Init(Type type, bool saturate, bool average, TPipe* pipe) {
        average_ = average;
        rounding_.Init(type, saturate, pipe);
        pipe->InitBuffer(codes_, 1, tile_elements);
        pipe->InitBuffer(scales_, 1, most_rows * sizeof(float));
        pipe->InitBuffer(outputs_, 1, tile_elements * sizeof(Out));
        pipe->InitBuffer(halves_, tile_elements * sizeof(half));
        pipe->InitBuffer(values_, tile_elements * sizeof(float));
        pipe->InitBuffer(sums_, tile_elements * sizeof(float));
    }

    /// `codes(j, i)` and `scales(j, i)` give where rank j's codes of the group and its scale begin.
    template <class Codes, class Scales>
    __aicore__ inline void Run(const Groups& groups, uint32_t ranks, const Codes& codes, const Scales& scales,
                               const GlobalTensor<Out>& out) {
        bits_ = groups.bits;
        for (uint64_t i = 0; i < groups.number;) {
            uint32_t rows = groups.Rows(i);
            if (rows > 0) {
                Tile(groups.Begin(i), static_cast<uint32_t>(groups.End(i) - groups.Begin(i)), groups, i, rows, ranks,
                     codes, scales, out);
            } else {
                rows = 1;
                for (uint64_t at = groups.Begin(i); at < groups.End(i); at += tile_elements) {
                    const uint64_t left = groups.End(i) - at;
                    Tile(at, static_cast<uint32_t>(left < tile_elements ? left : tile_elements), groups, i, 1, ranks,
                         codes, scales, out);
                }
            }
            i += rows;
        }
    }

  private:
    template <class Codes, class Scales>
    __aicore__ inline void Tile(uint64_t at, uint32_t length, const Groups& groups, uint64_t i, uint32_t rows,
                                uint32_t ranks, const Codes& codes, const Scales& scales,
                                const GlobalTensor<Out>& out) {
        const uint32_t row = groups.Row(length), count = rows * row;
        const LocalTensor<float> sums = sums_.template Get<float>(), values = values_.template Get<float>();
        for (uint32_t j = 0; j < ranks; ++j) {
            Values(j == 0 ? sums : values, codes(j, i)[groups.CodeBytes(at - groups.Begin(i))], scales(j, i), rows,
                   length, row);
            if (j > 0) Add(sums, sums, values, count);
            PipeBarrier<PIPE_V>();
        }
        if (average_) {
            Duplicate(values, static_cast<float>(ranks), count);
            PipeBarrier<PIPE_V>();
            Div(sums, sums, values, count);
            PipeBarrier<PIPE_V>();
        }
        LocalTensor<Out> output = outputs_.template AllocTensor<Out>();
        rounding_.Run(output, sums, count);
        outputs_.EnQue(output);
        output = outputs_.template DeQue<Out>();
        DataCopyPad(out[at - groups.Begin(0)], output, BlocksOut(rows, length * sizeof(Out), row * sizeof(Out)));
        outputs_.FreeTensor(output);
    }

    /// Codes times scales.
    __aicore__ inline void Values(const LocalTensor<float>& to, const GlobalTensor<int8_t>& codes,
                                  const GlobalTensor<float>& scales, uint32_t rows, uint32_t length, uint32_t row) {
        LocalTensor<int8_t> code = codes_.template AllocTensor<int8_t>();
        DataCopyPad(code, codes, BlocksIn(rows, code_bytes(length, bits_), code_bytes(row, bits_)),
                    NoPadding<int8_t>());
        codes_.EnQue(code);
        LocalTensor<float> scale = scales_.template AllocTensor<float>();
        DataCopyPad(scale, scales,
                    BlocksIn(1, rows * static_cast<uint32_t>(sizeof(float)),
                             round_up(rows * static_cast<uint32_t>(sizeof(float)), 32)),
                    NoPadding<float>());
        scales_.EnQue(scale);
        const LocalTensor<half> halves = halves_.template Get<half>();
        code = codes_.template DeQue<int8_t>();
        if (bits_ == 8)
            Cast(halves, code, RoundMode::CAST_NONE, rows * row);
        else
            Cast(halves, code.template ReinterpretCast<int4b_t>(), RoundMode::CAST_NONE, rows * row);
        codes_.FreeTensor(code);
        PipeBarrier<PIPE_V>();
        Cast(to, halves, RoundMode::CAST_NONE, rows * row);
        PipeBarrier<PIPE_V>();
        scale = scales_.template DeQue<float>();
        SetFlag<HardEvent::V_S>(2);  // the queue has waited for the vector unit, not for scalars
        WaitFlag<HardEvent::V_S>(2);
        for (uint32_t r = 0; r < rows; ++r) Muls(to[r * row], to[r * row], scale.GetValue(r), row);
        SetFlag<HardEvent::S_V>(2);
        WaitFlag<HardEvent::S_V>(2);
        PipeBarrier<PIPE_V>();
        scales_.FreeTensor(scale);
    }

    bool average_;
    uint32_t bits_;
    Rounding rounding_;
    TQue<TPosition::VECIN, 1> codes_, scales_;
    TQue<TPosition::VECOUT, 1> outputs_;
    TBuf<TPosition::VECCALC> halves_, values_, sums_;
};

}  // namespace alltoallv_kernels
