// What the self-tests of the emulator share: device memory, streams, communicators.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstring>

#include "check.h"
#include "hccl/hccl_api.h"
#include "runtime/settings.h"

namespace testing {

inline void option(const char* name, const std::string& value) {
    CHECK_EQ(AlltoallvEmulatorSet(name, value.c_str()), 0);
}

/// Set up for all tests, before the first one forks.
[[maybe_unused]] inline const bool is_set_up = [] {
    option("verbose", std::getenv("VERBOSE") != nullptr ? "1" : "0");
    return aclrtSetDevice(0) == 0;
}();

/// Device memory that holds values of one type.
template <class T>
class DeviceArray {
  public:
    explicit DeviceArray(size_t count) : count_(count) {
        CHECK_EQ(aclrtMalloc(&data_, std::max<size_t>(1, count * sizeof(T)), ACL_MEM_MALLOC_HUGE_FIRST), 0);
    }
    DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
        CHECK_EQ(aclrtMemcpy(data_, count_ * sizeof(T), values.data(), count_ * sizeof(T), ACL_MEMCPY_HOST_TO_DEVICE),
                 0);
    }
    ~DeviceArray() { aclrtFree(data_); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;

    void* data() const { return data_; }
    size_t bytes() const { return count_ * sizeof(T); }
    std::vector<T> values() const {
        std::vector<T> values(count_);
        CHECK_EQ(aclrtMemcpy(values.data(), bytes(), data_, bytes(), ACL_MEMCPY_DEVICE_TO_HOST), 0);
        return values;
    }

  private:
    size_t count_;
    void* data_ = nullptr;
};

/// A handle that lives as long as this.
template <auto create, auto destroy>
class Handle {
  public:
    Handle() { CHECK_EQ(create(&handle_), 0); }
    ~Handle() { destroy(handle_); }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    operator void*() const { return handle_; }

  private:
    void* handle_ = nullptr;
};
using Stream = Handle<aclrtCreateStream, aclrtDestroyStream>;
using Event = Handle<aclrtCreateEvent, aclrtDestroyEvent>;

/// Keeps a stream busy until it is let go, or the scope ends.
class Held {
  public:
    explicit Held(aclrtStream stream) { CHECK_EQ(aclrtLaunchHostFunc(stream, hold, this), 0); }
    ~Held() {
        let_go();
        eventually([this] { return ended_.load(); });
    }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    void let_go() { go_ = true; }

  private:
    static void hold(void* self) {
        auto& held = *static_cast<Held*>(self);
        while (!held.go_) usleep(1000);
        held.ended_ = true;
    }
    std::atomic<bool> go_{false}, ended_{false};
};

inline void* allocated(size_t bytes) {
    void* memory = nullptr;
    CHECK_EQ(aclrtMalloc(&memory, bytes, ACL_MEM_MALLOC_HUGE_FIRST), 0);
    return memory;
}

/// The message reported last must contain `part`.
inline void check_message(const std::string& part) {
    check_contains(aclGetRecentErrMsg(), part);
}

}  // namespace testing
