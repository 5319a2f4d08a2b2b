// One core's part of a kernel that communicates: rounds of data and flags through the windows of all ranks (window.h).
//
// A round: the lane writes data into its own window, signals, waits for its peers' signals, and reads their windows.
// Numbers of rounds only grow, so that flags are never reset. After the wait for round n + 1 nobody reads the data of
// round n any more, since a peer signals n + 1 once it has read n; with two halves round n + 2 may overwrite them.
#pragma once

#include "kernel_operator.h"
#include "window.h"

namespace alltoallv_kernels {

using namespace AscendC;

class Lane {
  public:
    /// `tiling` lives as long as this.
    __aicore__ inline void Init(const WindowTiling* tiling, TPipe* pipe) {
        tiling_ = tiling;
        lane_ = static_cast<uint32_t>(GetBlockIdx());
        pipe->InitBuffer(cells_, (most_ranks + 1) * cell_bytes);
        const LocalTensor<int32_t> cell = Cell();
        DataCopy(cell, Window<int32_t>(Rank(), sequence_place + lane_ * cell_bytes, cell_words), cell_words);
        SetFlag<HardEvent::MTE2_S>(0);
        WaitFlag<HardEvent::MTE2_S>(0);
        sequence_ = cell.GetValue(0);
        status_ = cell.GetValue(1) == 0 ? LaneStatus::done : LaneStatus::broken;
        named_ = Works() ? 0 : static_cast<uint32_t>(cell.GetValue(2));
    }

    __aicore__ inline uint32_t Rank() const { return tiling_->rank; }
    __aicore__ inline uint32_t Size() const { return tiling_->size; }
    __aicore__ inline uint32_t Number() const { return lane_; }
    __aicore__ inline uint32_t Lanes() const { return tiling_->lanes; }
    __aicore__ inline bool Works() const { return status_ == LaneStatus::done; }

    /// Begins a round: from here `Data` and `Announcement` belong to its half.
    __aicore__ inline void Begin() { sequence_ = sequence_ + 1; }

    /// This lane's data of a rank in the half of the round.
    template <class T>
    __aicore__ inline GlobalTensor<T> Data(uint32_t rank, uint64_t offset, uint64_t elements) const {
        return Window<T>(rank, data_place + (Half() * Lanes() + lane_) * tiling_->lane_bytes + offset, elements);
    }

    __aicore__ inline GlobalTensor<int64_t> Announcement(uint32_t rank) const {
        return Window<int64_t>(rank, announcement_place + (Half() * most_lanes + lane_) * announcement_bytes,
                               announcement_bytes / sizeof(int64_t));
    }

    /// Tells all ranks that this lane's data of the round are in its window, or what has gone wrong.
    __aicore__ inline void Signal(uint32_t phase, LaneStatus error = LaneStatus::done, uint32_t named = 0) {
        PipeBarrier<PIPE_ALL>();  // data before their flag
        SetCell(sequence_, static_cast<int32_t>(error), static_cast<int32_t>(named));
        for (uint32_t i = 0; i < Size(); ++i) {
            const uint32_t to = (Rank() + i) % Size();
            DataCopy(Window<int32_t>(to, FlagPlace(phase, Rank()), cell_words), Cell(), cell_words);
        }
        PipeBarrier<PIPE_ALL>();  // the cell may be filled anew
    }

