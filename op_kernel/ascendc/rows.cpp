// Gathers and scatters rows of any size by indices: y[i] = x[index[i]], and y[index[i]] = x[i].
#include "rows_tiling.h"
#include "tiling.h"
#include "vectors.h"

namespace alltoallv_kernels {

class Rows {
  public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR index, GM_ADDR y, const RowsTiling* tiling, TPipe* pipe) {
        tiling_ = tiling;
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(x), tiling->input_rows * tiling->row_bytes);
        y_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(y), tiling->output_rows * tiling->row_bytes);
        index_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(index), tiling->rows);
        pipe->InitBuffer(indices_, indices_at_once * sizeof(int32_t));
        pipe->InitBuffer(tiles_, 2, tile_bytes);
    }

    template <bool gathers>
    __aicore__ inline void Run() {
        const uint64_t cores = GetBlockNum(), core = GetBlockIdx();
        const uint64_t first = tiling_->rows * core / cores, end = tiling_->rows * (core + 1) / cores;
        for (uint64_t i = first; i < end; i += indices_at_once) {
            const uint32_t count = static_cast<uint32_t>(end - i < indices_at_once ? end - i : indices_at_once);
            const LocalTensor<int32_t> indices = indices_.Get<int32_t>();
            const uint32_t bytes = count * static_cast<uint32_t>(sizeof(int32_t));
            DataCopyPad(indices, index_[i], BlocksIn(1, bytes, round_up(bytes, 32)), NoPadding<int32_t>());
            SetFlag<HardEvent::MTE2_S>(0);
            WaitFlag<HardEvent::MTE2_S>(0);
            for (uint32_t r = 0; r < count; ++r) {
                const int64_t index = indices.GetValue(r);
                const int64_t limit = static_cast<int64_t>(gathers ? tiling_->input_rows : tiling_->output_rows);
                if (index < 0 || index >= limit) continue;  // such a row is left out, as a padding row is
                const uint64_t at = static_cast<uint64_t>(index) * tiling_->row_bytes,
                               own = (i + r) * tiling_->row_bytes;
                Copy(gathers ? own : at, gathers ? at : own);
            }
            SetFlag<HardEvent::S_MTE2>(0);
            WaitFlag<HardEvent::S_MTE2>(0);
        }
    }

  private:
    static constexpr uint32_t indices_at_once = 1024, tile_bytes = 32 << 10;

    __aicore__ inline void Copy(uint64_t to, uint64_t from) {
        for (uint64_t at = 0; at < tiling_->row_bytes; at += tile_bytes) {
            const uint64_t left = tiling_->row_bytes - at;
            const uint32_t bytes = static_cast<uint32_t>(left < tile_bytes ? left : tile_bytes);
            LocalTensor<uint8_t> tile = tiles_.AllocTensor<uint8_t>();
            DataCopyPad(tile, x_[from + at], BlocksIn(1, bytes, round_up(bytes, 32)), NoPadding<uint8_t>());
            tiles_.EnQue(tile);
            tile = tiles_.DeQue<uint8_t>();
            DataCopyPad(y_[to + at], tile, BlocksOut(1, bytes, round_up(bytes, 32)));
            tiles_.FreeTensor(tile);
        }
    }

    const RowsTiling* tiling_;
    GlobalTensor<uint8_t> x_, y_;
    GlobalTensor<int32_t> index_;
    TBuf<TPosition::VECCALC> indices_;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> tiles_;
};

template <bool gathers>
__aicore__ inline void RunRows(GM_ADDR x, GM_ADDR index, GM_ADDR y, GM_ADDR tiling) {
    const RowsTiling numbers = TilingOf<RowsTiling>(tiling);
    TPipe pipe;
    Rows rows;
    rows.Init(x, index, y, &numbers, &pipe);
    rows.Run<gathers>();
}

}  // namespace alltoallv_kernels

/// y[i] = x[index[i]]; index: int32 [rows]. Rows whose index is outside of x keep what y holds.
extern "C" __global__ __aicore__ void alltoallv_gather_rows(GM_ADDR x, GM_ADDR index, GM_ADDR y, GM_ADDR tiling) {
    alltoallv_kernels::RunRows<true>(x, index, y, tiling);
}

/// y[index[i]] = x[i]; an index outside of y leaves the row out. Indices differ from each other.
extern "C" __global__ __aicore__ void alltoallv_scatter_rows(GM_ADDR x, GM_ADDR index, GM_ADDR y, GM_ADDR tiling) {
    alltoallv_kernels::RunRows<false>(x, index, y, tiling);
}
