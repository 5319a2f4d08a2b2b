// Errors of the core become the classes of alltoallv.errors, and a waiting core looks for Ctrl-C.
#include <nanobind/stl/string.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "core/call_queue.h"
#include "core/hooks.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

constexpr const char* class_names[] = {"InvalidParamError",       "InvalidTensorError", "PeerMismatchError",
                                       "PeerLostError",           "CommTimeoutError",   "HcclError",
                                       "BackendUnavailableError", "ValueOverflowError"};

void set(const Error& error) {
    try {
        // Imported here: the module itself must load without the package.
        nb::object type = nb::module_::import_("alltoallv.errors").attr(class_names[static_cast<size_t>(error.kind())]);
        nb::object value = type(error.what(), static_cast<int>(error.code()));
        PyErr_SetObject(type.ptr(), value.ptr());
    } catch (nb::python_error& another) {
        another.restore();
    }
}

void translate(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const Error& error) {
        set(error);
    }
}

/// Python must not be entered from the core's own threads, nor while the interpreter goes down.
bool python_is_reachable() {
    return !CallQueue::on_worker() && Py_IsInitialized() != 0;
}

}  // namespace

void set_python_error() {
    try {
        throw;
    } catch (const Error& error) {
        set(error);
    } catch (nb::python_error& error) {
        error.restore();
    } catch (const nb::builtin_exception& error) {
        PyErr_SetString(error.type() == nb::exception_type::type_error ? PyExc_TypeError : PyExc_RuntimeError,
                        error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

void bind_errors(nb::module_& m) {
    nb::register_exception_translator(translate);
    hooks().poll = [] {
        if (!python_is_reachable()) return;
        const nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    };
    hooks().warn = [](const std::string& message) {
        if (!python_is_reachable()) {
            std::fprintf(stderr, "alltoallv: %s\n", message.c_str());
            return;
        }
        const nb::gil_scoped_acquire gil;
        try {
            nb::module_::import_("logging").attr("getLogger")("alltoallv").attr("warning")("%s", message);
        } catch (nb::python_error& error) {
            // A broken handler must not end the operator; Ctrl-C must.
            if (error.matches(PyExc_KeyboardInterrupt)) throw;
            error.discard_as_unraisable("the warning of a late peer");
        }
    };
    nb::list names;
    for (const char* name : class_names) names.append(name);
    m.attr("error_classes") = names;
}

}  // namespace alltoallv
