#include "op_kernel/ascendc/twin/core.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

namespace alltoallv::twin {
namespace {

thread_local Core* current_core = nullptr;

std::string range_text(uint32_t offset, uint32_t bytes) {
    return "bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) + " of the unified buffer";
}

}  // namespace

const char* name_of(Pipe pipe) {
    constexpr const char* names[] = {"S", "V", "MTE2", "MTE3"};
    return names[size_t(pipe)];
}

Core::Core(uint32_t index, uint32_t count, const Behaviour& behaviour)
    : index_(index),
      count_(count),
      behaviour_(behaviour),
      random_(static_cast<uint32_t>(behaviour.seed * 2654435761u + index * 40503u + 1)),
      ub_(static_cast<uint8_t*>(std::calloc(ub_bytes, 1)), std::free),
      shadow_(static_cast<Shadow*>(std::calloc(ub_bytes / 4, sizeof(Shadow))), std::free),
      epochs_(1) {}

Core& Core::current() {
    if (current_core == nullptr) throw Fault("no launch", "a kernel's function was called outside of a launch");
    return *current_core;
}

void Core::set_current(Core* core) {
    current_core = core;
}

void Core::issue(const char* instruction, Pipe pipe) {
    tick();
    instruction_ = instruction;
    pipe_ = pipe;
    ++issued_[size_t(pipe)];
    if (pipe == Pipe::S) clocks_[0][0] = issued_[0];  // scalars run in order
}

void Core::touch(uint32_t offset, uint32_t bytes, bool write) {
    if (bytes == 0) return;
    check_pipe_open();
    if (offset + bytes > used_)
        throw Fault("past the buffer", std::string(instruction_) + " touches " + range_text(offset, bytes) +
                                           ", of which " + std::to_string(used_) + " are allocated");
    const uint32_t now = issued_[size_t(pipe_)];
    for (uint32_t i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) {
        Shadow& s = shadow_[i];
        if (!write && !s.initialized)
            throw Fault("uninitialized read", std::string(instruction_) + " reads " + range_text(offset, bytes) +
                                                  ", of which byte " + std::to_string(4 * i) + " was never written");
        const auto unordered = [&](Pipe other, uint32_t time, const char* what) {
            if (time == 0 || (other == pipe_ && time == now) || knows(pipe_, other, time)) return;
            throw Fault(other == pipe_ ? "missing barrier" : "missing event",
                        std::string(instruction_) + " on pipe " + name_of(pipe_) + (write ? " writes " : " reads ") +
                            range_text(offset, bytes) + ", which pipe " + name_of(other) + " " + what +
                            " without a wait between them");
        };
        const bool own_write = s.writer == pipe_ && s.written == now;
        if (!own_write) unordered(s.writer, s.written, "wrote");
        if (write) {
            for (size_t p = 0; p < pipes; ++p)
                if (!(Pipe(p) == pipe_ && s.read[p] == now)) unordered(Pipe(p), s.read[p], "read");
            s.written = now;
            s.writer = pipe_;
            s.initialized = true;
            s.read = {};
        } else {
            s.read[size_t(pipe_)] = now;
        }
    }
}

void Core::touch_gm(const void* address, size_t bytes, bool write) {
    if (behaviour_.is_device_memory && !behaviour_.is_device_memory(address, bytes))
        throw Fault("no device memory", std::string(instruction_) + " touches " + std::to_string(bytes) +
                                            " bytes that are not in one allocation of device memory");
    const auto* begin = static_cast<const uint8_t*>(address);
    const uint8_t* end = begin + bytes;
    for (const GmAccess& a : gm_) {
        if (a.end <= begin || end <= a.begin || (!a.write && !write)) continue;
        if (knows(pipe_, a.pipe, a.time)) continue;
        throw Fault("device memory without order", std::string(instruction_) + (write ? " writes" : " reads") +
                                                       " device memory that " + a.instruction +
                                                       (a.write ? " wrote" : " read") + " on pipe " + name_of(a.pipe) +
                                                       " without a wait between them");
    }
    gm_.push_back({begin, end, pipe_, issued_[size_t(pipe_)], write, instruction_});
}

void Core::load(void* to, const void* from, size_t bytes) {
    touch_gm(from, bytes, false);
    load_shared(to, from, bytes);
    const auto* begin = static_cast<const uint8_t*>(from);
    for (const auto& epoch : epochs_)  // a core sees its own stores, once it has waited for them
        for (const Store& s : epoch) {
            const uint8_t* low = std::max<const uint8_t*>(begin, s.to);
            const uint8_t* high = std::min<const uint8_t*>(begin + bytes, s.to + s.bytes.size());
            if (low < high)
                std::memcpy(static_cast<uint8_t*>(to) + (low - begin), s.bytes.data() + (low - s.to),
                            static_cast<size_t>(high - low));
        }
}

void Core::store(void* to, const void* from, size_t bytes) {
    touch_gm(to, bytes, true);
    const auto* data = static_cast<const uint8_t*>(from);
    epochs_.back().push_back({static_cast<uint8_t*>(to), {data, data + bytes}});
}

Core::Line& Core::line_of(uintptr_t address) {
    const auto [found, fresh] = cache_.try_emplace(address / 64);
    if (fresh) load_shared(found->second.bytes.data(), reinterpret_cast<const void*>(address / 64 * 64), 64);
    return found->second;
}

void Core::load_scalar(void* to, const void* from, size_t bytes) {
    issue("a scalar load", Pipe::S);
    for (size_t i = 0; i < bytes; ++i) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(from) + i;
        static_cast<uint8_t*>(to)[i] = line_of(address).bytes[address % 64];
    }
}

