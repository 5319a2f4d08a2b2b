// Maps errors of the core to the classes of alltoallv.errors, and checks for Ctrl-C while the core waits.
#include "bindings/bindings.h"
#include "bindings/guarded.h"
#include "runtime/base/resources.h"
#include "runtime/control/deadlock.h"
#include "runtime/core/call_queue.h"
#include "runtime/core/hooks.h"

namespace alltoallv {
namespace {

constexpr const char* class_names[] = {
    "InvalidParamError", "InvalidTensorError",      "PeerMismatchError",  "PeerLostError", "CommTimeoutError",
    "HcclError",         "BackendUnavailableError", "ValueOverflowError", "DeadlockError", "ResourceError"};

/// Converts text that may come from a peer and so may not be UTF-8.
nb::object text_of(std::string_view text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

const char* class_of(const Error& error) {
    return is_memory(error) ? "OutOfMemoryError" : class_names[static_cast<size_t>(error.kind())];
}

void set(const Error& error) {
    try {
        // Imported here, because the module itself must load without the package.
        const nb::object type = nb::module_::import_("alltoallv.errors").attr(class_of(error)),
                         text = text_of(error.what());
        const nb::object value = nb::steal(enter_python([&] {  // the classes' constructor is Python code
            return PyObject_CallFunction(type.ptr(), "Oi", text.ptr(), static_cast<int>(error.code()));
        }));
        if (!value.is_valid()) return;
        if (dynamic_cast<const UnmetFailure*>(&error) != nullptr) value.attr("unmet") = true;
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

/// False on the core's own threads, and while the interpreter shuts down: Python must not be entered then.
bool python_is_reachable() {
    return !CallQueue::on_worker() && Py_IsInitialized() != 0;
}

/// Returns the globals of a module of Python that has been imported, else none. By these its frames are known: files
/// may have any name, and other libraries a `threading.py` of their own.
nb::object globals_of(const char* module) {
    const nb::object entry = nb::module_::import_("sys").attr("modules").attr("get")(module);
    return entry.is_none() ? entry : entry.attr("__dict__");
}

/// True if a thread waits, without limit, for another thread of the program: an idle pool, a join, a lock's owner.
bool waits_for_threads(nb::handle frame, nb::handle threading, nb::handle pool) {
    const nb::object globals = frame.attr("f_globals");
    const auto is_in = [&](const char* function) {
        return PyUnicode_CompareWithASCIIString(nb::object(frame.attr("f_code").attr("co_name")).ptr(), function) == 0;
    };
    if (globals.is(pool)) return is_in("_worker");
    if (!globals.is(threading) || !(is_in("wait") || is_in("join") || is_in("_wait_for_tstate_lock"))) return false;
    const nb::object limit = frame.attr("f_locals").attr("get")("timeout");
    return limit.is_none() || nb::cast<double>(limit) < 0;
}

/// Looks for deadlocks. The threads of the program that may call a collective are those that run Python. Such a look
/// is no concern of the wait: what cannot be read counts as a thread that may go on.
void look_for_deadlocks() {
    std::vector<uint64_t> callers;
    try {
        const auto frames = nb::cast<nb::dict>(nb::module_::import_("sys").attr("_current_frames")());
        const nb::object threading = globals_of("threading"), pool = globals_of("concurrent.futures.thread");
        for (const auto& [thread, frame] : frames) {
            bool waits = false;
            try {
                waits = waits_for_threads(frame, threading, pool);
            } catch (const std::exception&) {  // its locals may hold something that is not a number
            }
            if (!waits) callers.push_back(nb::cast<uint64_t>(thread));
        }
    } catch (const std::exception&) {  // no memory, or a program that has replaced a part of `sys`
        return;
    }
    Deadlocks::instance().look(callers);
}

/// True if this is an error of torch for want of memory: on CPU that has no class of its own.
bool is_memory_of_torch(std::string_view type, std::string_view text) {
    return type == "OutOfMemoryError" ||
           (type == "RuntimeError" && text.find("can't allocate memory") != std::string_view::npos);
}

}  // namespace

Error error_of(nb::handle error) {
    const auto is_a = [&](nb::handle type) { return PyErr_GivenExceptionMatches(error.ptr(), type.ptr()) != 0; };
    const auto [type, text] = words_of(error);
    if (is_a(PyExc_MemoryError) || is_memory_of_torch(type, text))
        return resource_error(5003, text.empty() ? type : text);
    if (is_a(nb::module_::import_("alltoallv.errors").attr("AllToAllVError")))
        for (size_t i = 0; i < std::size(class_names); ++i)
            if (type == class_names[i])
                return {static_cast<ErrorClass>(i), static_cast<ErrorType>(nb::cast<int>(error.attr("code"))), text};
    return invalid_param(1030, type, ": ", text);
}

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

void bind_errors(nb::module_&) {
    nb::register_exception_translator(translate);
    hooks().poll = [] {
        if (!python_is_reachable()) return;
        const GilHeld gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (Deadlocks::instance().due()) look_for_deadlocks();
    };
    hooks().warn = [](const std::string& message) {
        if (!python_is_reachable()) {
            std::fprintf(stderr, "alltoallv: %s\n", message.c_str());
            return;
        }
        const GilHeld gil;
        try {
            nb::module_::import_("logging").attr("getLogger")("alltoallv").attr("warning")("%s", text_of(message));
        } catch (nb::python_error& error) {
            // A broken handler must not end the operator; Ctrl-C must.
            if (error.matches(PyExc_KeyboardInterrupt)) throw;
            error.discard_as_unraisable("the warning of a late peer");
        }
    };
    hooks().unlocked = [](const std::function<void()>& call) {
        if (!python_is_reachable()) return call();
        const GilHeld held;  // the limited API cannot tell if the caller holds it
        const GilReleased released;
        call();
    };
}

}  // namespace alltoallv
