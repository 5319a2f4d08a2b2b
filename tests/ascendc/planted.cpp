// Small kernels with one fault each, which the twin must name by its kind; and small right ones.
#include <atomic>
#include <cstdio>
#include <thread>

#include "kernel_operator.h"
#include "op_kernel/ascendc/twin/core.h"

using namespace AscendC;

namespace {

alignas(64) uint8_t device_memory[64 << 10];
alignas(64) uint8_t not_device_memory[64];

template <class T>
GlobalTensor<T> global(uint64_t elements, uint64_t offset = 0) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<T*>(device_memory) + offset, elements);
    return tensor;
}

/// What most kernels have: two queues and two buffers of 256 floats.
struct Kernel {
    TPipe pipe;
    TQue<TPosition::VECIN, 1> in;
    TQue<TPosition::VECOUT, 1> out;
    TBuf<TPosition::VECCALC> first, second;
    GlobalTensor<float> x = global<float>(256), y = global<float>(256, 512);

    Kernel() {
        pipe.InitBuffer(in, 1, 1024);
        pipe.InitBuffer(out, 1, 1024);
        pipe.InitBuffer(first, 1024);
        pipe.InitBuffer(second, 1024);
    }
    LocalTensor<float> a() { return first.Get<float>(); }
    LocalTensor<float> b() { return second.Get<float>(); }
    LocalTensor<float> loaded() {
        LocalTensor<float> t = in.AllocTensor<float>();
        DataCopy(t, x, 256);
        in.EnQue(t);
        return in.DeQue<float>();
    }
};

constexpr DataCopyExtParams blocks(uint32_t count, uint32_t bytes) {
    return {static_cast<uint16_t>(count), bytes, 0, 0, 0};
}
constexpr DataCopyPadExtParams<float> no_padding{false, 0, 0, 0};

void right() {
    Kernel k;
    LocalTensor<float> t = k.loaded();
    LocalTensor<float> result = k.out.AllocTensor<float>();
    Adds(result, t, 1.0f, 256);
    k.in.FreeTensor(t);
    k.out.EnQue(result);
    result = k.out.DeQue<float>();
    DataCopy(k.y, result, 256);
    k.out.FreeTensor(result);
}

void right_by_events() {
    Kernel k;
    DataCopy(k.a(), k.x, 256);
    SetFlag<HardEvent::MTE2_V>(3);
    WaitFlag<HardEvent::MTE2_V>(3);
    Adds(k.b(), k.a(), 1.0f, 256);
    SetFlag<HardEvent::V_MTE3>(3);
    WaitFlag<HardEvent::V_MTE3>(3);
    DataCopy(k.y, k.b(), 256);
}

struct Planted {
    const char *name, *kind;
    void (*kernel)();
};

