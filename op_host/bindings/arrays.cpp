#include "bindings/arrays.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "bindings/guarded.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

struct Known {
    PyTypeObject* type;
    const Framework* framework;
};

std::vector<Known> registered;  // changed under the GIL

}  // namespace

const Framework* framework_of(nb::handle object) {
    for (const Known& each : registered)
        if (Py_TYPE(object.ptr()) == each.type) return each.framework;
    return nullptr;
}

ArrayPair::ArrayPair(nb::handle source, nb::handle target, Use use) : has_output(!target.is_none()) {
    const Framework* const registered = framework_of(source);
    if (registered == nullptr || (has_output && framework_of(target) != registered)) return;
    if (!registered->input(source, input, copy, use == Use::tracked)) {
        wants_gradient = use == Use::asks && registered->wants_gradient(source);
        return;
    }
    if (has_output && !registered->output(target, output)) {
        gapped = use == Use::gaps && registered->gaps(target, output);
        if (!gapped) return;
    }
    if (has_output && output.dtype != input.dtype) return;
    framework = registered;
}

void ArrayPair::keep_shapes() {
    for (ArrayView* const each : {&input, &output}) {
        auto dims = std::make_unique<int64_t[]>(each->shape.size());
        std::ranges::copy(each->shape, dims.get());
        each->shape = {dims.get(), each->shape.size()};
        each->kept = std::move(dims);
    }
}

bool ArrayPair::operator==(const ArrayPair& other) const {
    const auto same = [](const ArrayView& a, const ArrayView& b, bool copied = false) {
        return a.dtype == b.dtype && (copied || a.address == b.address) && std::ranges::equal(a.shape, b.shape);
    };
    return framework == other.framework && has_output == other.has_output &&
           same(input, other.input, copy.is_valid() && other.copy.is_valid()) &&
           (!has_output || same(output, other.output));
}

Target target_of(const ArrayPair& arrays, nb::handle like, nb::object output, const Request& request) {
    if (arrays.has_output && !arrays.gapped) return {std::move(output), arrays.output.address};
    const size_t bytes = static_cast<size_t>(element_count(request.shape)) * size_of(arrays.input.dtype);
    Block block = Arena::instance().allocate(bytes);
    if (request.has_gaps) std::memset(block.data(), 0, bytes);
    const auto address = reinterpret_cast<uintptr_t>(block.data());
    return {arrays.framework->make(like, request.shape, std::move(block)), address};
}

bool any_watched() {
    return std::ranges::any_of(registered, [](const Known& each) { return each.framework->watched(); });
}

void add_framework(nb::handle type, const Framework& framework) {
    auto* const added = reinterpret_cast<PyTypeObject*>(type.ptr());
    const auto entry = std::ranges::find(registered, added, &Known::type);
    if (entry == registered.end())
        registered.push_back({added, &framework});
    else
        entry->framework = &framework;
}

}  // namespace alltoallv
