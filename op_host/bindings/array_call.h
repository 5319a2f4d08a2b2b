/// \file array_call.h
/// \brief A call that repeats on pairs of arrays: the common case is checked here, everything else by the caller, in
/// words.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>
#include <optional>

#include "bindings/arrays.h"

namespace alltoallv {

/// What an array must be: contiguous, of this dtype (nothing: none will do) and at least so many elements.
struct ArrayKind {
    std::optional<DTypeCode> dtype;
    size_t size, itemsize;
};

/// What the arrays of a call must be.
struct Arrays {
    const Framework* framework;
    ArrayKind input, output;
    ArrayMaker make;  ///< of an output that is made here; empty: the caller makes it
};

/// The arrays that a call is given.
struct ArrayPair {
    const Framework* framework;
    ArrayView input;
    std::optional<ArrayView> output;  ///< nothing: to be made
};

/// Nothing if these are no two arrays of one framework whose calls repeat; `output` may be None.
std::optional<ArrayPair> arrays_given(nanobind::handle input, nanobind::handle output);

struct ArrayCall {
    Arrays arrays;
    bool in_place;  ///< whether the output may be the input
    std::function<void(uintptr_t input, uintptr_t output, double timeout)> call;

    /// The output, made here if it is None; None if these are no such arrays or there is no memory, with nothing done.
    nanobind::object run(const ArrayPair& given, nanobind::object output, double timeout = -1.0) const;
};

/// One that is called like the plan that derives from it, in Python: no function there is entered on the way, which
/// would take as long as the rest where ranks outnumber processors.
struct ArrayPlan {
    ArrayCall call;
};

}  // namespace alltoallv
