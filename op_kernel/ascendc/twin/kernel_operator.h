// What this package's kernels use of Ascend C, on any machine: a header of the same name as CANN's, which is found
// where CANN's is not. Written from the kernels' needs; whatever is not here does not compile, and what an instruction
// does not take on __NPU_ARCH__ 2201 is refused at compile time or by a Fault.
//
// core.h describes what is modelled.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "op_kernel/ascendc/twin/core.h"
#include "op_kernel/cpu/half.h"

#define __global__ __attribute__((visibility("default")))
#define __aicore__
#define __gm__
#define GM_ADDR uint8_t*

struct half {
    uint16_t bits = 0;
    half() = default;
    explicit half(float value) : bits(alltoallv::kernel::float_to_float16(value)) {}
    explicit operator float() const { return alltoallv::kernel::float16_to_float(bits); }
};

struct bfloat16_t {
    uint16_t bits = 0;
    bfloat16_t() = default;
    explicit bfloat16_t(float value) : bits(alltoallv::kernel::float_to_bfloat16(value)) {}
    explicit operator float() const { return alltoallv::kernel::bfloat16_to_float(bits); }
};

using pipe_t = int;
constexpr pipe_t PIPE_S = 0, PIPE_V = 1, PIPE_MTE2 = 2, PIPE_MTE3 = 3, PIPE_ALL = 4;

namespace AscendC {

/// Two share a byte, the first one in its low half. Tensors of them are cast, and copied as bytes.
struct int4b_t {
    uint8_t pair;
};

using alltoallv::twin::Core;
using alltoallv::twin::Fault;
using alltoallv::twin::Pipe;

enum class TPosition { GM, VECIN, VECOUT, VECCALC };
enum class HardEvent { MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE2_MTE3, MTE3_MTE2, MTE2_S, S_MTE2, V_S, S_V, MTE3_S, S_MTE3 };
enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC };
enum class CacheLine { SINGLE_CACHE_LINE };
enum class DcciDst { CACHELINE_OUT };
enum class ReduceOrder { ORDER_ONLY_VALUE };

namespace twin {

constexpr std::pair<Pipe, Pipe> pipes_of(HardEvent event) {
    using enum HardEvent;
    switch (event) {
        case MTE2_V:
            return {Pipe::MTE2, Pipe::V};
        case V_MTE2:
            return {Pipe::V, Pipe::MTE2};
        case V_MTE3:
            return {Pipe::V, Pipe::MTE3};
        case MTE3_V:
            return {Pipe::MTE3, Pipe::V};
        case MTE2_MTE3:
            return {Pipe::MTE2, Pipe::MTE3};
        case MTE3_MTE2:
            return {Pipe::MTE3, Pipe::MTE2};
        case MTE2_S:
            return {Pipe::MTE2, Pipe::S};
        case S_MTE2:
            return {Pipe::S, Pipe::MTE2};
        case V_S:
            return {Pipe::V, Pipe::S};
        case S_V:
            return {Pipe::S, Pipe::V};
        case MTE3_S:
            return {Pipe::MTE3, Pipe::S};
        default:
            return {Pipe::S, Pipe::MTE3};
    }
}

/// A buffer of a queue.
struct Buffer {
    enum State { free, allocated, queued, dequeued } state = free;
    uint32_t offset = 0, bytes = 0;
    Core::Clock ready{};  ///< of the last EnQue or FreeTensor
    const void* owner = nullptr;
};

inline void require(bool holds, const char* kind, const std::string& text) {
    if (!holds) throw Fault(kind, text);
}

inline std::string number(uint64_t n) {
    return std::to_string(n);
}

template <class T>
constexpr uint64_t bytes_of(uint64_t elements) {
    if constexpr (std::is_same_v<T, int4b_t>)
        return elements / 2;
    else
        return elements * sizeof(T);
}

}  // namespace twin

inline int64_t GetBlockIdx() {
    return Core::current().index();
}
inline int64_t GetBlockNum() {
    return Core::current().count();
}

