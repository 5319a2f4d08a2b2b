// The twin's model of one vector core: its unified buffer, the pipes that work on it at the same time, and its way to
// device memory.
//
// Instructions run at once, in the order of the program, so a right kernel has one result. Whether it is right is told
// by clocks: every pipe counts its instructions and knows how far it has waited for the others, by events, barriers and
// queues. An access that touches what another instruction has touched, without a wait between them, is a fault, even
// if this run would have given the right bytes.
//
// Stores to device memory stay in the core until a barrier orders them, and then leave it late: stores without a
// barrier between them leave in any order. Scalar reads of device memory go through a cache that nobody else updates.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace alltoallv::twin {

/// S: scalars; V: vectors; MTE2: device memory to unified buffer; MTE3: unified buffer to device memory.
enum class Pipe : uint8_t { S, V, MTE2, MTE3 };
inline constexpr size_t pipes = 4;
const char* name_of(Pipe pipe);

inline constexpr uint32_t ub_bytes = 196608, block_bytes = 32;

/// What a device would punish, or leave undefined. `kind` is one of a fixed list (docs/ascend-c.md).
class Fault : public std::runtime_error {
  public:
    Fault(std::string name, const std::string& text) : runtime_error(name + ": " + text), kind(std::move(name)) {}
    const std::string kind;
};

/// How a launch behaves.
struct Behaviour {
    uint64_t seed = 0;
    /// Whether an address range is device memory; without it every range is.
    std::function<bool(const void*, size_t)> is_device_memory;
    /// Mean pause before an instruction, in microseconds, at random; 0: none.
    double mean_delay_us = 0;
};

class Core {
  public:
    Core(uint32_t index, uint32_t count, const Behaviour& behaviour);
    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;

    /// The core that this thread runs. Throws Fault outside of a launch.
    static Core& current();
    static void set_current(Core* core);

    uint32_t index() const { return index_; }
    uint32_t count() const { return count_; }
    uint8_t* ub() { return ub_.get(); }

    // --- instructions ---

    /// Begins an instruction of a pipe; the accesses that follow are its own.
    void issue(const char* instruction, Pipe pipe);
    void reads(uint32_t offset, uint32_t bytes) { touch(offset, bytes, false); }
    void writes(uint32_t offset, uint32_t bytes) { touch(offset, bytes, true); }
    void load(void* to, const void* from, size_t bytes);
    void store(void* to, const void* from, size_t bytes);

    /// The scalar unit's own reads and writes of device memory, through its cache.
    void load_scalar(void* to, const void* from, size_t bytes);
    void store_scalar(void* to, const void* from, size_t bytes);
    void invalidate(const void* address, size_t bytes);

    // --- order ---

    void set_flag(Pipe from, Pipe to, int id);
    void wait_flag(Pipe from, Pipe to, int id);
    void barrier(Pipe pipe);
    void barrier_all();

    using Clock = std::array<uint32_t, pipes>;
    /// What has been done when a pipe has done all that was issued to it.
    Clock done(Pipe pipe) const;
    /// The pipe waits for that.
    void wait(Pipe pipe, const Clock& clock);

    // --- memory of the unified buffer ---

    void open_pipe();
    void close_pipe();
    /// Returns the offset of fresh, uninitialized memory.
    uint32_t allocate(uint32_t bytes, const char* owner);
    void check_pipe_open() const;

    /// All instructions done, all stores visible; throws Fault for flags that nobody has waited for.
    void finish();
    /// Drops what has not become visible, after a fault.
    void abandon() { epochs_.clear(); }

  private:
    struct Shadow {  // of 4 bytes of the unified buffer
        uint32_t written = 0;
        std::array<uint32_t, pipes> read{};
        Pipe writer = Pipe::S;
        bool initialized = false;
    };
    struct Store {
        uint8_t* to;
        std::vector<uint8_t> bytes;
    };
    struct GmAccess {
        const uint8_t *begin, *end;
        Pipe pipe;
        uint32_t time;
        bool write;
        const char* instruction;
    };
    struct Line {
        std::array<uint8_t, 64> bytes;
        uint64_t dirty = 0;  // bytes that were stored, as bits
    };

    bool knows(Pipe pipe, Pipe other, uint32_t time) const { return clocks_[size_t(pipe)][size_t(other)] >= time; }
    void touch(uint32_t offset, uint32_t bytes, bool write);
    void touch_gm(const void* address, size_t bytes, bool write);
    void tick();
    void publish_one();
    void publish_all();
    Line& line_of(uintptr_t address);

    const uint32_t index_, count_;
    const Behaviour& behaviour_;
    std::minstd_rand random_;
    // Zeroed memory costs nothing until it is touched, and most kernels touch little.
    template <class T>
    using Zeroed = std::unique_ptr<T[], decltype(&std::free)>;
    const Zeroed<uint8_t> ub_;
    const Zeroed<Shadow> shadow_;
    uint32_t used_ = 0;
    bool pipe_open_ = false;
    std::array<uint32_t, pipes> issued_{};
    std::array<Clock, pipes> clocks_{};
    std::map<std::array<int, 3>, Clock> flags_;  // (from, to, id): set, and not waited for
    std::vector<GmAccess> gm_;                   // since the last barrier of all pipes
    std::deque<std::vector<Store>> epochs_;      // stores that are not visible yet; a barrier begins a new epoch
    std::map<uintptr_t, Line> cache_;
    const char* instruction_ = "";
    Pipe pipe_ = Pipe::S;
};

/// Bytes that other cores and other processes read and write at the same time: in 4-byte words, the first one last when
/// stored and first when loaded, so that whoever sees a flag's first word sees the rest.
void load_shared(void* to, const void* from, size_t bytes);
void store_shared(void* to, const void* from, size_t bytes);

/// Runs `kernel` on as many cores, each in a thread; throws the first core's Fault once all have ended.
void launch(uint32_t cores, const Behaviour& behaviour, const std::function<void()>& kernel);

}  // namespace alltoallv::twin
