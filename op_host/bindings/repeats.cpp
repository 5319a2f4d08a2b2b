// Calls that repeat: what the checks of an earlier call have shown is not looked at again, only the arrays are.
#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/array_call.h"
#include "bindings/bindings.h"
#include "bindings/call_key.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

/// What a front end has made ready for the latest calls of one communicator.
class Repeats {
  public:
    static constexpr size_t limit = 256;  // calls; programs whose counts change with every batch repeat none

    nb::object run(nb::handle what, nb::handle input, nb::object output, double timeout) const {
        if (calls_.empty()) return nb::none();  // as for tensors on devices, which are not asked what they are
        const std::optional<ArrayPair> given = arrays_given(input, output);
        if (!given) return nb::none();
        // Held, since another thread may drop what was kept while this one waits for its peers.
        const std::shared_ptr<const ArrayCall> call = find(what, *given);
        return call == nullptr ? nb::none() : call->run(*given, std::move(output), timeout);
    }

    void keep(nb::handle what, nb::handle input, nb::handle output, ArrayCall call) {
        const std::optional<ArrayPair> given = arrays_given(input, output);
        if (!given) return;
        KeyWriter key;
        key.add(*given);
        if (!key.add(what)) return;
        if (calls_.size() >= limit) clear();
        calls_.insert_or_assign(key.words(), Kept{std::make_shared<const ArrayCall>(std::move(call)), key.take_held()});
    }

    /// Objects of Python are dropped last: that may run anything.
    void clear() { const auto dropped = std::exchange(calls_, {}); }

    size_t size() const { return calls_.size(); }

  private:
    struct Kept {
        std::shared_ptr<const ArrayCall> call;
        std::vector<nb::object> held;
    };

    std::shared_ptr<const ArrayCall> find(nb::handle what, const ArrayPair& given) const {
        KeyWriter key;
        key.add(given);
        if (!key.add(what)) return nullptr;
        const auto found = calls_.find(key.words());
        return found == calls_.end() ? nullptr : found->second.call;
    }

    std::unordered_map<CallKey, Kept, CallKeyHash> calls_;
};

}  // namespace

void bind_repeats(nb::module_& m) {
    auto repeats =
        nb::class_<Repeats>(m, "Repeats", "What a front end has made ready for the latest calls of one communicator.");
    repeats.def(nb::init<>())
        .def("run", &Repeats::run, nb::arg("what"), nb::arg("input"), nb::arg("output").none(),
             nb::arg("timeout") = -1.0,
             nb::sig("def run(self, what: object, input: object, output: object | None, timeout: float = -1.0) -> "
                     "typing.Any | None"),
             "Runs the call kept under an equal `what` for arrays of the same dtypes and shapes, and returns the "
             "output, made here if it is None; None, with nothing done, if there is none or these are no arrays for "
             "it.")
        .def("keep", &Repeats::keep, nb::arg("what"), nb::arg("input"), nb::arg("output").none(), nb::arg("call"),
             "A call without gaps that has passed its checks. what: the operator and the arguments that are no arrays, "
             "all that the checks depend on beside the arrays' dtypes and shapes; input, output: as they were given.")
        .def("clear", &Repeats::clear)
        .def("__len__", &Repeats::size);
    repeats.attr("limit") = Repeats::limit;
}

}  // namespace alltoallv
