// Python's texts as the core's. Those that are not UTF-8 (names of files, what a program says of its objects) lose no
// more than what cannot be said.
#pragma once

#include <string>

#include "bindings/bindings.h"

namespace alltoallv {

/// Returns a str, with escapes for what has no UTF-8.
inline std::string utf8(nb::handle text) {
    const nb::object encoded = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
    if (!encoded.is_valid()) throw nb::python_error();
    const auto bytes = nb::borrow<nb::bytes>(encoded);
    return {bytes.c_str(), bytes.size()};
}

/// An exception's type and text; nanobind's `what()` needs UTF-8.
struct Words {
    std::string type, text;
};

inline Words words_of(nb::handle error) {
    const GilHeld gil;
    Words words{utf8(nb::object(error.type().attr("__name__"))), "an error without words"};
    try {
        words.text = utf8(nb::str(error));
    } catch (nb::python_error& another) {
        another.discard_as_unraisable("the text of an error");
    }
    return words;
}

}  // namespace alltoallv
