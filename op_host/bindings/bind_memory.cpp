// Binds blocks of the arena as Python buffers.
#include "bindings/bindings.h"
#include "runtime/shm/arena.h"

namespace alltoallv {
namespace {

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Block& block = *nb::inst_ptr<Block>(self);
    return PyBuffer_FillInfo(view, self, block.data(), static_cast<Py_ssize_t>(block.bytes()), 0, flags);
}

PyType_Slot block_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

void bind_memory(nb::module_& m) {
    nb::class_<Block>(m, "Block", nb::type_slots(block_slots),
                      "Memory of one output; returns to the arena when the last view of it dies.")
        .def_prop_ro("address", [](const Block& block) { return reinterpret_cast<uintptr_t>(block.data()); })
        .def_prop_ro("nbytes", [](const Block& block) { return block.bytes(); })
        .def_prop_ro(
            "shared", [](const Block& block) { return block.shared(); },
            "False when the memory is private because the budget is used up.");
    m.def(
        "allocate", [](size_t bytes) { return Block(Arena::instance().allocate(bytes)); }, "nbytes"_a,
        "A block of the arena, not initialized.");
    m.def(
        "buffer_address",
        [](nb::handle object) {
            Py_buffer view;
            if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_STRIDES) != 0) throw nb::python_error();
            const auto address = reinterpret_cast<uintptr_t>(view.buf);
            PyBuffer_Release(&view);
            return address;
        },
        "object"_a, "Address of the first element: several times quicker than ndarray.ctypes.");
    m.def(
        "in_arena",
        [](uintptr_t address, size_t bytes) {
            return Arena::instance().locate(pointer(address), bytes).segment() != 0;
        },
        "address"_a, "nbytes"_a, "Whether peers can reach this memory of ours.");
}

}  // namespace alltoallv
