#include "bindings/counts.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/text.h"
#include "runtime/base/error.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

/// Returns the number of `values` if they are integers that can be read in place; `into` takes at most its own size.
std::optional<size_t> read_array(nb::handle values, std::span<int64_t> into) {
    const Framework* const framework = framework_of(values);
    ArrayView view;
    if (framework == nullptr || !framework->view(values, view) || view.shape.size() != 1) return std::nullopt;
    const size_t count = std::min(view.size, into.size());
    if (view.dtype == DType::int64) {
        std::copy_n(reinterpret_cast<const int64_t*>(view.address), count, into.begin());
    } else if (view.dtype == DType::int32) {
        std::copy_n(reinterpret_cast<const int32_t*>(view.address), count, into.begin());
    } else {
        return std::nullopt;
    }
    return view.size;
}

/// Reads a list or tuple of plain integers in the same way.
std::optional<size_t> read_list(PyObject* values, std::span<int64_t> into) {
    const bool is_list = PyList_CheckExact(values);
    if (!is_list && !PyTuple_CheckExact(values)) return std::nullopt;
    const auto size = static_cast<size_t>(is_list ? NB_LIST_GET_SIZE(values) : NB_TUPLE_GET_SIZE(values));
    for (size_t i = 0; i < std::min(size, into.size()); ++i) {
        const auto at = static_cast<Py_ssize_t>(i);
        PyObject* const item = is_list ? NB_LIST_GET_ITEM(values, at) : NB_TUPLE_GET_ITEM(values, at);
        int overflow = 0;
        if (!PyLong_CheckExact(item)) return std::nullopt;
        into[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow != 0) return std::nullopt;
    }
    return size == into.size() ? std::optional(size) : std::nullopt;  // read_integers reports what is wrong
}

/// Returns false if `number` is an integer that does not fit 64 bits. Throws python_error if it is not an integer.
bool read_integer(PyObject* number, int64_t& value) {
    int overflow = 0;
    if (PyLong_CheckExact(number)) {
        value = PyLong_AsLongLongAndOverflow(number, &overflow);
        return overflow == 0;
    }
    if (PyBool_Check(number)) throw nb::type_error("a bool is no count");
    const nb::object index = nb::steal(PyNumber_Index(number));
    if (!index.is_valid()) throw nb::python_error();
    value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    return overflow == 0;
}

/// Converts an array of any kind to lists and numbers.
nb::object plain(nb::handle values) {
    const bool has_method = !PyList_CheckExact(values.ptr()) && nb::hasattr(values, "tolist");
    return has_method ? values.attr("tolist")() : nb::borrow(values);
}

/// Formats a value as Python does.
std::string text_of(nb::handle value) {
    return utf8(nb::repr(value));
}

/// Reads any number of integers; returns nothing if these are not integers.
std::optional<std::vector<int64_t>> read_integers(const char* name, nb::handle values) {
    if (PyDict_Check(values.ptr()) != 0 || PyAnySet_Check(values.ptr()) != 0) return std::nullopt;  // keys, in no order
    std::vector<int64_t> read;
    try {
        for (const nb::handle each : nb::list(plain(values)))
            if (!read_integer(each.ptr(), read.emplace_back()))
                throw invalid_param(1052, name, " is ", text_of(plain(values)), ", expected 64-bit integers");
        return read;
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_TypeError)) throw;
    } catch (const nb::builtin_exception&) {
    }
    return std::nullopt;
}

}  // namespace

bool reads_in_place(nb::handle values) {
    if (values.is_none()) return true;
    const bool is_list = PyList_CheckExact(values.ptr());
    if (is_list || PyTuple_CheckExact(values.ptr())) {
        const Py_ssize_t size = is_list ? NB_LIST_GET_SIZE(values.ptr()) : NB_TUPLE_GET_SIZE(values.ptr());
        for (Py_ssize_t i = 0; i < size; ++i)
            if (!PyLong_CheckExact(is_list ? NB_LIST_GET_ITEM(values.ptr(), i) : NB_TUPLE_GET_ITEM(values.ptr(), i)))
                return false;
        return true;
    }
    const Framework* const framework = framework_of(values);
    ArrayView view;
    return framework != nullptr && framework->view(values, view) &&
           (view.dtype == DType::int64 || view.dtype == DType::int32);
}

void read_counts(const char* name, nb::handle values, std::span<int64_t> counts) {
    std::optional<size_t> count = read_list(values.ptr(), counts);
    if (!count) count = read_array(values, counts);
    if (!count) {
        const std::optional<std::vector<int64_t>> read = read_integers(name, values);
        if (!read)
            throw invalid_param(1053, name, " is ", text_of(plain(values)), ", expected ", counts.size(),
                                " integers, one per rank");
        count = read->size();
        std::copy_n(read->begin(), std::min(*count, counts.size()), counts.begin());
    }
    if (*count != counts.size())
        throw invalid_param(1054, name, " has ", *count, " entries, expected ", counts.size(), ", one per rank");
}

double read_timeout(nb::handle timeout) {
    if (timeout.is_none()) return -1.0;
    double seconds = 0;
    if (PyFloat_CheckExact(timeout.ptr())) {
        seconds = PyFloat_AsDouble(timeout.ptr());
    } else if (PyNumber_Check(timeout.ptr()) != 0) {
        seconds = PyFloat_AsDouble(timeout.ptr());
        if (PyErr_Occurred() != nullptr) PyErr_Clear(), seconds = 0;
    }
    if (!(seconds > 0))
        throw invalid_param(1055, "timeout is ", text_of(timeout), ", expected seconds above 0, or None");
    return seconds;
}

