// The last words of a rank that cannot join since its process has no descriptor left.
#pragma once

#include <atomic>
#include <functional>

namespace alltoallv {

/// Calls `tell`, which opens sockets, in a thread with an empty table of descriptors, and waits for it; what it throws
/// is dropped. Meanwhile calls `tick`, and passes on what that throws, once `tell` has seen that it is stopped. Does
/// nothing if no thread can be made.
void without_descriptors(const std::function<void(const std::atomic<bool>& stopped)>& tell,
                         const std::function<void()>& tick);

}  // namespace alltoallv