/// Counts 50 to the microsecond. A core that polls gives way to others, which a machine may have fewer of: it sleeps
/// soon, since a yield gives no processor to a thread that has used up its share.
inline int64_t GetSystemCycle() {
    using Clock = std::chrono::steady_clock;
    thread_local Clock::time_point last{};
    thread_local int polls = 0;
    polls = Clock::now() - last < std::chrono::microseconds(100) ? polls + 1 : 0;
    if (polls < 32)
        std::this_thread::yield();
    else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    last = Clock::now();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(last.time_since_epoch()).count() / 20;
}

template <HardEvent event>
void SetFlag(int id) {
    constexpr auto pipes = twin::pipes_of(event);
    Core::current().set_flag(pipes.first, pipes.second, id);
}

template <HardEvent event>
void WaitFlag(int id) {
    constexpr auto pipes = twin::pipes_of(event);
    Core::current().wait_flag(pipes.first, pipes.second, id);
}

template <pipe_t pipe>
void PipeBarrier() {
    static_assert(pipe != PIPE_S, "scalars run in order");
    if constexpr (pipe == PIPE_ALL)
        Core::current().barrier_all();
    else
        Core::current().barrier(static_cast<Pipe>(pipe));
}

// --- tensors ---

template <class T>
class GlobalTensor {
  public:
    void SetGlobalBuffer(T* address, uint64_t elements) {
        address_ = address;
        elements_ = elements;
    }
    GlobalTensor operator[](uint64_t offset) const {
        twin::require(
            offset <= elements_, "past the tensor",
            "offset " + twin::number(offset) + " of a global tensor of " + twin::number(elements_) + " elements");
        GlobalTensor part;
        part.address_ = address_ + offset;
        part.elements_ = elements_ - offset;
        return part;
    }
    T GetValue(uint64_t i) const {
        T value;
        Core::current().load_scalar(&value, at(i, 1), sizeof(T));
        return value;
    }
    void SetValue(uint64_t i, T value) { Core::current().store_scalar(at(i, 1), &value, sizeof(T)); }

    /// The address of as many elements; throws Fault if they leave the tensor.
    T* at(uint64_t i, uint64_t count) const {
        twin::require(i <= elements_ && count <= elements_ - i, "past the tensor",
                      twin::number(count) + " elements at " + twin::number(i) + " of a global tensor of " +
                          twin::number(elements_));
        return address_ + i;
    }

  private:
    T* address_ = nullptr;
    uint64_t elements_ = 0;
};

template <class T>
class LocalTensor {
  public:
    LocalTensor() = default;
    LocalTensor(uint32_t offset, uint32_t bytes, twin::Buffer* buffer)
        : offset_(offset), bytes_(bytes), buffer_(buffer) {}

    LocalTensor operator[](uint32_t element) const {
        twin::require(element * sizeof(T) <= bytes_, "past the buffer",
                      "element " + twin::number(element) + " of a local tensor of " + twin::number(bytes_) + " bytes");
        return {static_cast<uint32_t>(offset_ + element * sizeof(T)),
                static_cast<uint32_t>(bytes_ - element * sizeof(T)), buffer_};
    }
    template <class U>
    LocalTensor<U> ReinterpretCast() const {
        return {offset_, bytes_, buffer_};
    }
    uint32_t GetSize() const { return static_cast<uint32_t>(bytes_ / sizeof(T)); }

    T GetValue(uint32_t i) const {
        Core& core = Core::current();
        core.issue("GetValue", Pipe::S);
        T value;
        std::memcpy(&value, data(i, 1, false), sizeof(T));
        return value;
    }
    void SetValue(uint32_t i, T value) const {
        Core& core = Core::current();
        core.issue("SetValue", Pipe::S);
        std::memcpy(data(i, 1, true), &value, sizeof(T));
    }

