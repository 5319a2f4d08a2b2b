#include "bindings/arrays.h"

#include <algorithm>
#include <vector>

namespace nb = nanobind;

namespace alltoallv {
namespace {

struct Known {
    PyTypeObject* type;
    const Framework* framework;
};

std::vector<Known> known;  // changed under the GIL

}  // namespace

const Framework* framework_of(nb::handle object) {
    for (const Known& each : known)
        if (Py_TYPE(object.ptr()) == each.type) return each.framework;
    return nullptr;
}

void add_framework(nb::handle type, const Framework& framework) {
    auto* const added = reinterpret_cast<PyTypeObject*>(type.ptr());
    const auto found = std::ranges::find(known, added, &Known::type);
    if (found == known.end()) {
        known.push_back({added, &framework});
    } else {
        found->framework = &framework;
    }
}

}  // namespace alltoallv
