// Reads the frameworks' arrays in place.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "base/dtype.h"
#include "core/request.h"
#include "transport/shm/arena.h"

namespace alltoallv {

/// A contiguous array in host memory.
struct ArrayView {
    DType dtype;
    Shape shape;  ///< lives as long as the array, or `kept`
    size_t size;  ///< elements
    uintptr_t address;
    std::unique_ptr<const int64_t[]> kept = nullptr;  ///< owns the shape, if the array does not store it in C

    ByteRange bytes() const { return {address, size * size_of(dtype)}; }
};

class Framework {
  public:
    virtual ~Framework() = default;

    /// Returns nothing unless the array consists of contiguous elements of a dtype that the core knows.
    virtual std::optional<ArrayView> view(nanobind::handle array) const = 0;

    /// Also returns nothing if the framework must be asked or informed about the use of the array.
    virtual std::optional<ArrayView> input(nanobind::handle array) const = 0;

    /// Also returns nothing if the array must not be written to.
    virtual std::optional<ArrayView> output(nanobind::handle array) const = 0;

    /// Makes an array of that shape over a block, with `like`'s dtype; throws python_error if the framework refuses.
    virtual nanobind::object make(nanobind::handle like, Shape shape, Block&& block) const = 0;
};

/// Returns the framework of which this is an array, or null. Types derived from its array type do not count, because
/// their elements may have another meaning.
const Framework* framework_of(nanobind::handle object);

/// The arrays of a call.
struct ArrayPair {
    const Framework* framework;
    ArrayView input;
    std::optional<ArrayView> output;  ///< nothing if it must be made

    const Shape* output_shape() const { return output ? &output->shape : nullptr; }
};

/// Returns nothing unless both are arrays of one framework and dtype that a call can use directly; `output` may be
/// None.
std::optional<ArrayPair> arrays_given(nanobind::handle input, nanobind::handle output);

/// Registers `framework` for arrays of exactly this type; both live until the process ends.
void add_framework(nanobind::handle type, const Framework& framework);

}  // namespace alltoallv
