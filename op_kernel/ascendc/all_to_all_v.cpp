// all_to_all_v with counts in device memory: no host stands between the counts and the data, so a captured graph can be
// replayed with other counts.
//
// Every lane moves its slice of every block. In the first round counts and data travel together; all ranks then know
// all counts, and agree on whether the call can be done, and on how many rounds it takes.
#include "all_to_all_v_tiling.h"
#include "lane.h"
#include "tiling.h"

namespace alltoallv_kernels {

class AllToAllV {
  public:
    __aicore__ inline AllToAllV(const AllToAllVTiling* tiling, TPipe* pipe) : tiling_(tiling) {
        lane_.Init(&tiling->window, pipe);
        pipe->InitBuffer(numbers_, (lane_.Size() + 3) * announcement_bytes);
        pipe->InitBuffer(tiles_, 2, tile_bytes);
        slot_bytes_ = tiling->window.lane_bytes / lane_.Size() / cell_bytes * cell_bytes;
    }

    __aicore__ inline void Run(GM_ADDR x, GM_ADDR send_counts, GM_ADDR sdispls, GM_ADDR y, GM_ADDR recv_counts,
                               GM_ADDR status) {
        x_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(x), tiling_->input_rows * tiling_->row_bytes);
        y_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(y), tiling_->output_rows * tiling_->row_bytes);
        if (lane_.Works()) {
            lane_.Begin();
            ReadCounts(send_counts, sdispls, recv_counts);
            Announce();
            Exchange(recv_counts);
        }
        lane_.End(status);
    }

  private:
    static constexpr uint32_t tile_bytes = 32 << 10;
    static constexpr uint32_t words = announcement_bytes / sizeof(int64_t);
    // Behind the counts of an announcement: those that the rank expects, and more.
    static constexpr uint32_t expected = most_ranks, capacity = 2 * most_ranks, row = capacity + 1, bad = capacity + 2,
                              expects = capacity + 3;

    __aicore__ inline LocalTensor<int64_t> Numbers(uint32_t i) { return numbers_.Get<int64_t>()[i * words]; }
    __aicore__ inline LocalTensor<int64_t> Told(uint32_t rank) { return Numbers(rank); }
    __aicore__ inline LocalTensor<int64_t> Own() { return Numbers(lane_.Size()); }
    __aicore__ inline LocalTensor<int64_t> Starts() { return Numbers(lane_.Size() + 1); }
    __aicore__ inline LocalTensor<int64_t> Received() { return Numbers(lane_.Size() + 2); }

    /// Reads the counts and where the blocks start, and checks them against the input.
    __aicore__ inline void ReadCounts(GM_ADDR send_counts, GM_ADDR sdispls, GM_ADDR recv_counts) {
        Read(Own(), send_counts);
        if (tiling_->expects) Read(Own()[expected], recv_counts);
        if (tiling_->has_sdispls) Read(Starts(), sdispls);
        SetFlag<HardEvent::MTE2_S>(0);
        WaitFlag<HardEvent::MTE2_S>(0);
        const int64_t rows = static_cast<int64_t>(tiling_->input_rows);
        int64_t start = 0, wrong = 0;
        for (uint32_t j = 0; j < lane_.Size(); ++j) {
            const int64_t count = Own().GetValue(j);
            if (tiling_->has_sdispls) start = Starts().GetValue(j);
            Starts().SetValue(j, start);
            const bool fits = count >= 0 && count <= rows && start >= 0 && start <= rows - count;
            if (!fits) wrong = 1;
            start = fits ? start + count : 0;
        }
        for (uint32_t j = lane_.Size(); j < expected; ++j) Own().SetValue(j, 0);
        for (uint32_t j = tiling_->expects ? expected + lane_.Size() : expected; j < words; ++j) Own().SetValue(j, 0);
        if (wrong != 0)
            for (uint32_t j = 0; j < lane_.Size(); ++j) Own().SetValue(j, 0);
        Own().SetValue(capacity, static_cast<int64_t>(tiling_->output_rows));
        Own().SetValue(row, static_cast<int64_t>(tiling_->row_bytes));
        Own().SetValue(bad, wrong);
        Own().SetValue(expects, static_cast<int64_t>(tiling_->expects));
        SetFlag<HardEvent::S_MTE3>(0);
        WaitFlag<HardEvent::S_MTE3>(0);
    }

    __aicore__ inline void Read(const LocalTensor<int64_t>& to, GM_ADDR from) {
        GlobalTensor<int64_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(from), lane_.Size());
        DataCopyPad(to, source, Block(lane_.Size() * sizeof(int64_t)), DataCopyPadExtParams<int64_t>{false, 0, 0, 0});
    }

    __aicore__ inline void Announce() {
        DataCopy(lane_.Announcement(lane_.Rank()), Own(), words);
        Fill(0);
        lane_.Signal(0);
    }

    __aicore__ inline void Exchange(GM_ADDR recv_counts) {
        if (!lane_.Wait(0)) return;
        for (uint32_t j = 0; j < lane_.Size(); ++j) DataCopy(Told(j), lane_.Announcement(j), words);
        SetFlag<HardEvent::MTE2_S>(0);
        WaitFlag<HardEvent::MTE2_S>(0);
        if (!Agree()) return;
        if (lane_.Number() == 0 && !tiling_->expects) WriteCounts(recv_counts);
        const uint64_t rounds = Rounds();
        Take(0);
        for (uint64_t t = 1; t < rounds; ++t) {
            lane_.Begin();
            Fill(t);
            lane_.Signal(0);
            if (!lane_.Wait(0)) return;
            Take(t);
        }
    }

    /// Every rank sees the same numbers, so all come to the same end.
    __aicore__ inline bool Agree() {
        for (uint32_t j = 0; j < lane_.Size(); ++j) {
            if (Told(j).GetValue(row) != Told(0).GetValue(row)) return Refuse(LaneStatus::mismatch, j);
            if (Told(j).GetValue(bad) != 0) return Refuse(LaneStatus::bad_counts, j);
        }
        for (uint32_t r = 0; r < lane_.Size(); ++r) {
            int64_t left = Told(r).GetValue(capacity);
            if (Told(r).GetValue(expects) != 0)
                for (uint32_t j = 0; j < lane_.Size(); ++j)
                    if (Told(r).GetValue(expected + j) != Told(j).GetValue(r)) return Refuse(LaneStatus::unexpected, r);
            for (uint32_t j = 0; j < lane_.Size() && left >= 0; ++j) left -= Told(j).GetValue(r);
            if (left < 0) return Refuse(LaneStatus::overflow, r);
        }
        return true;
    }

    __aicore__ inline bool Refuse(LaneStatus status, uint32_t rank) {
        lane_.Refuse(status, rank);
        return false;
    }

    __aicore__ inline void WriteCounts(GM_ADDR recv_counts) {
        for (uint32_t j = 0; j < lane_.Size(); ++j) Received().SetValue(j, Told(j).GetValue(lane_.Rank()));
        SetFlag<HardEvent::S_MTE3>(0);
        WaitFlag<HardEvent::S_MTE3>(0);
        GlobalTensor<int64_t> out;
        out.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(recv_counts), lane_.Size());
        DataCopyPad(out, Received(), Block(lane_.Size() * sizeof(int64_t)));
    }

    /// Rounds until the largest block of any two ranks has moved; the same on all ranks.
    __aicore__ inline uint64_t Rounds() {
        int64_t most = 0;
        for (uint32_t i = 0; i < lane_.Size(); ++i)
            for (uint32_t j = 0; j < lane_.Size(); ++j)
                if (Told(i).GetValue(j) > most) most = Told(i).GetValue(j);
        const uint64_t rounds = (Share(most * tiling_->row_bytes) + slot_bytes_ - 1) / slot_bytes_;
        return rounds == 0 ? 1 : rounds;
    }

    /// The bytes of a lane's slice of a block, but for the last one's.
    __aicore__ inline uint64_t Share(uint64_t bytes) const {
        const uint64_t cells = (bytes + cell_bytes - 1) / cell_bytes;
        return (cells + lane_.Lanes() - 1) / lane_.Lanes() * cell_bytes;
    }

    /// What moves of a block of `rows` rows in a round: `bytes` at `offset`.
    struct Piece {
        uint64_t offset, bytes;
    };
    __aicore__ inline Piece PieceOf(int64_t rows, uint64_t round) const {
        const uint64_t block = static_cast<uint64_t>(rows) * tiling_->row_bytes, share = Share(block);
        const uint64_t begin = lane_.Number() * share + round * slot_bytes_;
        uint64_t end = (lane_.Number() + 1) * share;
        if (end > begin + slot_bytes_) end = begin + slot_bytes_;
        if (end > block) end = block;
        return {begin, end > begin ? end - begin : 0};
    }

    /// Copies what goes to each rank into this rank's window.
    __aicore__ inline void Fill(uint64_t round) {
        for (uint32_t j = 0; j < lane_.Size(); ++j) {
            const Piece piece = PieceOf(Own().GetValue(j), round);
            if (piece.bytes == 0) continue;
            const uint64_t from = static_cast<uint64_t>(Starts().GetValue(j)) * tiling_->row_bytes + piece.offset;
            Copy(lane_.Data<uint8_t>(lane_.Rank(), j * slot_bytes_, piece.bytes), x_[from], piece.bytes);
        }
    }

    /// Copies what each rank has for this one into the output.
    __aicore__ inline void Take(uint64_t round) {
        uint64_t start = 0;
        for (uint32_t j = 0; j < lane_.Size(); ++j) {
            const int64_t rows = Told(j).GetValue(lane_.Rank());
            const Piece piece = PieceOf(rows, round);
            if (piece.bytes > 0)
                Copy(y_[start * tiling_->row_bytes + piece.offset],
                     lane_.Data<uint8_t>(j, lane_.Rank() * slot_bytes_, piece.bytes), piece.bytes);
            start += static_cast<uint64_t>(rows);
        }
    }

    __aicore__ inline void Copy(const GlobalTensor<uint8_t>& to, const GlobalTensor<uint8_t>& from, uint64_t bytes) {
        for (uint64_t at = 0; at < bytes; at += tile_bytes) {
            const uint32_t n = static_cast<uint32_t>(bytes - at < tile_bytes ? bytes - at : tile_bytes);
            LocalTensor<uint8_t> tile = tiles_.AllocTensor<uint8_t>();
            DataCopyPad(tile, from[at], Block(n), DataCopyPadExtParams<uint8_t>{false, 0, 0, 0});
            tiles_.EnQue(tile);
            tile = tiles_.DeQue<uint8_t>();
            DataCopyPad(to[at], tile, Block(n));
            tiles_.FreeTensor(tile);
        }
    }

    __aicore__ inline static DataCopyExtParams Block(uint32_t bytes) { return {1, bytes, 0, 0, 0}; }

    const AllToAllVTiling* tiling_;
    Lane lane_;
    uint64_t slot_bytes_;
    GlobalTensor<uint8_t> x_, y_;
    TBuf<TPosition::VECCALC>
        numbers_;  // announcements of all ranks, this rank's, where its blocks start, counts received
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 1> tiles_;
};

}  // namespace alltoallv_kernels

/// x: [input_rows, ...]; send_counts, sdispls (or null), recv_counts (read if the tiling says so, else written): int64
/// [size]; y: [output_rows, ...], of which the rows received are written, packed in rank order; status: int32 [lanes,
/// 8].
extern "C" __global__ __aicore__ void alltoallv_all_to_all_v(GM_ADDR x, GM_ADDR send_counts, GM_ADDR sdispls, GM_ADDR y,
                                                             GM_ADDR recv_counts, GM_ADDR status, GM_ADDR tiling) {
    using namespace alltoallv_kernels;
    const AllToAllVTiling numbers = TilingOf<AllToAllVTiling>(tiling);
    TPipe pipe;
    AllToAllV kernel(&numbers, &pipe);
    kernel.Run(x, send_counts, sdispls, y, recv_counts, status);
}
