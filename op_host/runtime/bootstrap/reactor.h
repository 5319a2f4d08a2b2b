// The background thread of a process: waits for descriptors (peers' pidfds and sockets) and runs callbacks.
#pragma once

#include <cstdint>
#include <functional>

namespace alltoallv {

/// Started at the first `add`, joined at process exit or when the last descriptor is removed. After fork the child has
/// an empty reactor. Callbacks run on the reactor's thread, must not block, and may call add and remove. A callback
/// that throws is removed.
class Reactor {
  public:
    using Callback = std::function<void(uint32_t epoll_events)>;

    static Reactor& instance();

    /// Watches `fd` for reading and hang-up (level-triggered). The caller keeps ownership of the descriptor.
    void add(int fd, Callback callback);

    /// From now on, or no longer, the callback of `fd` runs also while it can be written. Does nothing if nobody
    /// watches it.
    void watch_output(int fd, bool watched);

    /// After return the callback of `fd` is not running and will not run again (unless called from that callback).
    void remove(int fd);

  private:
    Reactor();
};

}  // namespace alltoallv