    /// The bytes of elements that the instruction being issued reads or writes.
    T* data(uint32_t first, uint64_t count, bool write) const {
        return reinterpret_cast<T*>(range(twin::bytes_of<T>(first), twin::bytes_of<T>(count), write));
    }
    uint8_t* range(uint64_t offset, uint64_t bytes, bool write) const {
        check_usable();
        twin::require(offset + bytes <= bytes_, "past the buffer",
                      twin::number(bytes) + " bytes at " + twin::number(offset) + " of a local tensor of " +
                          twin::number(bytes_));
        const auto begin = static_cast<uint32_t>(offset_ + offset);
        Core& core = Core::current();
        if (write)
            core.writes(begin, static_cast<uint32_t>(bytes));
        else
            core.reads(begin, static_cast<uint32_t>(bytes));
        return core.ub() + begin;
    }
    uint32_t offset() const { return offset_; }
    twin::Buffer* buffer() const { return buffer_; }
    void check_aligned(const char* instruction) const {
        twin::require(offset_ % 32 == 0, "unaligned local address",
                      std::string(instruction) + " has a local tensor at byte " + twin::number(offset_) +
                          " of the unified buffer, expected a multiple of 32");
    }

  private:
    void check_usable() const {
        twin::require(bytes_ > 0, "no tensor", "a local tensor that nobody has allocated is used");
        if (buffer_ == nullptr) return;
        twin::require(buffer_->state != twin::Buffer::free, "use after free", "a tensor is used after FreeTensor");
        twin::require(buffer_->state != twin::Buffer::queued, "use while queued",
                      "a tensor is used between EnQue and DeQue");
    }

    uint32_t offset_ = 0, bytes_ = 0;
    twin::Buffer* buffer_ = nullptr;
};

// --- pipes, queues, buffers ---

class TPipe;

template <TPosition position>
class TBuf {
  public:
    template <class T>
    LocalTensor<T> Get() const {
        twin::require(bytes_ > 0, "no tensor", "a TBuf is used before InitBuffer");
        return {offset_, bytes_, nullptr};
    }
    template <class T>
    LocalTensor<T> Get(uint32_t elements) const {
        twin::require(elements * sizeof(T) <= bytes_, "past the buffer", "Get asks for more than the TBuf has");
        return {offset_, static_cast<uint32_t>(elements * sizeof(T)), nullptr};
    }

  private:
    friend class TPipe;
    uint32_t offset_ = 0, bytes_ = 0;
};

/// A queue whose tensors are filled by one pipe and used by another.
template <TPosition source, TPosition target, int depth>
class TQueBind {
    static constexpr Pipe producer = source == TPosition::VECIN ? Pipe::MTE2 : Pipe::V;
    static constexpr Pipe consumer = target == TPosition::VECOUT ? Pipe::MTE3 : Pipe::V;

  public:
    TQueBind() = default;
    TQueBind(const TQueBind&) = delete;
    TQueBind& operator=(const TQueBind&) = delete;
    ~TQueBind() noexcept(false) {
        if (std::uncaught_exceptions() > 0) return;
        for (const twin::Buffer& b : buffers_)
            twin::require(b.state == twin::Buffer::free, "leak", "a queue ends with a tensor that was not freed");
    }

    template <class T>
    LocalTensor<T> AllocTensor() {
        for (size_t i = 0; i < buffers_.size(); ++i) {
            twin::Buffer& b = buffers_[(next_ + i) % buffers_.size()];
            if (b.state != twin::Buffer::free) continue;
            next_ = (next_ + i + 1) % buffers_.size();
            Core::current().wait(producer, b.ready);
            b.state = twin::Buffer::allocated;
            return {b.offset, b.bytes, &b};
        }
        throw Fault("queue exhausted", "AllocTensor finds none of " + twin::number(buffers_.size()) +
                                           " buffers free: a device would wait for ever");
    }

