// Opaque handles: never null, never a pointer, never used twice.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/failure.h"

namespace alltoallv::emulator {

/// The objects of one kind. Thread-safe.
template <class Object>
class Handles {
  public:
    /// `kind` is for messages; `tag` distinguishes handles of different kinds; `code` is the number of the failure.
    Handles(const char* kind, uint64_t tag, int code)
        : kind_(kind), code_(code), tag_(tag), next_((tag << 32) + 0x10) {}

    void* add(std::shared_ptr<Object> object) {
        const std::lock_guard lock(mutex_);
        next_ += 0x10;
        objects_.emplace(next_, std::move(object));
        return reinterpret_cast<void*>(next_);
    }

    /// Returns null for an invalid handle.
    std::shared_ptr<Object> find(void* handle) const {
        const std::lock_guard lock(mutex_);
        const auto found = objects_.find(reinterpret_cast<uint64_t>(handle));
        return found == objects_.end() ? nullptr : found->second;
    }

    std::shared_ptr<Object> get(void* handle) const {
        std::shared_ptr<Object> object = find(handle);
        if (!object) throw none(handle);
        return object;
    }

    std::shared_ptr<Object> remove(void* handle) {
        const std::lock_guard lock(mutex_);
        const auto found = objects_.find(reinterpret_cast<uint64_t>(handle));
        if (found == objects_.end()) throw none(handle);
        auto object = std::move(found->second);
        objects_.erase(found);
        return object;
    }

    std::vector<std::shared_ptr<Object>> all() const {
        const std::lock_guard lock(mutex_);
        std::vector<std::shared_ptr<Object>> objects;
        for (const auto& entry : objects_) objects.push_back(entry.second);
        return objects;
    }

    /// Returns the handle of the first object that `matches`; null if there is none.
    template <class Matches>
    void* find_if(Matches&& matches) const {
        const std::lock_guard lock(mutex_);
        for (const auto& [handle, object] : objects_)
            if (matches(*object)) return reinterpret_cast<void*>(handle);
        return nullptr;
    }

  private:
    Failure none(void* handle) const {
        const bool known = reinterpret_cast<uint64_t>(handle) >> 32 == tag_ && handle != nullptr;
        return Failure(code_, kind_,
                       handle == nullptr ? " is null"
                       : known           ? " has been destroyed"
                                         : " is not a handle of this library");
    }

    const char* kind_;
    int code_;
    uint64_t tag_;
    mutable std::mutex mutex_;
    uint64_t next_;
    std::unordered_map<uint64_t, std::shared_ptr<Object>> objects_;
};

}  // namespace alltoallv::emulator
