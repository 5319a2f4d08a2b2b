// A file descriptor that closes itself.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace alltoallv {

/// Move-only owner of a descriptor. Descriptors given to it must be open with close-on-exec.
class UniqueFd {
  public:
    UniqueFd() = default;
    explicit UniqueFd(int fd) : fd_(fd) {}
    UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
    UniqueFd& operator=(UniqueFd&& other) noexcept {
        if (this != &other) reset(other.release());
        return *this;
    }
    ~UniqueFd() { reset(); }

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

    /// Returns the descriptor without closing it; the caller then owns it.
    int release() { return std::exchange(fd_, -1); }

    /// Closes the held descriptor and takes `fd`. Does not change errno.
    void reset(int fd = -1) {
        const int old = std::exchange(fd_, fd);
        if (old < 0) return;
        const int saved = errno;
        ::close(old);  // not repeated on EINTR: Linux has freed the number by then
        errno = saved;
    }

  private:
    int fd_ = -1;
};

}  // namespace alltoallv