    template <class T>
    void EnQue(const LocalTensor<T>& tensor) {
        twin::Buffer& b = own(tensor, twin::Buffer::allocated, "EnQue");
        twin::require(queued_.size() < static_cast<size_t>(depth), "queue full",
                      "EnQue into a queue of depth " + twin::number(static_cast<uint64_t>(depth)));
        b.state = twin::Buffer::queued;
        b.ready = Core::current().done(producer);
        queued_.push_back(&b);
    }

    template <class T>
    LocalTensor<T> DeQue() {
        twin::require(!queued_.empty(), "DeQue without EnQue",
                      "DeQue from an empty queue: a device would wait for ever");
        twin::Buffer& b = *queued_.front();
        queued_.erase(queued_.begin());
        Core::current().wait(consumer, b.ready);
        b.state = twin::Buffer::dequeued;
        return {b.offset, b.bytes, &b};
    }

    template <class T>
    void FreeTensor(const LocalTensor<T>& tensor) {
        twin::require(tensor.buffer() != nullptr && tensor.buffer()->owner == this, "wrong queue",
                      "FreeTensor of a tensor of another queue");
        twin::Buffer& b = *tensor.buffer();
        twin::require(b.state != twin::Buffer::free, "double free", "FreeTensor of a tensor that is free");
        twin::require(b.state != twin::Buffer::queued, "use while queued", "FreeTensor between EnQue and DeQue");
        twin::require(b.state == twin::Buffer::dequeued, "free without EnQue",
                      "FreeTensor of a tensor that was never in its queue");
        b.state = twin::Buffer::free;
        b.ready = Core::current().done(consumer);
    }

  private:
    friend class TPipe;
    template <class T>
    twin::Buffer& own(const LocalTensor<T>& tensor, twin::Buffer::State state, const char* call) {
        twin::require(tensor.buffer() != nullptr && tensor.buffer()->owner == this, "wrong queue",
                      std::string(call) + " of a tensor of another queue");
        twin::require(tensor.buffer()->state == state, "wrong order", std::string(call) + " of a tensor twice");
        return *tensor.buffer();
    }

    std::vector<twin::Buffer> buffers_;
    std::vector<twin::Buffer*> queued_;
    size_t next_ = 0;
};

template <TPosition position, int depth>
using TQue = TQueBind<position, position, depth>;

class TPipe {
  public:
    TPipe() { Core::current().open_pipe(); }
    TPipe(const TPipe&) = delete;
    TPipe& operator=(const TPipe&) = delete;
    ~TPipe() { Destroy(); }
    void Destroy() {
        if (open_) Core::current().close_pipe();
        open_ = false;
    }

    template <TPosition source, TPosition target, int depth>
    void InitBuffer(TQueBind<source, target, depth>& queue, uint32_t count, uint32_t bytes) {
        uint32_t& used = buffers_[source == TPosition::VECIN ? 0 : 1];
        used += count;
        twin::require(used <= 8, "too many buffers",
                      twin::number(used) + " buffers of one position, expected at most 8");
        queue.buffers_.resize(count);
        for (twin::Buffer& b : queue.buffers_)
            b = {twin::Buffer::free, Core::current().allocate(bytes, "a queue"), bytes, {}, &queue};
    }
    template <TPosition position>
    void InitBuffer(TBuf<position>& buffer, uint32_t bytes) {
        buffer.offset_ = Core::current().allocate(bytes, "a TBuf");
        buffer.bytes_ = bytes;
    }

  private:
    uint32_t buffers_[2] = {};
    bool open_ = true;
};

// --- copies ---

struct DataCopyExtParams {
    uint16_t blockCount;
    uint32_t blockLen;  // bytes
    uint32_t srcStride, dstStride;
    uint32_t rsv;
};

template <class T>
struct DataCopyPadExtParams {
    bool isPad;
    uint8_t leftPadding, rightPadding;
    T paddingValue;
};

