// Reads MindSpore's CPU tensors by their type's Python attributes, since this extension is built without MindSpore.
#include <string_view>

#include "bindings/arrays.h"
#include "bindings/bindings.h"

namespace alltoallv {
namespace {

bool is_true(nb::handle result) {
    return PyObject_IsTrue(result.ptr()) == 1;
}

class MindsporeTensors : public Framework {
  public:
    MindsporeTensors(nb::handle type, nb::handle executor, nb::dict dtypes, nb::object at_once, nb::object from_block)
        : data_ptr_(type.attr("_data_ptr")),
          is_contiguous_(type.attr("is_contiguous")),
          contiguous_(type.attr("contiguous")),
          sync_(executor.attr("sync")),
          enable_grad_(executor.attr("enable_grad")),
          grad_flag_(executor.attr("grad_flag")),
          at_once_(std::move(at_once)),
          from_block_(std::move(from_block)) {
        for (const auto [dtype, name] : dtypes)
            if (const auto table = table_dtype(nb::cast<std::string_view>(name)))
                dtypes_.push_back({nb::borrow(dtype), *table});
    }

    bool view(nb::handle array, ArrayView& seen) const override {
        if (!is_true(is_contiguous_(array))) return false;
        const nb::object own_dtype = nb::getattr(array, dtype_), dims = nb::getattr(array, shape_);
        for (const auto& [object, dtype] : dtypes_) {
            if (!object.is(own_dtype)) continue;
            const auto rank = static_cast<size_t>(nb::len(dims));
            auto kept = std::make_unique<int64_t[]>(rank);
            for (size_t i = 0; i < rank; ++i) kept[i] = nb::cast<int64_t>(dims[i]);
            const Shape shape(kept.get(), rank);
            const auto size = static_cast<size_t>(element_count(shape));
            const auto address = size == 0 ? 0 : nb::cast<uintptr_t>(data_ptr_(array));
            seen = {dtype, shape, size, address, std::move(kept)};
            return true;
        }
        return false;
    }

    /// First waits for all computations that Python has requested: MindSpore may still have to write this tensor, or to
    /// read the memory of the output.
    bool input(nb::handle array, ArrayView& seen, nb::object& copy, bool /*tracked*/) const override {
        if (!is_true(at_once_()) || wants_grad()) return false;
        if (!is_true(is_contiguous_(array))) copy = contiguous_(array);
        sync_();
        return view(copy.is_valid() ? copy : array, seen);
    }

    bool output(nb::handle array, ArrayView& seen) const override { return !wants_grad() && view(array, seen); }

    nb::object make(nb::handle like, Shape shape, Block&& block) const override {
        nb::list dims;
        for (const int64_t n : shape) dims.append(n);
        return from_block_(nb::cast(std::move(block)), dims, nb::getattr(like, dtype_));
    }

  private:
    /// True inside a gradient function; a tensor's own flag stays set after one, and a Parameter's always is.
    bool wants_grad() const { return is_true(enable_grad_()) && is_true(grad_flag_()); }

    static nb::object interned(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }

    struct Row {
        nb::object object;
        DType dtype;
    };

    const nb::object dtype_ = interned("_dtype"), shape_ = interned("_shape");
    nb::object data_ptr_, is_contiguous_, contiguous_, sync_, enable_grad_, grad_flag_, at_once_, from_block_;
    std::vector<Row> dtypes_;
};

}  // namespace

void bind_mindspore_tensors(nb::module_& m) {
    m.def(
        "add_mindspore",
        [](nb::object type, nb::handle executor, nb::dict dtypes, nb::object at_once, nb::object from_block) {
            const auto* const tensors =
                new MindsporeTensors(type, executor, dtypes, std::move(at_once), std::move(from_block));
            add_framework(type.release(), *tensors);
        },
        "type"_a, "executor"_a, "dtypes"_a, "at_once"_a, "from_block"_a,
        "Makes calls on mindspore.Tensor repeatable. `executor` computes what Python asks for, `dtypes` has the core's "
        "name of each; `at_once` shows whether tensors may be read when Python calls, and `from_block(block, shape, "
        "dtype)` makes one.");
}

}  // namespace alltoallv
