// A file descriptor that closes itself.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace alltoallv {

/// Move-only owner of a descriptor. Descriptors it is given are opened close-on-exec.
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

    /// Gives the descriptor away without closing it.
    int release() { return std::exchange(fd_, -1); }

    /// Closes the descriptor held and takes `fd`. Leaves errno alone.
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
