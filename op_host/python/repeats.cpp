// Calls that repeat: what the checks of an earlier call have shown is not looked at again, only the arrays are.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/hot.h"
#include "python/array_call.h"
#include "python/bindings.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

using Words = std::vector<int64_t>;

/// What two calls have in common that differ in nothing but where the data lie, as words that no other key begins with.
class KeyWriter {
  public:
    KeyWriter() : words_(std::exchange(spare, {})) { words_.clear(); }
    ~KeyWriter() { spare = std::move(words_); }
    KeyWriter(const KeyWriter&) = delete;
    KeyWriter& operator=(const KeyWriter&) = delete;

    const Words& words() const { return words_; }

    ALLTOALLV_HOT void add(const ArrayPair& given) {
        add(given.framework);
        words_.push_back(static_cast<int64_t>(given.input.dtype));
        add(given.input.shape);
        words_.push_back(given.output.has_value());
        if (given.output) add(given.output->shape);
    }

    /// Arguments that are no arrays: numbers, text, lists of numbers, tuples of all these by their value; anything else
    /// by what it is, if it can be a dict's key and is no sequence, which might change. False for what has no key.
    ALLTOALLV_HOT bool add(nb::handle value) {  // NOLINT(misc-no-recursion)
        PyObject* const it = value.ptr();
        if (PyLong_CheckExact(it)) return add_integer(value);
        if (PyUnicode_CheckExact(it)) {
            Py_ssize_t size = 0;
            const char* const text = PyUnicode_AsUTF8AndSize(it, &size);
            return text == nullptr ? refuse() : add(Kind::text, {text, static_cast<size_t>(size)});
        }
        if (PyList_CheckExact(it) || PyTuple_CheckExact(it)) return add_integers(it) || add_elements(it);
        if (PyBytes_CheckExact(it))
            return add(Kind::bytes, {PyBytes_AS_STRING(it), static_cast<size_t>(PyBytes_GET_SIZE(it))});
        if (PyFloat_CheckExact(it)) {
            add(Kind::real, std::bit_cast<int64_t>(PyFloat_AS_DOUBLE(it)));
            return true;
        }
        const bool lasts = it == Py_None || PyBool_Check(it);
        if (!lasts && PyIndex_Check(it) != 0) {  // integers of NumPy, enumerations
            const nb::object number = nb::steal(PyNumber_Index(it));
            return number.is_valid() ? add_integer(number) : refuse();
        }
        if (Py_TYPE(it)->tp_hash == PyObject_HashNotImplemented || PySequence_Check(it) == 1) return false;
        add(Kind::object, reinterpret_cast<intptr_t>(it));
        if (!lasts) held_.push_back(nb::borrow(value));
        return true;
    }

    /// What the key names by where it lies, to live as long as the key.
    std::vector<nb::object> take_held() { return std::move(held_); }

  private:
    enum class Kind : int64_t { integer, integers, text, list, bytes, real, object };

    static bool refuse() {
        PyErr_Clear();
        return false;
    }

    void add(Kind kind, int64_t word) {
        words_.push_back(static_cast<int64_t>(kind));
        words_.push_back(word);
    }

    ALLTOALLV_HOT bool add(Kind kind, std::string_view text) {
        add(kind, static_cast<int64_t>(text.size()));
        const size_t begin = words_.size();
        words_.resize(begin + (text.size() + sizeof(int64_t) - 1) / sizeof(int64_t));
        std::ranges::copy(text, reinterpret_cast<char*>(words_.data() + begin));
        return true;
    }

    /// False, with nothing added, for a list or tuple of anything else.
    ALLTOALLV_HOT bool add_integers(PyObject* list) {
        const auto size = static_cast<size_t>(PySequence_Fast_GET_SIZE(list));
        PyObject* const* const elements = PySequence_Fast_ITEMS(list);
        const size_t begin = words_.size();
        words_.resize(begin + 2 + size);
        words_[begin] = static_cast<int64_t>(Kind::integers);
        words_[begin + 1] = static_cast<int64_t>(size);
        size_t done = 0;
        for (int overflow = 0; done < size; ++done) {
            if (!PyLong_CheckExact(elements[done])) break;
            words_[begin + 2 + done] = PyLong_AsLongLongAndOverflow(elements[done], &overflow);
            if (overflow != 0) break;
        }
        if (done == size) return true;
        words_.resize(begin);
        return false;
    }

    bool add_elements(PyObject* list) {  // NOLINT(misc-no-recursion)
        const Py_ssize_t size = PySequence_Fast_GET_SIZE(list);
        add(Kind::list, size);
        for (Py_ssize_t i = 0; i < size; ++i) {
            if (i >= PySequence_Fast_GET_SIZE(list)) return false;  // an element's __index__ has changed the list
            const nb::object element = nb::borrow(PySequence_Fast_GET_ITEM(list, i));
            const bool within = PyList_CheckExact(element.ptr()) || PyTuple_CheckExact(element.ptr());
            if ((within && PyList_CheckExact(list)) || !add(element)) return false;  // lists may hold themselves
        }
        return true;
    }

    bool add_integer(nb::handle number) {
        int overflow = 0;
        const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
        add(Kind::integer, value);
        return overflow == 0;
    }

    void add(const Framework* framework) { words_.push_back(reinterpret_cast<intptr_t>(framework)); }

    void add(std::span<const int64_t> shape) {
        words_.push_back(static_cast<int64_t>(shape.size()));
        words_.insert(words_.end(), shape.begin(), shape.end());
    }

    static Words spare;  // changed under the GIL; a key within a key, of an element's __index__, has words of its own
    Words words_;
    std::vector<nb::object> held_;
};

Words KeyWriter::spare;

struct Hash {
    size_t operator()(const Words& words) const {
        uint64_t hash = words.size();
        for (const int64_t word : words) hash = std::rotl(hash ^ static_cast<uint64_t>(word), 23) * 0x9E3779B97F4A7C15U;
        return hash ^ hash >> 32;
    }
};

/// What a front end has made ready for the latest calls of one communicator.
class Repeats {
  public:
    static constexpr size_t limit = 256;  // calls; programs whose counts change with every batch repeat none

    ALLTOALLV_HOT nb::object run(nb::handle what, nb::handle input, nb::object output, double timeout) const {
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

    ALLTOALLV_HOT std::shared_ptr<const ArrayCall> find(nb::handle what, const ArrayPair& given) const {
        KeyWriter key;
        key.add(given);
        if (!key.add(what)) return nullptr;
        const auto found = calls_.find(key.words());
        return found == calls_.end() ? nullptr : found->second.call;
    }

    std::unordered_map<Words, Kept, Hash> calls_;
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