template <class T>
void DataCopy(const LocalTensor<T>& to, const GlobalTensor<T>& from, uint32_t count) {
    const uint64_t bytes = count * sizeof(T);
    twin::require(bytes % 32 == 0, "unaligned copy",
                  "DataCopy of " + twin::number(bytes) + " bytes, expected a multiple of 32");
    to.check_aligned("DataCopy");
    Core& core = Core::current();
    core.issue("DataCopy", Pipe::MTE2);
    core.load(to.range(0, bytes, true), from.at(0, count), bytes);
}

template <class T>
void DataCopy(const GlobalTensor<T>& to, const LocalTensor<T>& from, uint32_t count) {
    const uint64_t bytes = count * sizeof(T);
    twin::require(bytes % 32 == 0, "unaligned copy",
                  "DataCopy of " + twin::number(bytes) + " bytes, expected a multiple of 32");
    from.check_aligned("DataCopy");
    Core& core = Core::current();
    core.issue("DataCopy", Pipe::MTE3);
    core.store(to.at(0, count), from.range(0, bytes, false), bytes);
}

namespace twin {

template <class T>
void check_blocks(const DataCopyExtParams& p) {
    require(p.blockCount <= 4095, "block count", "blockCount is " + number(p.blockCount) + ", expected at most 4095");
    require(p.blockLen <= 2097151 && p.blockLen % sizeof(T) == 0, "block length",
            "blockLen is " + number(p.blockLen) + " bytes, expected at most 2097151 and whole elements");
}

constexpr uint64_t padded(uint64_t bytes) {
    return (bytes + 31) / 32 * 32;
}

}  // namespace twin

/// Blocks of bytes; each begins at a block of 32 bytes in the unified buffer, whose rest becomes the first element, or
/// `paddingValue` on the right where asked for.
template <class T>
void DataCopyPad(const LocalTensor<T>& to, const GlobalTensor<T>& from, const DataCopyExtParams& p,
                 const DataCopyPadExtParams<T>& pad) {
    twin::check_blocks<T>(p);
    to.check_aligned("DataCopyPad");
    twin::require(pad.leftPadding == 0, "not modelled", "DataCopyPad with padding on the left");
    twin::require(pad.rightPadding * sizeof(T) <= 32, "padding", "rightPadding is more than 32 bytes");
    Core& core = Core::current();
    core.issue("DataCopyPad", Pipe::MTE2);
    for (uint32_t i = 0; i < p.blockCount; ++i) {
        const uint64_t stored = twin::padded(p.blockLen + pad.rightPadding * sizeof(T));
        const uint64_t at = i * (stored + p.dstStride * 32ull), begin = i * (uint64_t{p.blockLen} + p.srcStride);
        uint8_t* data = to.range(at, stored, true);
        T* source = from.at(0, (begin + p.blockLen) / sizeof(T));
        core.load(data, reinterpret_cast<uint8_t*>(source) + begin, p.blockLen);
        for (uint64_t b = p.blockLen; b < stored; b += sizeof(T)) {
            const bool asked = pad.isPad && b < p.blockLen + pad.rightPadding * sizeof(T);
            if (asked)
                std::memcpy(data + b, &pad.paddingValue, sizeof(T));
            else if (p.blockLen > 0)
                std::memcpy(data + b, data, sizeof(T));
        }
    }
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& to, const LocalTensor<T>& from, const DataCopyExtParams& p) {
    twin::check_blocks<T>(p);
    from.check_aligned("DataCopyPad");
    Core& core = Core::current();
    core.issue("DataCopyPad", Pipe::MTE3);
    for (uint32_t i = 0; i < p.blockCount; ++i) {
        const uint64_t at = i * (twin::padded(p.blockLen) + p.srcStride * 32ull);
        const uint64_t begin = i * (uint64_t{p.blockLen} + p.dstStride);
        T* target = to.at(0, (begin + p.blockLen) / sizeof(T));
        core.store(reinterpret_cast<uint8_t*>(target) + begin, from.range(at, p.blockLen, false), p.blockLen);
    }
}

template <class T, CacheLine line, DcciDst destination>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& tensor) {
    Core::current().invalidate(tensor.at(0, 0), 1);
}

