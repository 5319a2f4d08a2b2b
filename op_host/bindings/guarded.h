// What a call does before its operator starts.
#pragma once

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/text.h"
#include "runtime/base/error.h"
#include "runtime/core/communicator.h"

namespace alltoallv {

/// Informs the peers of a failure, which they also raise.
inline void announce(Communicator& communicator, OpKind op, const Error& error) {
    const GilReleased release;
    try {
        communicator.fail(op, error);
    } catch (const Error&) {  // the announcement also failed: the first error counts
    }
}

/// Returns an exception of Python as peers raise it: one of the package's classes, or InvalidParamError.
Error error_of(nb::handle error);

/// Runs what a front end does before an operator starts; its failure is announced to the peers.
template <class Function>
auto guarded(Communicator& communicator, OpKind op, Function prepare) {
    try {
        return prepare();
    } catch (const Error& error) {
        announce(communicator, op, error);
        throw;
    } catch (const nb::python_error& error) {
        if (error.matches(PyExc_Exception)) announce(communicator, op, error_of(error.value()));
        throw;
    }
}

/// The output of a call.
struct Target {
    nb::object array;
    uintptr_t address;
};

/// Returns the given output, or makes one.
Target target_of(const ArrayPair& given, nb::handle like, nb::object output, const Request& request);

}  // namespace alltoallv
