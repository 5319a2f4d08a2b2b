/// \file array_call.h
/// \brief A call that repeats on pairs of NumPy arrays: the common case is checked here, everything else by the caller,
/// in words.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <functional>

namespace alltoallv {

/// What an array must be: contiguous, of this dtype and at least so many elements.
struct ArrayKind {
    nanobind::object dtype;
    size_t size;
    size_t itemsize = nanobind::cast<size_t>(dtype.attr("itemsize"));
};

/// What the arrays of a call must be.
struct Arrays {
    ArrayKind input, output;
    nanobind::object shape;  ///< of an output that is made here; None: the caller makes it
};

struct ArrayCall {
    Arrays arrays;
    bool in_place;  ///< whether the output may be the input
    std::function<void(uintptr_t input, uintptr_t output)> call;

    /// The output, made here if it is None; None if these are no such arrays or there is no memory, with nothing done.
    nanobind::object run(nanobind::handle input, nanobind::object output) const;
};

/// One that is called like the plan that derives from it, in Python: no function there is entered on the way, which
/// would take as long as the rest where ranks outnumber processors.
struct ArrayPlan {
    ArrayCall call;
};

}  // namespace alltoallv