    /// Waits until all ranks have signalled. Returns false, and ends this communicator, if one is late or has failed.
    /// What MTE2 loads after it comes after the flags; other pipes use what MTE2 has loaded, or wait for scalars.
    __aicore__ inline bool Wait(uint32_t phase) {
        const int64_t begin = GetSystemCycle();
        const int64_t limit = static_cast<int64_t>(tiling_->wait_us) * cycles_per_us;
        const LocalTensor<int32_t> flags = cells_.Get<int32_t>();
        while (true) {
            DataCopy(flags, Window<int32_t>(Rank(), FlagPlace(phase, 0), Size() * cell_words), Size() * cell_words);
            SetFlag<HardEvent::MTE2_S>(0);
            WaitFlag<HardEvent::MTE2_S>(0);
            uint32_t missing = Size();
            for (uint32_t j = Size(); j > 0; --j) {
                const uint32_t at = (j - 1) * cell_words;
                if (flags.GetValue(at + 1) != 0) return Fail(LaneStatus::told, flags.GetValue(at + 2), phase);
                if (flags.GetValue(at) - sequence_ < 0) missing = j - 1;
            }
            SetFlag<HardEvent::S_MTE2>(0);  // the flags may be read anew, or what they tell of
            WaitFlag<HardEvent::S_MTE2>(0);
            if (missing == Size()) break;
            if (GetSystemCycle() - begin > limit) return Fail(LaneStatus::late, static_cast<int32_t>(missing), phase);
        }
        return true;
    }

    /// Notes an outcome that all ranks have reached alike; the communicator stays usable.
    __aicore__ inline void Refuse(LaneStatus status, uint32_t rank) {
        status_ = status;
        named_ = rank;
    }

    /// Keeps the number of the last round for the next call, and leaves the outcome in `status`, 8 words per lane.
    __aicore__ inline void End(GM_ADDR status) {
        const bool broken = status_ == LaneStatus::late || status_ == LaneStatus::told || status_ == LaneStatus::broken;
        SetCell(sequence_, broken ? 1 : 0, static_cast<int32_t>(named_));
        DataCopy(Window<int32_t>(Rank(), sequence_place + lane_ * cell_bytes, cell_words), Cell(), cell_words);
        PipeBarrier<PIPE_ALL>();
        SetCell(static_cast<int32_t>(status_), static_cast<int32_t>(named_), sequence_, static_cast<int32_t>(phase_));
        GlobalTensor<int32_t> out;
        out.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(status), Lanes() * status_words);
        DataCopy(out[lane_ * status_words], Cell(), cell_words);
    }

  private:
    static constexpr uint32_t cell_words = cell_bytes / sizeof(int32_t);
    static constexpr int64_t cycles_per_us = 50;  // of GetSystemCycle

    __aicore__ inline uint32_t Half() const { return static_cast<uint32_t>(sequence_) & 1; }

    __aicore__ inline uint32_t FlagPlace(uint32_t phase, uint32_t from) const {
        return flag_place + ((phase * most_lanes + lane_) * most_ranks + from) * cell_bytes;
    }

    template <class T>
    __aicore__ inline GlobalTensor<T> Window(uint32_t rank, uint64_t place, uint64_t elements) const {
        GlobalTensor<T> tensor;
        tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(tiling_->windows[rank] + place), elements);
        return tensor;
    }

    __aicore__ inline LocalTensor<int32_t> Cell() { return cells_.Get<int32_t>()[most_ranks * cell_words]; }

    __aicore__ inline void SetCell(int32_t a, int32_t b, int32_t c, int32_t d = 0) {
        const LocalTensor<int32_t> cell = Cell();
        for (uint32_t i = 0; i < cell_words; ++i) cell.SetValue(i, 0);
        cell.SetValue(0, a);
        cell.SetValue(1, b);
        cell.SetValue(2, c);
        cell.SetValue(3, d);
        SetFlag<HardEvent::S_MTE3>(0);
        WaitFlag<HardEvent::S_MTE3>(0);
    }

    /// Ends this communicator for all ranks: those that wait in either phase are told whom this rank has missed.
    __aicore__ inline bool Fail(LaneStatus status, int32_t named, uint32_t phase) {
        status_ = status;
        named_ = static_cast<uint32_t>(named);
        phase_ = phase;
        for (uint32_t each = 0; each < phases; ++each) Signal(each, status, named_);
        return false;
    }

    const WindowTiling* tiling_;
    uint32_t lane_, named_ = 0, phase_ = 0;
    int32_t sequence_;
    LaneStatus status_;
    TBuf<TPosition::VECCALC> cells_;  // the flags of one phase, and a cell to write
};

}  // namespace alltoallv_kernels
