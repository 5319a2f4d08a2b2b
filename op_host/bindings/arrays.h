// Reads the frameworks' arrays in place.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>

#include "runtime/base/dtype.h"
#include "runtime/core/request.h"
#include "runtime/shm/arena.h"

namespace alltoallv {

/// A contiguous array in host memory.
struct ArrayView {
    DType dtype{};
    Shape shape{};    ///< lives as long as the array, or `kept`
    size_t size = 0;  ///< elements
    uintptr_t address = 0;
    std::unique_ptr<const int64_t[]> kept = nullptr;  ///< owns the shape, if the array does not store it in C

    ByteRange bytes() const { return {address, size * size_of(dtype)}; }
};

/// Reads arrays in place. The results are filled and not returned, which a small call would notice.
class Framework {
  public:
    virtual ~Framework() = default;

    /// Returns false unless the array consists of contiguous elements of a dtype that the core knows.
    virtual bool view(nanobind::handle array, ArrayView& seen) const = 0;

    /// Also returns false if the framework must be asked or informed about the use of the array.
    virtual bool input(nanobind::handle array, ArrayView& seen) const = 0;

    /// Also returns false if the array must not be written to.
    virtual bool output(nanobind::handle array, ArrayView& seen) const = 0;

    /// Makes an array of that shape over a block, with `like`'s dtype; throws python_error if the framework refuses.
    virtual nanobind::object make(nanobind::handle like, Shape shape, Block&& block) const = 0;
};

/// Returns the framework of which this is an array, or null. Types derived from its array type do not count, because
/// their elements may have another meaning.
const Framework* framework_of(nanobind::handle object);

/// The arrays of a call.
struct ArrayPair {
    const Framework* framework = nullptr;  ///< null if a call cannot use these arrays directly
    ArrayView input;
    ArrayView output;
    bool has_output = false;  ///< else it must be made

    /// `output` may be None; both must be arrays of one framework and dtype.
    ArrayPair(nanobind::handle input, nanobind::handle output);

    explicit operator bool() const { return framework != nullptr; }
    /// Copies the shapes, which a caller's code might change.
    void keep_shapes();
    /// True if these are the same arrays, in the same memory.
    bool operator==(const ArrayPair& other) const;
    const Shape* output_shape() const { return has_output ? &output.shape : nullptr; }
};

/// Registers `framework` for arrays of exactly this type; both live until the process ends.
void add_framework(nanobind::handle type, const Framework& framework);

}  // namespace alltoallv