void Core::store_scalar(void* to, const void* from, size_t bytes) {
    issue("a scalar store", Pipe::S);
    for (size_t i = 0; i < bytes; ++i) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(to) + i;
        Line& line = line_of(address);
        line.bytes[address % 64] = static_cast<const uint8_t*>(from)[i];
        line.dirty |= uint64_t{1} << (address % 64);
    }
}

void Core::invalidate(const void* address, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(address);
    for (uintptr_t key = begin / 64; key <= (begin + std::max<size_t>(bytes, 1) - 1) / 64; ++key) {
        const auto found = cache_.find(key);
        if (found == cache_.end()) continue;
        for (size_t i = 0; i < 64; ++i)
            if (found->second.dirty >> i & 1)
                store_shared(reinterpret_cast<void*>(key * 64 + i), &found->second.bytes[i], 1);
        cache_.erase(found);
    }
}

void Core::set_flag(Pipe from, Pipe to, int id) {
    if (id < 0 || id > 7) throw Fault("event id", "SetFlag has id " + std::to_string(id) + ", expected 0 to 7");
    if (!flags_.try_emplace({int(from), int(to), id}, done(from)).second)
        throw Fault("set twice", "SetFlag " + std::string(name_of(from)) + "_" + name_of(to) + " " +
                                     std::to_string(id) + " is set already, and nobody has waited for it");
}

void Core::wait_flag(Pipe from, Pipe to, int id) {
    const auto found = flags_.find({int(from), int(to), id});
    if (found == flags_.end())
        throw Fault("wait without set", "WaitFlag " + std::string(name_of(from)) + "_" + name_of(to) + " " +
                                            std::to_string(id) + " waits for a flag that is not set");
    wait(to, found->second);
    flags_.erase(found);
}

Core::Clock Core::done(Pipe pipe) const {
    Clock clock = clocks_[size_t(pipe)];
    clock[size_t(pipe)] = issued_[size_t(pipe)];
    return clock;
}

void Core::wait(Pipe pipe, const Clock& clock) {
    Clock& own = clocks_[size_t(pipe)];
    for (size_t p = 0; p < pipes; ++p) own[p] = std::max(own[p], clock[p]);
}

void Core::barrier(Pipe pipe) {
    clocks_[size_t(pipe)] = done(pipe);
    if (pipe == Pipe::MTE3 && !epochs_.back().empty()) epochs_.emplace_back();
}

void Core::barrier_all() {
    for (Clock& clock : clocks_) clock = issued_;
    gm_.clear();
    if (!epochs_.back().empty()) epochs_.emplace_back();
}

void Core::tick() {
    if (behaviour_.mean_delay_us > 0 && random_() % 16 == 0) {
        const double us = 16 * behaviour_.mean_delay_us * static_cast<double>(random_() % 2048) / 1024;
        std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
    }
    if (random_() % 4 == 0) publish_one();
}

