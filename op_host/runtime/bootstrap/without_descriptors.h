// The last words of a rank that cannot join since its process has no descriptor left.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>

#include "runtime/base/error.h"

namespace alltoallv {

/// How long a rank that cannot join stays to notify the peers that come later, in seconds.
inline constexpr double telling = 10.0;

/// Calls `tell`, which opens sockets, in a thread with an empty table of descriptors, and waits for it; what it throws
/// is dropped. Meanwhile calls `tick`, and passes on what that throws, once `tell` has seen that it is stopped. Does
/// nothing if no thread can be made.
void without_descriptors(const std::function<void(const std::atomic<bool>& stopped)>& tell,
                         const std::function<void()>& tick);

/// Tells the other ranks why this one cannot join: `meet` meets them with the options of such a rank. Does nothing for
/// other errors than a resource that has run out, or for the failure that this rank tells already.
template <class Options, class Meet>
void tell_apart(const Options& options, const Error& error, Meet&& meet) {
    if (error.kind() != ErrorClass::resource || options.failure) return;
    Options apart = options;
    apart.failure = error;
    apart.timeout = std::min(options.timeout, telling);
    const auto tell = [&](const std::atomic<bool>& stopped) {
        apart.poll = [&] {
            if (stopped) throw error;
        };
        meet(apart);
    };
    without_descriptors(tell, [&] {
        if (options.poll) options.poll();
    });
}

}  // namespace alltoallv