const Planted planted[] = {
    {"a kernel with queues", "", right},
    {"a kernel with events", "", right_by_events},
    // Sizes and places.
    {"copies 4 bytes by DataCopy", "unaligned copy",
     [] {
         Kernel k;
         DataCopy(k.a(), k.x, 1);
     }},
    {"copies to the middle of a block", "unaligned local address",
     [] {
         Kernel k;
         DataCopy(k.a()[1], k.x, 8);
     }},
    {"adds at the middle of a block", "unaligned local address",
     [] {
         Kernel k;
         Duplicate(k.a()[3], 1.0f, 8);
     }},
    {"fills more than its buffer", "past the buffer",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 257);
     }},
    {"begins past its buffer", "past the buffer",
     [] {
         Kernel k;
         Duplicate(k.a()[300], 1.0f, 8);
     }},
    {"reads past the tensor", "past the tensor",
     [] {
         Kernel k;
         DataCopy(k.a(), k.x[252], 8);
     }},
    {"writes past the tensor", "past the tensor",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 256);
         PipeBarrier<PIPE_ALL>();
         DataCopyPad(k.y[255], k.a(), blocks(1, 8));
     }},
    {"reads memory of the host", "no device memory",
     [] {
         Kernel k;
         GlobalTensor<float> host;
         host.SetGlobalBuffer(reinterpret_cast<float*>(not_device_memory), 16);
         DataCopy(k.a(), host, 16);
     }},
    {"asks for more than 192 KiB", "unified buffer overflow",
     [] {
         TPipe pipe;
         TBuf<TPosition::VECCALC> first, second;
         pipe.InitBuffer(first, 190 << 10);
         pipe.InitBuffer(second, 3 << 10);
     }},
    {"copies 4096 blocks", "block count",
     [] {
         Kernel k;
         DataCopyPad(k.a(), k.x, blocks(4096, 4), no_padding);
     }},
    {"copies a block of 2 MiB", "block length",
     [] {
         Kernel k;
         DataCopyPad(k.a(), k.x, blocks(1, 2 << 20), no_padding);
     }},
    {"copies half an element", "block length",
     [] {
         Kernel k;
         DataCopyPad(k.a(), k.x, blocks(1, 6), no_padding);
     }},
    {"pads by 36 bytes", "padding",
     [] {
         Kernel k;
         DataCopyPad(k.a(), k.x, blocks(1, 4), {true, 0, 9, 0.0f});
     }},
    {"repeats 256 times", "repeat",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 256);
         PipeBarrier<PIPE_V>();
         WholeReduceMax(k.b(), k.a(), 8, 256, 1, 1, 0, ReduceOrder::ORDER_ONLY_VALUE);
     }},
    {"masks 65 floats", "mask",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 256);
         PipeBarrier<PIPE_V>();
         WholeReduceMax(k.b(), k.a(), 65, 1, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
     }},
    {"computes nothing", "empty instruction",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 0);
     }},
    // Order.
    {"computes before its data have come", "missing event",
     [] {
         Kernel k;
         DataCopy(k.a(), k.x, 256);
         Adds(k.b(), k.a(), 1.0f, 256);
     }},
    {"copies out before it has computed", "missing event",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 256);
         DataCopy(k.y, k.a(), 256);
     }},
    {"copies out of a queue without EnQue", "missing event",
     [] {
         Kernel k;
         LocalTensor<float> result = k.out.AllocTensor<float>();
         Duplicate(result, 1.0f, 256);
         DataCopy(k.y, result, 256);
     }},
    {"reads a scalar that vectors write", "missing event",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 8);
         k.a().GetValue(0);
     }},
    {"overwrites a scalar that is not yet read", "missing event",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 8);
         PipeBarrier<PIPE_ALL>();
         k.a().GetValue(0);
         Duplicate(k.a(), 2.0f, 8);
     }},
    {"loads over what is being copied out", "missing event",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 256);
         PipeBarrier<PIPE_ALL>();
         DataCopy(k.y, k.a(), 256);
         DataCopy(k.a(), k.x, 256);
     }},
    {"waits for the wrong pipe", "missing event",
     [] {
         Kernel k;
         DataCopy(k.a(), k.x, 256);
         SetFlag<HardEvent::MTE2_S>(0);
         WaitFlag<HardEvent::MTE2_S>(0);
         Adds(k.b(), k.a(), 1.0f, 256);
     }},
    {"computes with what the pipe still computes", "missing barrier",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 256);
         Adds(k.b(), k.a(), 1.0f, 256);
     }},
    {"reads back what it has stored", "device memory without order",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 256);
         PipeBarrier<PIPE_ALL>();
         DataCopy(k.y, k.a(), 256);
         DataCopy(k.b(), k.y, 256);
     }},
    {"waits for what nobody sets", "wait without set",
     [] {
         Kernel k;
         WaitFlag<HardEvent::MTE2_V>(0);
     }},
    {"sets a flag and ends", "set without wait",
     [] {
         Kernel k;
         SetFlag<HardEvent::MTE2_V>(0);
     }},
    {"sets a flag twice", "set twice",
     [] {
         Kernel k;
         SetFlag<HardEvent::MTE2_V>(0);
         SetFlag<HardEvent::MTE2_V>(0);
     }},
    {"has event 8", "event id",
     [] {
         Kernel k;
         SetFlag<HardEvent::MTE2_V>(8);
     }},
    // Queues.
    {"takes from a queue that it has not filled", "DeQue without EnQue",
     [] {
         Kernel k;
         k.in.AllocTensor<float>();
         k.in.DeQue<float>();
     }},
    {"computes with a tensor that it has not taken", "use while queued",
     [] {
         Kernel k;
         LocalTensor<float> t = k.in.AllocTensor<float>();
         DataCopy(t, k.x, 256);
         k.in.EnQue(t);
         Adds(k.a(), t, 1.0f, 256);
     }},
    {"does not free a tensor", "leak", [] { Kernel().loaded(); }},
    {"does not free a tensor, and takes another", "queue exhausted",
     [] {
         Kernel k;
         k.loaded();
         k.loaded();
     }},
    {"uses what it has freed", "use after free",
     [] {
         Kernel k;
         const LocalTensor<float> t = k.loaded();
         k.in.FreeTensor(t);
         Adds(k.a(), t, 1.0f, 256);
     }},
    {"frees twice", "double free",
     [] {
         Kernel k;
         const LocalTensor<float> t = k.loaded();
         k.in.FreeTensor(t);
         k.in.FreeTensor(t);
     }},
    {"frees what was never in the queue", "free without EnQue",
     [] {
         Kernel k;
         k.in.FreeTensor(k.in.AllocTensor<float>());
     }},
    {"frees into another queue", "wrong queue",
     [] {
         Kernel k;
         k.out.FreeTensor(k.loaded());
     }},
    {"queues a tensor twice", "wrong order",
     [] {
         Kernel k;
         const LocalTensor<float> t = k.in.AllocTensor<float>();
         DataCopy(t, k.x, 256);
         k.in.EnQue(t);
         k.in.EnQue(t);
     }},
    {"queues more than the depth", "queue full",
     [] {
         TPipe pipe;
         TQue<TPosition::VECIN, 1> queue;
         pipe.InitBuffer(queue, 2, 32);
         for (int i = 0; i < 2; ++i) queue.EnQue(queue.AllocTensor<float>());
     }},
    {"has 9 buffers of a position", "too many buffers",
     [] {
         TPipe pipe;
         TQue<TPosition::VECIN, 1> first, second;
         pipe.InitBuffer(first, 5, 32);
         pipe.InitBuffer(second, 4, 32);
     }},
    {"opens two pipes", "two pipes", [] { TPipe first, second; }},
    {"uses a buffer that has no memory", "no tensor",
     [] {
         TPipe pipe;
         TBuf<TPosition::VECCALC> buffer;
         Duplicate(buffer.Get<float>(), 1.0f, 8);
     }},
    {"uses a buffer after its pipe", "no pipe",
     [] {
         TBuf<TPosition::VECCALC> buffer;
         {
             TPipe pipe;
             pipe.InitBuffer(buffer, 32);
         }
         Duplicate(buffer.Get<float>(), 1.0f, 8);
     }},
    // Values.
    {"reads what nobody wrote", "uninitialized read",
     [] {
         Kernel k;
         Adds(k.b(), k.a(), 1.0f, 8);
     }},
    {"computes into a part of its source", "overlap",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.0f, 256);
         PipeBarrier<PIPE_V>();
         Adds(k.a()[8], k.a(), 1.0f, 64);
     }},
    {"compares a NaN", "NaN in a comparison",
     [] {
         Kernel k;
         Duplicate(k.a(), std::numeric_limits<float>::quiet_NaN(), 8);
         PipeBarrier<PIPE_V>();
         Maxs(k.b(), k.a(), 0.0f, 8);
     }},
    {"rounds without a mode", "round mode",
     [] {
         Kernel k;
         Duplicate(k.a(), 1.5f, 8);
         PipeBarrier<PIPE_V>();
         Cast(k.b().ReinterpretCast<int32_t>(), k.a(), RoundMode::CAST_NONE, 8);
     }},
    {"stores half a byte of codes", "half a byte",
     [] {
         Kernel k;
         Duplicate(k.a().ReinterpretCast<half>(), half(1.0f), 64);
         PipeBarrier<PIPE_V>();
         Cast(k.b().ReinterpretCast<int4b_t>(), k.a().ReinterpretCast<half>(), RoundMode::CAST_RINT, 33);
     }},
    {"pads on the left", "not modelled",
     [] {
         Kernel k;
         DataCopyPad(k.a(), k.x, blocks(1, 4), {true, 1, 0, 0.0f});
     }},
    {"leaves a scalar in the cache", "scalar store not written back",
     [] {
         Kernel k;
         k.x.SetValue(0, 1.0f);
     }},
};

}  // namespace