// --- vectors ---

namespace twin {

template <class T, class... Types>
inline constexpr bool one_of = (std::is_same_v<T, Types> || ...);

/// Runs an element-wise instruction. A result may be a source, or lie apart from it.
template <class D, class Body, class... Sources>
void vector(const char* name, const LocalTensor<D>& to, uint32_t count, Body&& body, const Sources&... from) {
    require(count > 0, "empty instruction", std::string(name) + " of 0 elements");
    Core& core = Core::current();
    core.issue(name, Pipe::V);
    to.check_aligned(name);
    (from.check_aligned(name), ...);
    [[maybe_unused]] const auto apart = [&]<class S>(const LocalTensor<S>& source) {
        const uint64_t to_bytes = bytes_of<D>(count), bytes = bytes_of<S>(count);
        const uint64_t a = to.offset(), b = source.offset();
        const bool same = a == b && to_bytes == bytes;
        require(same || a + to_bytes <= b || b + bytes <= a, "overlap",
                std::string(name) + " has a result that overlaps a source in part");
    };
    (apart(from), ...);
    body(to.data(0, count, true), from.data(0, count, false)...);
}

template <class T>
float widened(T value) {
    return static_cast<float>(value);
}

}  // namespace twin

#define ALLTOALLV_TWIN_BINARY(Name, allowed, expression)                                                    \
    template <class T>                                                                                      \
    void Name(const LocalTensor<T>& to, const LocalTensor<T>& a, const LocalTensor<T>& b, uint32_t count) { \
        static_assert(allowed, #Name " does not take these elements on 2201");                              \
        /* Sources are read before the result is written, as one instruction does. */                       \
        Core::current();                                                                                    \
        std::vector<T> x, y;                                                                                \
        twin::vector(                                                                                       \
            #Name, to, count,                                                                               \
            [&](T* r, const T* p, const T* q) {                                                             \
                x.assign(p, p + count);                                                                     \
                y.assign(q, q + count);                                                                     \
                for (uint32_t i = 0; i < count; ++i) {                                                      \
                    const T u = x[i], v = y[i];                                                             \
                    r[i] = expression;                                                                      \
                }                                                                                           \
            },                                                                                              \
            a, b);                                                                                          \
    }

namespace twin {

template <class T>
T arithmetic(char op, T u, T v) {
    if constexpr (std::is_same_v<T, half>) {
        const float x = widened(u), y = widened(v);
        return half(op == '+' ? x + y : op == '-' ? x - y : op == '*' ? x * y : x / y);
    } else if constexpr (std::is_same_v<T, float>) {
        return op == '+' ? u + v : op == '-' ? u - v : op == '*' ? u * v : u / v;
    } else {
        using U = std::make_unsigned_t<T>;  // wraps
        const U x = static_cast<U>(u), y = static_cast<U>(v);
        return static_cast<T>(op == '+' ? x + y : op == '-' ? x - y : x * y);
    }
}

template <class T>
T extreme(bool larger, T u, T v) {
    if constexpr (one_of<T, half, float>) {
        const float x = widened(u), y = widened(v);
        require(x == x && y == y, "NaN in a comparison", "Max or Min of a NaN, for which 2201 states no result");
        return (larger ? x > y : x < y) ? u : v;
    } else {
        return (larger ? u > v : u < v) ? u : v;
    }
}

template <class T>
inline constexpr bool arithmetical = one_of<T, half, float, int16_t, int32_t>;

}  // namespace twin

ALLTOALLV_TWIN_BINARY(Add, twin::arithmetical<T>, twin::arithmetic('+', u, v))
ALLTOALLV_TWIN_BINARY(Sub, twin::arithmetical<T>, twin::arithmetic('-', u, v))
ALLTOALLV_TWIN_BINARY(Mul, twin::arithmetical<T>, twin::arithmetic('*', u, v))
ALLTOALLV_TWIN_BINARY(Div, (twin::one_of<T, half, float>), twin::arithmetic('/', u, v))
ALLTOALLV_TWIN_BINARY(Max, twin::arithmetical<T>, twin::extreme(true, u, v))
ALLTOALLV_TWIN_BINARY(Min, twin::arithmetical<T>, twin::extreme(false, u, v))
ALLTOALLV_TWIN_BINARY(And, (twin::one_of<T, int16_t, uint16_t>), static_cast<T>(u& v))
ALLTOALLV_TWIN_BINARY(Or, (twin::one_of<T, int16_t, uint16_t>), static_cast<T>(u | v))
#undef ALLTOALLV_TWIN_BINARY

#define ALLTOALLV_TWIN_SCALAR(Name, expression)                                              \
    template <class T>                                                                       \
    void Name(const LocalTensor<T>& to, const LocalTensor<T>& a, T v, uint32_t count) {      \
        static_assert(twin::arithmetical<T>, #Name " does not take these elements on 2201"); \
        twin::vector(                                                                        \
            #Name, to, count,                                                                \
            [&](T* r, const T* p) {                                                          \
                for (uint32_t i = 0; i < count; ++i) {                                       \
                    const T u = p[i];                                                        \
                    r[i] = expression;                                                       \
                }                                                                            \
            },                                                                               \
            a);                                                                              \
    }
ALLTOALLV_TWIN_SCALAR(Adds, twin::arithmetic('+', u, v))
ALLTOALLV_TWIN_SCALAR(Muls, twin::arithmetic('*', u, v))
ALLTOALLV_TWIN_SCALAR(Maxs, twin::extreme(true, u, v))
ALLTOALLV_TWIN_SCALAR(Mins, twin::extreme(false, u, v))
#undef ALLTOALLV_TWIN_SCALAR

template <class T>
void Duplicate(const LocalTensor<T>& to, T value, uint32_t count) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Duplicate takes elements of 16 and 32 bits on 2201");
    twin::vector("Duplicate", to, count, [&](T* r) {
        for (uint32_t i = 0; i < count; ++i) r[i] = value;
    });
}

namespace twin {

inline float rounded(float x, RoundMode mode) {
    switch (mode) {
        case RoundMode::CAST_RINT:
            return std::nearbyint(x);
        case RoundMode::CAST_FLOOR:
            return std::floor(x);
        case RoundMode::CAST_CEIL:
            return std::ceil(x);
        case RoundMode::CAST_ROUND:
            return std::round(x);
        case RoundMode::CAST_TRUNC:
            return std::trunc(x);
        default:
            throw Fault("round mode", "a Cast that rounds has RoundMode CAST_NONE");
    }
}

template <class D>
D saturated(float x) {
    if (x != x) return 0;
    constexpr float most = static_cast<float>(std::numeric_limits<D>::max());
    if (x >= most) return std::numeric_limits<D>::max();
    if (x <= static_cast<float>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
    return static_cast<D>(x);
}

template <class D, class S>
D converted(S x, RoundMode mode) {
    if constexpr (one_of<S, int8_t, uint8_t> && std::is_same_v<D, half>) {
        return half(static_cast<float>(x));  // exact
    } else if constexpr (one_of<S, half, bfloat16_t> && std::is_same_v<D, float>) {
        return widened(x);  // exact
    } else if constexpr (one_of<S, half, bfloat16_t, float> && std::is_integral_v<D>) {
        static_assert(!std::is_same_v<S, float> || !one_of<D, int8_t, uint8_t>,
                      "2201 has no Cast from float to 8 bits");
        static_assert(!std::is_same_v<S, half> || one_of<D, int8_t, uint8_t, int16_t, int32_t>);
        static_assert(!std::is_same_v<S, bfloat16_t> || std::is_same_v<D, int32_t>);
        return saturated<D>(rounded(widened(x), mode));
    } else if constexpr (std::is_same_v<S, float> && std::is_same_v<D, float>) {
        return rounded(x, mode);
    } else if constexpr (std::is_same_v<S, float> && one_of<D, half, bfloat16_t>) {
        require(mode == RoundMode::CAST_RINT, "not modelled", "Cast of float to 16 bits with another mode than RINT");
        return D(x);
    } else if constexpr (std::is_same_v<S, int32_t> && std::is_same_v<D, float>) {
        return static_cast<float>(x);  // to nearest, half to even
    } else if constexpr (std::is_same_v<S, int32_t> && std::is_same_v<D, int16_t>) {
        return saturated<int16_t>(static_cast<float>(x));
    } else {
        static_assert(sizeof(S) == 0, "2201 has no such Cast");
    }
}

}  // namespace twin

template <class D, class S>
void Cast(const LocalTensor<D>& to, const LocalTensor<S>& from, RoundMode mode, uint32_t count) {
    std::vector<S> x;
    twin::vector(
        "Cast", to, count,
        [&](D* r, const S* p) {
            x.assign(p, p + count);
            for (uint32_t i = 0; i < count; ++i) r[i] = twin::converted<D, S>(x[i], mode);
        },
        from);
}

/// half to int4: out of range saturates.
inline void Cast(const LocalTensor<int4b_t>& to, const LocalTensor<half>& from, RoundMode mode, uint32_t count) {
    twin::require(count % 2 == 0, "half a byte", "Cast to " + twin::number(count) + " int4, expected whole bytes");
    const auto code = [&](half x) {
        return static_cast<int>(std::min(std::max(twin::rounded(twin::widened(x), mode), -8.0f), 7.0f)) & 15;
    };
    twin::vector(
        "Cast", to, count,
        [&](int4b_t* r, const half* p) {
            for (uint32_t i = 0; i < count; i += 2)
                r[i / 2].pair = static_cast<uint8_t>(code(p[i]) | code(p[i + 1]) << 4);
        },
        from);
}

/// int4 to half: exact.
inline void Cast(const LocalTensor<half>& to, const LocalTensor<int4b_t>& from, RoundMode, uint32_t count) {
    twin::require(count % 2 == 0, "half a byte", "Cast of " + twin::number(count) + " int4, expected whole bytes");
    twin::vector(
        "Cast", to, count,
        [&](half* r, const int4b_t* p) {
            for (uint32_t i = 0; i < count; ++i) {
                const int code = p[i / 2].pair >> (i % 2 * 4) & 15;
                r[i] = half(static_cast<float>(code < 8 ? code : code - 16));
            }
        },
        from);
}

/// Each of `repeat` times the largest of `mask` elements; results are `dstRepStride` elements apart, sources
/// `srcRepStride` blocks of 32 bytes.
template <class T>
void WholeReduceMax(const LocalTensor<T>& to, const LocalTensor<T>& from, int32_t mask, int32_t repeat,
                    int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride, ReduceOrder) {
    static_assert(twin::one_of<T, half, float>, "WholeReduceMax takes half and float");
    twin::require(repeat >= 1 && repeat <= 255, "repeat",
                  "repeatTimes is " + std::to_string(repeat) + ", expected 1 to 255");
    twin::require(mask >= 1 && mask * sizeof(T) <= 256, "mask", "mask is " + std::to_string(mask) + " elements");
    twin::require(srcBlkStride == 1, "not modelled", "WholeReduceMax with blocks that are apart");
    Core& core = Core::current();
    core.issue("WholeReduceMax", Pipe::V);
    from.check_aligned("WholeReduceMax");
    for (int32_t r = 0; r < repeat; ++r) {
        const T* source = from.data(static_cast<uint32_t>(r * srcRepStride * 32 / static_cast<int32_t>(sizeof(T))),
                                    static_cast<uint64_t>(mask), false);
        T largest = source[0];
        for (int32_t i = 1; i < mask; ++i) largest = twin::extreme(true, source[i], largest);
        *to.data(static_cast<uint32_t>(r * dstRepStride), 1, true) = largest;
    }
}

}  // namespace AscendC
