#include "core/communicator.h"

#include <exception>

namespace alltoallv {

void Communicator::check_rank(int rank, int size) {
    if (size < 1) throw invalid_param("size is " + std::to_string(size) + ", expected at least 1");
    if (rank < 0 || rank >= size)
        throw invalid_param("rank is " + std::to_string(rank) + ", expected 0 <= rank < " + std::to_string(size));
}

WorkPtr Communicator::begin(OpKind op, std::function<void()> call) {
    try {
        return submit(std::move(call));
    } catch (const Error& error) {
        if (error.kind() == ErrorClass::resource) fail(op, error);
        throw;
    }
}

Error Communicator::inherited() const {
    return backend_unavailable("the communicator of domain '" + domain() +
                               "' was made before fork and belongs to the parent process; make a new one in the child");
}

Error Communicator::destroyed() const {
    return Error(ErrorClass::invalid_param, ErrorType::COMM_EMPTY,
                 "the communicator of domain '" + domain() + "' has been destroyed; make a new one");
}

void Communicator::destroy_quietly() {
    try {
        if (busy()) abort("destroyed while calls were pending");
        destroy();
    } catch (const std::exception&) {
        // Nothing to report it to.
    }
}

}  // namespace alltoallv