bool read_flag(nb::handle value) {
    const int truth = PyObject_IsTrue(value.ptr());
    if (truth < 0) throw nb::python_error();
    return truth != 0;
}

bool reads_rows(nb::handle unit, size_t dimensions) {
    if (unit.is_none()) return dimensions > 1;
    if (PyUnicode_Check(unit.ptr())) {
        if (PyUnicode_CompareWithASCIIString(unit.ptr(), "row") == 0) return true;
        if (PyUnicode_CompareWithASCIIString(unit.ptr(), "element") == 0) return false;
    }
    throw invalid_param(1056, "unit is ", text_of(unit), ", expected 'element', 'row' or None");
}

Request read_all_to_all_v(int size, Shape input, nb::handle send_counts, nb::handle recv_counts, nb::handle sdispls,
                          nb::handle rdispls, nb::handle unit, const Shape* out) {
    Request request(OpKind::all_to_all_v, size);
    if (reads_rows(unit, input.size())) request.count_rows(input);
    read_counts("send_counts", send_counts, request.send_counts());
    if (!sdispls.is_none()) read_counts("sdispls", sdispls, request.sdispls());
    request.settle_sends(sdispls.is_none());
    request.learns = recv_counts.is_none();
    if (request.learns) {
        const char* const name = !rdispls.is_none() ? "rdispls" : out != nullptr ? "out" : nullptr;
        if (name != nullptr)
            throw invalid_param(1057, name, " is given but recv_counts is None, expected recv_counts with ", name);
    } else {
        read_counts("recv_counts", recv_counts, request.recv_counts());
        if (!rdispls.is_none()) read_counts("rdispls", rdispls, request.rdispls());
        request.settle_receives(rdispls.is_none());
        const Shape tail = Shape(request.shape).subspan(1);
        if (out != nullptr && !tail.empty() &&
            !std::ranges::equal(out->subspan(std::min<size_t>(1, out->size())), tail))
            throw invalid_tensor(2031, ErrorType::INVALID_TENSOR_DIM, std::string_view("out"), " has rows of shape ",
                                 tuple_text(out->subspan(std::min<size_t>(1, out->size()))), ", expected ",
                                 tuple_text(tail), ", as the input has");
    }
    request.check(request.length(input), out == nullptr ? -1 : request.length(*out));
    if (sdispls.is_none()) request.check_covers(request.length(input));
    return request;
}

std::optional<Request> read_all_to_all_nd(int size, int rank, Shape input, nb::handle scatter_dim,
                                          nb::handle gather_dim, nb::handle scatter_sizes, nb::handle gather_sizes) {
    const auto dims = static_cast<int64_t>(input.size());
    const auto dimension = [&](nb::handle given) -> std::optional<size_t> {
        int64_t value = -1;
        if (!PyLong_CheckExact(given.ptr()) || !read_integer(given.ptr(), value)) return std::nullopt;
        if (value < -dims || value >= dims) return std::nullopt;
        return static_cast<size_t>(value < 0 ? value + dims : value);
    };
    const std::optional<size_t> scatter = dimension(scatter_dim), gather = dimension(gather_dim);
    if (!scatter || !gather || *scatter == *gather) return std::nullopt;
    const auto ranks = static_cast<size_t>(size), own = static_cast<size_t>(rank);
    std::vector<int64_t> divided(ranks), joined(ranks, input[*gather]);
    const auto divide = [&](int64_t length, std::vector<int64_t>& sizes) {  // as `_calls.counts.chunks` does
        const int64_t part = length / size + (length % size == 0 ? 0 : 1);
        for (int64_t& each : sizes) length -= each = std::min(part, length);
    };
    const auto read = [&](nb::handle given, std::vector<int64_t>& sizes) {
        int64_t sum = 0;
        if (PyLong_CheckExact(given.ptr())) {
            if (!read_integer(given.ptr(), sum) || sum < 0) return false;
            divide(sum, sizes);
            return true;
        }
        return read_list(given.ptr(), sizes).has_value() &&
               std::ranges::all_of(sizes, [](int64_t n) { return n >= 0; });
    };
    if (scatter_sizes.is_none())
        divide(input[*scatter], divided);
    else if (!read(scatter_sizes, divided))
        return std::nullopt;
    if (!gather_sizes.is_none() && !read(gather_sizes, joined)) return std::nullopt;
    int64_t rest = input[*scatter];
    for (const int64_t part : divided) rest = rest < part ? -1 : rest - part;
    if (rest != 0 || joined[own] != input[*gather]) return std::nullopt;
    return swap_request({*scatter, *gather, divided, joined}, rank, input, contiguous_strides(input));
}

Request read_all_to_all_single(int size, Shape output, Shape input, nb::handle output_split_sizes,
                               nb::handle input_split_sizes, const SplitNames& names) {
    Request request(OpKind::all_to_all_single, size);
    const auto is_none = [](nb::handle sizes) {
        if (sizes.is_none()) return true;
        const Py_ssize_t length = PyObject_Size(sizes.ptr());
        if (length < 0) PyErr_Clear();
        return length == 0;
    };
    const bool no_inputs = is_none(input_split_sizes), no_outputs = is_none(output_split_sizes);
    if (!no_inputs) read_counts(names.input_sizes.c_str(), input_split_sizes, request.send_counts());
    if (!no_outputs) read_counts(names.output_sizes.c_str(), output_split_sizes, request.recv_counts());
    check_splits(request, output, input, no_outputs, no_inputs, names);
    request.check(request.length(input), request.length(output));
    return request;
}

}  // namespace alltoallv
