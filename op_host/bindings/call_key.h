/// \file call_key.h
/// \brief What two calls have in common that differ in nothing but where their data lie.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/array_call.h"

namespace alltoallv {

/// Words that no other key begins with.
using CallKey = std::vector<int64_t>;

struct CallKeyHash {
    size_t operator()(const CallKey& words) const {
        uint64_t hash = words.size();
        for (const int64_t word : words) hash = std::rotl(hash ^ static_cast<uint64_t>(word), 23) * 0x9E3779B97F4A7C15U;
        return hash ^ hash >> 32;
    }
};

/// Writes one key. Under the GIL.
class KeyWriter {
  public:
    KeyWriter() : words_(std::exchange(spare, {})) { words_.clear(); }
    ~KeyWriter() { spare = std::move(words_); }
    KeyWriter(const KeyWriter&) = delete;
    KeyWriter& operator=(const KeyWriter&) = delete;

    const CallKey& words() const { return words_; }

    void add(const ArrayPair& given) {
        add(given.framework);
        words_.push_back(static_cast<int64_t>(given.input.dtype));
        add(given.input.shape);
        words_.push_back(given.output.has_value());
        if (given.output) add(given.output->shape);
    }

    /// Arguments that are no arrays: numbers, text, lists of numbers, tuples of all these by their value; anything else
    /// by what it is, if it can be a dict's key and is no sequence, which might change. False for what has no key.
    bool add(nanobind::handle value) {  // NOLINT(misc-no-recursion)
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
            const nanobind::object number = nanobind::steal(PyNumber_Index(it));
            return number.is_valid() ? add_integer(number) : refuse();
        }
        if (Py_TYPE(it)->tp_hash == PyObject_HashNotImplemented || PySequence_Check(it) == 1) return false;
        add(Kind::object, reinterpret_cast<intptr_t>(it));
        if (!lasts) held_.push_back(nanobind::borrow(value));
        return true;
    }

    /// What the key names by where it lies, to live as long as the key.
    std::vector<nanobind::object> take_held() { return std::move(held_); }

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

    bool add(Kind kind, std::string_view text) {
        add(kind, static_cast<int64_t>(text.size()));
        const size_t begin = words_.size();
        words_.resize(begin + (text.size() + sizeof(int64_t) - 1) / sizeof(int64_t));
        std::ranges::copy(text, reinterpret_cast<char*>(words_.data() + begin));
        return true;
    }

    /// False, with nothing added, for a list or tuple of anything else.
    bool add_integers(PyObject* list) {
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
            const nanobind::object element = nanobind::borrow(PySequence_Fast_GET_ITEM(list, i));
            const bool within = PyList_CheckExact(element.ptr()) || PyTuple_CheckExact(element.ptr());
            if ((within && PyList_CheckExact(list)) || !add(element)) return false;  // lists may hold themselves
        }
        return true;
    }

    bool add_integer(nanobind::handle number) {
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

    static inline CallKey
        spare;  // changed under the GIL; a key within a key, of an element's __index__, has words of its own
    CallKey words_;
    std::vector<nanobind::object> held_;
};

}  // namespace alltoallv