extern "C" {

int planted_count() {
    return static_cast<int>(std::size(planted));
}
const char* planted_name(int i) {
    return planted[i].name;
}
const char* planted_kind(int i) {
    return planted[i].kind;
}

/// Runs a kernel on a core; the text is "", or "kind: text" of its fault.
void planted_run(int i, unsigned long long seed, char* text, size_t bytes) {
    alltoallv::twin::Behaviour behaviour;
    behaviour.seed = seed;
    behaviour.is_device_memory = [](const void* address, size_t size) {
        const auto* begin = static_cast<const uint8_t*>(address);
        return begin >= device_memory && begin + size <= device_memory + sizeof(device_memory);
    };
    text[0] = 0;
    try {
        alltoallv::twin::launch(1, behaviour, planted[i].kernel);
    } catch (const std::exception& error) {
        std::snprintf(text, bytes, "%s", error.what());
    }
}

/// Core 0 writes 8 words and then a flag, with or without a barrier between them; core 1 waits for the flag and returns
/// whether it saw all words. With `scalar` it reads the flag through the scalar's cache, which it drops or keeps.
enum Reader { copies, scalar_that_drops, scalar_that_keeps };
int see_flag(unsigned long long seed, bool barrier, Reader reader) {
    std::memset(device_memory, 0, 4096);
    alltoallv::twin::Behaviour behaviour;
    behaviour.seed = seed;
    int seen = -1;
    std::atomic<bool> reads{false};
    alltoallv::twin::launch(2, behaviour, [&] {
        TPipe pipe;
        TBuf<TPosition::VECCALC> buffer;
        pipe.InitBuffer(buffer, 32);
        const LocalTensor<int32_t> cell = buffer.Get<int32_t>();
        const GlobalTensor<int32_t> data = global<int32_t>(8), flag = global<int32_t>(8, 64);
        if (GetBlockIdx() == 0) {
            while (!reads) std::this_thread::yield();
            Duplicate(cell, 1, 8);
            PipeBarrier<PIPE_ALL>();
            DataCopy(data, cell, 8);
            if (barrier) PipeBarrier<PIPE_ALL>();
            DataCopy(flag, cell, 8);
            return;
        }
        const auto read = [&](const GlobalTensor<int32_t>& from) {
            DataCopy(cell, from, 8);
            PipeBarrier<PIPE_ALL>();
            const int32_t value = cell.GetValue(0);
            PipeBarrier<PIPE_ALL>();
            return value;
        };
        for (int64_t begin = GetSystemCycle(); GetSystemCycle() - begin < 50 * 2'000'000;) {
            if (reader == scalar_that_drops)
                DataCacheCleanAndInvalid<int32_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(flag);
            const bool comes = (reader == copies ? read(flag) : flag.GetValue(0)) != 0;
            reads = true;
            if (!comes) {
                if (reader == scalar_that_keeps && read(flag) != 0) return;  // the flag has come, and is not seen
                continue;
            }
            seen = read(data);
            return;
        }
    });
    return seen;
}
}
