#include "runtime/core/communicator.h"

#include <exception>

#include "runtime/core/hooks.h"
#include "runtime/core/regions.h"

namespace alltoallv {

void Communicator::check_rank(int rank, int size) {
    if (size < 1) throw too_small("size", std::to_string(size), 1);
    if (rank < 0 || rank >= size) throw no_rank("rank", std::to_string(rank), size);
}

WorkPtr Communicator::begin(OpKind op, std::function<void()> call) {
    try {
        return submit(std::move(call));
    } catch (const Error& error) {
        if (error.kind() == ErrorClass::resource) fail(op, error);
        throw;
    }
}

Error Communicator::two_threads(OpKind op) const {
    return peer_mismatch(3007, std::string(name_of(op)) + " of domain '" + domain() + "': two threads of rank " +
                                   std::to_string(rank()) +
                                   " are in calls of this communicator at once, which other ranks may " +
                                   "take in another order; give each thread a communicator of its own");
}

void Communicator::check_usable() const {
    if (is_inherited())
        throw backend_unavailable(
            5008, "the communicator of domain '" + domain() +
                      "' was made before fork and belongs to the parent process; make a new one in the child");
    if (destroyed_.load(std::memory_order_acquire))
        throw Error(ErrorClass::invalid_param, ErrorType::COMM_EMPTY,
                    with_id(1477, "the communicator of domain '" + domain() + "' has been destroyed; make a new one"));
}

WorkPtr Communicator::submit(std::function<void()> call) {
    check_usable();
    return queue_->submit(std::move(call));
}

void Communicator::destroy() {
    if (is_inherited()) return;  // the child must not end the parent's membership
    if (queue_->is_inside()) return abort("destroy() was called inside a call");
    const CallQueue::Slot slot(*queue_);
    leave();
}

Stats Communicator::stats() const {
    return {{"operators", operators_.load(std::memory_order_relaxed)},
            {"failed_operators", failed_.load(std::memory_order_relaxed)}};
}

void Communicator::drop(Communicator* last) {
    if (last->queue_->is_inside())  // in a signal handler, inside a call that still uses it
        return last->abort("its last reference was dropped inside a call");
    const auto end = [last] { delete last; };
    hooks().unlocked ? hooks().unlocked(end) : end();
}

void Communicator::destroy_quietly() {
    try {
        if (busy()) abort("destroyed while calls were pending");
        destroy();
    } catch (const std::exception&) {
        // Nobody is left to report it to.
    }
}

}  // namespace alltoallv