void Core::publish_one() {
    std::vector<Store>& oldest = epochs_.front();
    if (oldest.empty()) return;
    // The last of those without order, more often than not: a flag before its data.
    size_t i = random_() % 4 == 0 ? random_() % oldest.size() : oldest.size() - 1;
    // Stores to the same place keep their order.
    for (size_t j = i; j-- > 0;)
        if (oldest[j].to < oldest[i].to + oldest[i].bytes.size() &&
            oldest[i].to < oldest[j].to + oldest[j].bytes.size())
            i = j;
    store_shared(oldest[i].to, oldest[i].bytes.data(), oldest[i].bytes.size());
    oldest.erase(oldest.begin() + static_cast<std::ptrdiff_t>(i));
    if (oldest.empty() && epochs_.size() > 1) epochs_.pop_front();
}

void Core::publish_all() {
    for (int pauses = 8; !epochs_.front().empty(); publish_one())  // in which others may see a part
        if (pauses > 0 && random_() % 4 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
            --pauses;
        }
}

void Core::open_pipe() {
    if (pipe_open_) throw Fault("two pipes", "a TPipe is made while another one is alive");
    pipe_open_ = true;
    std::fill_n(shadow_.get(), used_ / 4, Shadow{});
    used_ = 0;
}

void Core::close_pipe() {
    barrier_all();
    pipe_open_ = false;
}

void Core::check_pipe_open() const {
    if (!pipe_open_) throw Fault("no pipe", "memory of the unified buffer is used without a TPipe");
}

uint32_t Core::allocate(uint32_t bytes, const char* owner) {
    check_pipe_open();
    bytes = (bytes + block_bytes - 1) / block_bytes * block_bytes;
    if (bytes > ub_bytes - used_)
        throw Fault("unified buffer overflow", std::string(owner) + " needs " + std::to_string(bytes) + " bytes, of " +
                                                   std::to_string(ub_bytes) + " only " +
                                                   std::to_string(ub_bytes - used_) + " are left");
    std::memset(ub() + used_, 0xA5, bytes);
    used_ += bytes;
    return used_ - bytes;
}

void Core::finish() {
    if (pipe_open_) throw Fault("pipe left open", "the kernel ends while its TPipe is alive");
    if (!flags_.empty()) {
        const auto& [from, to, id] = flags_.begin()->first;
        throw Fault("set without wait", "the kernel ends with flag " + std::string(name_of(Pipe(from))) + "_" +
                                            name_of(Pipe(to)) + " " + std::to_string(id) + " set");
    }
    for (const auto& [key, line] : cache_)
        if (line.dirty != 0)
            throw Fault("scalar store not written back",
                        "the kernel ends with a scalar store that is in the core's cache alone");
    publish_all();
}

void load_shared(void* to, const void* from, size_t bytes) {
    if (bytes > 64 || bytes % 4 != 0 || reinterpret_cast<uintptr_t>(from) % 4 != 0) {
        std::memcpy(to, from, bytes);
        return;
    }
    for (size_t i = 0; i < bytes / 4; ++i) {
        const uint32_t word = __atomic_load_n(static_cast<const uint32_t*>(from) + i, __ATOMIC_ACQUIRE);
        std::memcpy(static_cast<uint8_t*>(to) + 4 * i, &word, 4);
    }
}

void store_shared(void* to, const void* from, size_t bytes) {
    if (bytes > 64 || bytes % 4 != 0 || reinterpret_cast<uintptr_t>(to) % 4 != 0) {
        std::memcpy(to, from, bytes);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        return;
    }
    for (size_t i = bytes / 4; i-- > 0;) {
        uint32_t word;
        std::memcpy(&word, static_cast<const uint8_t*>(from) + 4 * i, 4);
        __atomic_store_n(static_cast<uint32_t*>(to) + i, word, __ATOMIC_RELEASE);
    }
}

void launch(uint32_t cores, const Behaviour& behaviour, const std::function<void()>& kernel) {
    std::vector<std::exception_ptr> errors(cores);
    const auto run = [&](uint32_t i) {
        Core core(i, cores, behaviour);
        Core::set_current(&core);
        try {
            kernel();
            core.finish();
        } catch (...) {
            core.abandon();
            errors[i] = std::current_exception();
        }
        Core::set_current(nullptr);
    };
    std::vector<std::thread> threads;
    for (uint32_t i = 1; i < cores; ++i) threads.emplace_back(run, i);
    run(0);
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

}  // namespace alltoallv::twin
