/// \file mapping.h
/// \brief A mapping, shared (of a memfd) or private to this process, unmapped on destruction.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace alltoallv {

class Mapping {
  public:
    Mapping() = default;
    Mapping(int fd, size_t bytes) : Mapping(fd, bytes, MAP_SHARED) {}

    /// Zero-filled memory of this process alone.
    static Mapping of_this_process(size_t bytes) { return {-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS}; }

    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Mapping() {
        if (data_ != nullptr) munmap(data_, bytes_);
    }

    char* data() const { return static_cast<char*>(data_); }
    size_t size() const { return bytes_; }

    /// Makes the first `bytes` resident: a page fault inside an exchange costs more than the exchange.
    void populate(size_t bytes) const {
        constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, Linux 5.14; older kernels fault lazily
        if (data_ != nullptr) (void)madvise(data_, bytes, populate_write);
    }

  private:
    Mapping(int fd, size_t bytes, int flags) : bytes_(bytes) {
        data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
        if (data_ == MAP_FAILED) {
            data_ = nullptr;
            throw Error(ErrorClass::backend_unavailable, ErrorType::OUT_OF_HOST_MEMORY,
                        "mapping " + std::to_string(bytes) + " bytes of memory failed: " + strerror(errno));
        }
    }

    void* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace alltoallv
