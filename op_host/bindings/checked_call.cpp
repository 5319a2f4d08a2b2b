#include "bindings/checked_call.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "bindings/counts.h"
#include "bindings/guarded.h"
#include "bindings/lock.h"
#include "op_kernel/cpu/reduce.h"
#include "runtime/base/error.h"
#include "runtime/core/regions.h"

namespace alltoallv {
namespace {

using Counts = std::vector<int64_t>;

nb::object interned(const char* name) {
    return nb::steal(PyUnicode_InternFromString(name));
}

/// What an adapter is asked, as Python's strings.
struct Names {
    nb::object direct = interned("direct"), tensor = interned("tensor"), listed = interned("listed"),
               read = interned("read"), check_output = interned("check_output"), dtype = interned("dtype"),
               region = interned("region"), make = interned("new"), shape = interned("shape");
};

const Names& names() {
    static const Names& interned_names = *new Names;  // never freed: Python may have ended
    return interned_names;
}

std::string repr_of(nb::handle value) {
    return utf8(nb::repr(value));
}

/// Returns the name of entry `j` of a list.
std::string entry(std::string_view name, size_t j) {
    return std::string(name) + "[" + std::to_string(j) + "]";
}

/// Throws invalid_tensor, in torch's words, if these are several dtypes.
void check_one_dtype(std::vector<std::string> dtypes) {
    std::ranges::sort(dtypes);
    dtypes.erase(std::unique(dtypes.begin(), dtypes.end()), dtypes.end());
    if (dtypes.size() <= 1) return;
    std::string text;
    for (const std::string& each : dtypes) text += (text.empty() ? "" : ", ") + each;
    throw invalid_tensor(2030, ErrorType::INVALID_TENSOR_INI_MATCH,
                         "Invalid usage of tensors with different dtypes: ", text);
}

}  // namespace

// Tensors

Tensors::Tensors(nb::handle adapter)
    : adapter_(adapter), direct_(adapter.is_none() || nb::getattr(adapter, names().direct).is(nb::bool_(true))) {}

/// Throws where there is no adapter to look at a tensor that the core does not read in place.
void Tensors::need_adapter() const {
    if (adapter_.is_none()) throw invalid_param(1040, "a tensor is not plain");
}

Operand Tensors::looked_at(nb::object tensor, const std::string& dtype) const {
    const auto [address, bytes] = nb::cast<std::pair<uintptr_t, size_t>>(nb::getattr(adapter_, names().region)(tensor));
    Operand seen{std::move(tensor), dtype_from_name(dtype), {address, bytes}, {}};
    for (const nb::handle n : nb::getattr(seen.tensor, names().shape)) seen.shape.push_back(nb::cast<int64_t>(n));
    return seen;
}

Operand Tensors::input(std::string_view name, nb::handle tensor) const {
    const Framework* const framework = direct_ ? framework_of(tensor) : nullptr;
    ArrayView seen;
    nb::object copy;
    if (framework != nullptr && framework->input(tensor, seen, copy))
        return {copy.is_valid() ? copy : nb::borrow(tensor),
                seen.dtype,
                seen.bytes(),
                {seen.shape.begin(), seen.shape.end()}};
    need_adapter();
    nb::object read = nb::getattr(adapter_, names().read)(name, tensor);
    const auto dtype = nb::cast<std::string>(nb::getattr(adapter_, names().dtype)(read));
    return looked_at(std::move(read), dtype);
}

Operand Tensors::output(std::string_view name, nb::handle tensor, const Operand* like) const {
    const Framework* const framework = direct_ ? framework_of(tensor) : nullptr;
    ArrayView seen;
    if (framework != nullptr && framework->output(tensor, seen) && (like == nullptr || seen.dtype == like->dtype))
        return {nb::borrow(tensor), seen.dtype, seen.bytes(), {seen.shape.begin(), seen.shape.end()}};
    need_adapter();
    const nb::object check = nb::getattr(adapter_, names().check_output);
    const nb::object dtype = like == nullptr ? check(name, tensor) : check(name, tensor, like->tensor);
    return looked_at(nb::borrow(tensor), nb::cast<std::string>(dtype));
}

Operand Tensors::make(std::vector<int64_t> shape, const Operand& like) const {
    const Framework* const framework = direct_ ? framework_of(like.tensor) : nullptr;
    if (framework == nullptr)
        return looked_at(nb::getattr(adapter_, names().make)(tuple_of(shape), like.tensor),
                         std::string(name_of(like.dtype)));
    Block block = Arena::instance().allocate(static_cast<size_t>(element_count(shape)) * size_of(like.dtype));
    const ByteRange bytes{reinterpret_cast<uintptr_t>(block.data()),
                          static_cast<size_t>(element_count(shape)) * size_of(like.dtype)};
    nb::object tensor = framework->make(like.tensor, shape, std::move(block));
    return {std::move(tensor), like.dtype, bytes, std::move(shape)};
}

void check_list(std::string_view name, nb::handle tensors, int size) {
    const Py_ssize_t length = PyObject_Size(tensors.ptr());
    if (length < 0) {
        PyErr_Clear();
        throw invalid_param(1041, name, " is ", repr_of(tensors), ", expected ", size, " tensors, one per rank");
    }
    if (length != size) throw invalid_param(1042, name, " has ", length, " tensors, expected ", size, ", one per rank");
}

std::vector<nb::object> Tensors::listed(std::string_view name, nb::handle tensors, int size) const {
    const bool plain = adapter_.is_none();
    const nb::object list = plain ? nb::borrow(tensors) : nb::getattr(adapter_, names().listed)(name, tensors);
    if (plain && !PyList_CheckExact(list.ptr()) && !PyTuple_CheckExact(list.ptr())) need_adapter();
    check_list(name, list, size);
    std::vector<nb::object> all;
    for (const nb::handle each : list) all.push_back(nb::borrow(each));
    return all;
}

bool Tensors::is_tensor(nb::handle object) const {
    return !adapter_.is_none() && nb::isinstance(object, nb::getattr(adapter_, names().tensor));
}

// Checks of arguments

ReduceOp checked_reduction(nb::handle op, DType dtype, std::string_view shown) {
    const std::optional<ReduceOp> reduce_op = reduce_op_of(op);
    if (!reduce_op) throw invalid_param(1043, "op is ", repr_of(op), ", expected ", reduce_ops_listed());
    if (!only_moves(dtype) && kernel::reduces(dtype, *reduce_op)) return *reduce_op;
    throw invalid_param(1044, "op '", name_of(*reduce_op), "' is not defined for dtype ", shown, ", expected ",
                        dtypes_listed(*reduce_op));
}

int64_t checked_leaves(nb::handle leaves, Shape input, int size) {
    int overflow = 0;
    int64_t number = -1;
    if (PyBool_Check(leaves.ptr()) == 0 && PyLong_Check(leaves.ptr()) != 0)
        number = PyLong_AsLongLongAndOverflow(leaves.ptr(), &overflow);
    constexpr auto most = static_cast<int64_t>(kernel::most_leaves);
    if (overflow != 0 || number < 1 || number > most || number % size != 0)
        throw invalid_param(1045, "leaves is ", repr_of(leaves), ", expected a multiple of the ", size, " rank",
                            size == 1 ? "" : "s", " of at most ", most);
    if (input.empty() || input[0] != number / size)
        throw invalid_tensor(2023, ErrorType::INVALID_TENSOR_DIM, "input has shape ", tuple_text(input), ", expected (",
                             number / size, ", ...): leaves is ", number, " on ", size, size == 1 ? " rank" : " ranks");
    return number;
}

std::optional<int64_t> integer_of(nb::handle value) {
    if (PyBool_Check(value.ptr()) != 0 || PyIndex_Check(value.ptr()) == 0) return std::nullopt;
    const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
    if (!index.is_valid()) {
        PyErr_Clear();  // NumPy's arrays also have the method
        return std::nullopt;
    }
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    return overflow == 0 ? std::optional(number) : std::nullopt;
}

int checked_rank(std::string_view name, nb::handle rank, int size) {
    const int64_t number = integer_of(rank).value_or(-1);
    if (number < 0 || number >= size) throw no_rank(name, repr_of(rank), size);
    return static_cast<int>(number);
}

namespace {

using Operands = std::vector<Operand>;
using Regions = std::vector<ByteRange>;

Regions regions_of(const Operands& operands) {
    Regions regions;
    for (const Operand& each : operands) regions.push_back(each.bytes);
    return regions;
}

void check_all_apart(ByteRange one, const Regions& others) {
    for (const ByteRange& other : others) check_apart(one, other);
}

bool same(ByteRange a, ByteRange b) {
    return a.address == b.address && a.bytes == b.bytes;
}

/// Returns how the rows of a tensor are divided among `size` ranks, equally without rows.
Counts divided(std::string_view name, nb::handle rows, std::string_view of, const std::vector<int64_t>& shape,
               int size) {
    row_size(shape, of);
    Counts counts(static_cast<size_t>(size));
    if (!rows.is_none()) read_counts(name.data(), rows, counts);
    check_split(name, of, shape[0], counts, rows.is_none());
    return counts;
}

/// Returns counts, or None for those without entries, which mean the same in MindSpore.
nb::object filled(nb::handle counts) {
    const Py_ssize_t length = PyObject_Size(counts.ptr());
    if (length < 0) PyErr_Clear();
    return length == 0 ? nb::none() : nb::borrow(counts);
}

Counts times(Counts counts, int64_t factor) {
    to_elements(counts, factor);
    return counts;
}

}  // namespace

// The collectives

/// Fills a call by the rules of its collective.
struct Preparation {
    const CallArguments& args;
    CheckedCall& call;
    const Tensors tensors{args.adapter};
    const int size = args.communicator->size(), rank = args.communicator->rank();
    const std::string_view out_name = args.names[0], in_name = args.names[1];

    size_t own() const { return static_cast<size_t>(rank); }

    void exchange(OpKind op, DType dtype, Request request, uintptr_t input, uintptr_t output) {
        const auto total = [&](std::span<const int64_t> counts) {
            return static_cast<size_t>(std::accumulate(counts.begin(), counts.end(), int64_t{0})) * size_of(dtype);
        };
        request.op = op;
        call.bytes_ = std::max(total(request.send_counts()), total(request.recv_counts()));
        call.exchange_ = std::make_shared<const ReadyExchange>(std::move(request), dtype, rank);
        call.input_ = input;
        call.output_ = output;
    }

    /// Sends inputs[j] to rank j and receives outputs[j] from it, where they lie.
    void lists(OpKind op, DType dtype, const Regions& outputs, const Regions& inputs, int root = 0) {
        Request request(op, size);
        request.root = root;
        request.byte_displs = true;
        const auto fill = [&](const Regions& regions, std::span<int64_t> counts, std::span<int64_t> displs) {
            uintptr_t lowest = UINTPTR_MAX;
            for (const ByteRange& each : regions)
                if (each.bytes != 0) lowest = std::min(lowest, each.address);
            for (size_t j = 0; j < regions.size(); ++j) {
                counts[j] = static_cast<int64_t>(regions[j].bytes / size_of(dtype));
                displs[j] = regions[j].bytes == 0 ? 0 : static_cast<int64_t>(regions[j].address - lowest);
            }
            return lowest == UINTPTR_MAX ? uintptr_t{0} : lowest;
        };
        const uintptr_t input = fill(inputs, request.send_counts(), request.sdispls());
        const uintptr_t output = fill(outputs, request.recv_counts(), request.rdispls());
        exchange(op, dtype, std::move(request), input, output);
    }

    void reduction(const Operand& in, uintptr_t input, uintptr_t output, Counts counts, int root = 0,
                   bool has_shape = true) {
        auto ready = std::make_shared<ReadyReduction>();
        ready->counts = std::move(counts);
        Reduction& target = ready->reduction;
        target.op = args.op;
        target.dtype = in.dtype;
        target.reduce_op = combine(in);
        if (has_shape) target.shape = ShapeWords(in.shape);
        target.input = pointer<const void>(input);
        target.output = pointer<void>(output);
        target.root = root;
        call.bytes_ = static_cast<size_t>(std::accumulate(ready->counts.begin(), ready->counts.end(), int64_t{0})) *
                      size_of(in.dtype);
        call.reduction_ = std::move(ready);
    }

    ReduceOp combine(const Operand& x) const {
        if (!only_moves(x.dtype)) return checked_reduction(args.reduce_op, x.dtype, name_of(x.dtype));
        return checked_reduction(args.reduce_op, x.dtype, utf8(nb::str(nb::getattr(x.tensor, names().dtype))));
    }

    int root() const { return checked_rank("root", args.root, size); }

    void reads(const Operands& operands) {
        for (const Operand& each : operands) call.inputs.push_back(each.tensor);
    }

    /// Describes what the call writes: the tensors of a list, or one.
    void writes(const Operands& operands, bool list) {
        for (const Operand& each : operands) call.outputs.push_back(each.tensor);
        if (list)
            call.result = nb::cast(call.outputs);
        else if (!operands.empty())
            call.result = operands[0].tensor;
    }

    Operands listed_outputs(const Operand* like) const {
        Operands all;
        const std::vector<nb::object> list = tensors.listed(out_name, args.outputs, size);
        for (size_t j = 0; j < list.size(); ++j) all.push_back(tensors.output(entry(out_name, j), list[j], like));
        return all;
    }

    Operands listed_inputs(const Operand* like = nullptr) const {
        Operands all;
        const std::vector<nb::object> list = tensors.listed(in_name, args.inputs, size);
        for (size_t j = 0; j < list.size(); ++j) all.push_back(tensors.input(entry(in_name, j), list[j]));
        for (size_t j = 0; like != nullptr && j < all.size(); ++j)
            if (all[j].dtype != like->dtype) tensors.output(entry(in_name, j), all[j].tensor, like);  // raises
        return all;
    }

    /// Returns the output for a tensor of that shape like `x`; a given one needs as many elements.
    Operand output_for(const std::vector<int64_t>& shape, const Operand& x) const {
        if (args.outputs.is_none()) return tensors.make(shape, x);
        Operand out = tensors.output(out_name, args.outputs, &x);
        check_count(out_name, out.count(), element_count(shape));
        return out;
    }

    /// Returns the input and the output of a reduction, which may be one tensor.
    std::pair<Operand, Operand> reduced(bool writes_output) {
        if (args.inputs.is_none()) {
            Operand tensor = tensors.output(out_name, args.outputs);
            combine(tensor);
            writes({tensor}, false);
            return {tensor, tensor};
        }
        Operand x = tensors.input(in_name, args.inputs);
        combine(x);
        reads({x});
        if (!writes_output) return {x, {}};
        Operand out = output_for(x.shape, x);
        check_same_or_apart(out.bytes, x.bytes);
        writes({out}, false);
        return {std::move(x), std::move(out)};
    }

    void all_reduce() {
        if (args.leaves.is_valid() && !args.leaves.is_none()) return all_reduce_leaves();
        const auto [x, out] = reduced(true);
        reduction(x, x.bytes.address, out.bytes.address, even_parts(x.count(), size));
    }

    /// Also reduces along dimension 0.
    void all_reduce_leaves() {
        Operand x = tensors.input(in_name, args.inputs);
        combine(x);
        const int64_t leaves = checked_leaves(args.leaves, x.shape, size);
        reads({x});
        Operand out = output_for({x.shape.begin() + 1, x.shape.end()}, x);
        check_apart(out.bytes, x.bytes);
        writes({out}, false);
        reduction(x, x.bytes.address, out.bytes.address, even_parts(out.count(), size));
        call.reduction_->reduction.leaves = leaves;
    }

    void reduce() {
        const int to = root();
        const auto [x, out] = reduced(rank == to);
        reduction(x, x.bytes.address, rank == to ? out.bytes.address : 0, even_parts(x.count(), size), to);
    }

    void broadcast() {
        const Operand x = tensors.output(out_name, args.outputs);
        const int from = root();
        const auto peer = static_cast<size_t>(from);
        Request request(OpKind::broadcast, size);
        request.root = from;
        if (rank == from) std::ranges::fill(request.send_counts(), x.count());
        (rank == from ? request.send_counts() : request.recv_counts())[peer] = rank == from ? 0 : x.count();
        writes({x}, false);
        exchange(OpKind::broadcast, x.dtype, std::move(request), x.bytes.address, x.bytes.address);
    }

    /// Returns the shape of all parts together, and the elements of each; without counts each part has `shape`.
    std::pair<std::vector<int64_t>, Counts> parts(const std::vector<int64_t>& shape) const {
        std::vector<int64_t> all = shape;
        if (args.counts.is_none()) {
            all.insert(all.begin(), size);
            return {all, Counts(static_cast<size_t>(size), element_count(shape))};
        }
        Counts rows(static_cast<size_t>(size));
        read_counts(args.names[2].data(), args.counts, rows);
        const int64_t row = row_size(shape);
        check_signs(args.names[2], rows);
        Counts counts = times(rows, row), begins(counts.size());
        pack(counts, begins);
        if (__builtin_add_overflow(begins.back(), counts.back(), &begins.back()))
            throw invalid_param(1049, args.names[2], " is ", list_text(rows), ", expected a sum below 2**63 elements");
        all[0] = std::accumulate(rows.begin(), rows.end(), int64_t{0});
        return {all, std::move(counts)};
    }

    /// Cuts memory into regions that follow each other.
    Regions cut(ByteRange memory, const Counts& counts, DType dtype) const {
        Regions regions;
        for (const int64_t count : counts) {
            regions.push_back({memory.address, static_cast<size_t>(count) * size_of(dtype)});
            memory.address += regions.back().bytes;
        }
        return regions;
    }

    /// Returns the list of an exchange with one rank alone.
    Regions only(int64_t peer, ByteRange region) const {
        Regions all(static_cast<size_t>(size), ByteRange{0, 0});
        all[static_cast<size_t>(peer)] = region;
        return all;
    }

    void gather() {
        const int to = root();
        const Operand x = tensors.input(in_name, args.inputs);
        Regions outputs(static_cast<size_t>(size), ByteRange{0, 0});
        if (rank == to) {
            const bool one_tensor = args.one_tensor.value_or(false);
            Operands outs;
            if (one_tensor) {
                const auto [shape, counts] = parts(x.shape);
                outs.push_back(output_for(shape, x));
                outputs = cut(outs[0].bytes, counts, x.dtype);
            } else {
                outs = listed_outputs(&x);
                outputs = regions_of(outs);
            }
            check_own("gather_list", outputs, x.bytes.bytes, size_of(x.dtype), rank);
            check_outputs_apart(outputs, "gather_list");
            for (size_t j = 0; j < outputs.size(); ++j)
                if (j != own() || !same(outputs[j], x.bytes)) check_apart(x.bytes, outputs[j]);
            writes(outs, !one_tensor);
        } else if (!args.one_tensor.value_or(false)) {
            call.result = nb::list();
        }
        reads({x});
        lists(OpKind::gather, x.dtype, outputs, only(to, x.bytes), to);
    }

    void scatter() {
        const int from = root();
        const Operand out = tensors.output(out_name, args.outputs);
        Regions inputs(static_cast<size_t>(size), ByteRange{0, 0});
        if (rank == from) {
            Operands xs;
            if (args.one_tensor.value_or(false)) {
                if (args.inputs.is_none())
                    throw invalid_tensor(2026, ErrorType::INVALID_IN_TENSOR_NUM, in_name,
                                         " is None on the root, expected the parts of all ranks");
                xs.push_back(tensors.input(in_name, args.inputs));
                tensors.output(out_name, args.outputs, &xs[0]);
                const auto [shape, counts] = parts(args.counts.is_none() ? out.shape : xs[0].shape);
                check_count(in_name, xs[0].count(), element_count(shape));
                inputs = cut(xs[0].bytes, counts, out.dtype);
            } else {
                xs = listed_inputs(&out);
                inputs = regions_of(xs);
            }
            check_own("scatter_list", inputs, out.bytes.bytes, size_of(out.dtype), rank);
            const bool stays = same(inputs[own()], out.bytes);  // the output has what it gets
            for (const ByteRange& each : inputs)
                if (!stays || !same(each, out.bytes)) check_apart(out.bytes, each);
            reads(xs);
        }
        writes({out}, false);
        lists(OpKind::scatter, out.dtype, only(from, out.bytes), inputs, from);
    }

    /// One tensor that every rank allots alike, into a tensor of exactly this rank's rows.
    void reduce_rows() {
        const Operand x = tensors.input(in_name, args.inputs);
        combine(x);
        const Counts rows = divided(args.names[2], args.counts, in_name, x.shape, size);
        std::vector<int64_t> shape = x.shape;
        shape[0] = rows[own()];
        const Operand out =
            args.outputs.is_none() ? tensors.make(shape, x) : tensors.output(out_name, args.outputs, &x);
        check_shape(out_name, out.shape, shape);
        check_apart(out.bytes, x.bytes);
        reads({x});
        writes({out}, false);
        reduction(x, x.bytes.address, out.bytes.address, times(rows, row_size(x.shape)));
    }

    void reduce_scatter() {
        if (args.one_tensor.value_or(false)) return reduce_rows();
        const Operand out = tensors.output(out_name, args.outputs);
        const bool one_tensor = tensors.is_tensor(args.inputs);
        Operands xs;
        if (one_tensor) {
            xs.push_back(tensors.input(in_name, args.inputs));
            if (xs[0].dtype != out.dtype) tensors.output(in_name, xs[0].tensor, &out);  // raises
        } else {
            xs = listed_inputs(&out);
        }
        combine(out);
        Regions inputs = regions_of(xs);
        if (one_tensor && !args.counts.is_none()) {
            call.counts =
                times(divided(args.names[2], filled(args.counts), in_name, xs[0].shape, size), row_size(xs[0].shape));
            inputs = cut(xs[0].bytes, call.counts, out.dtype);
        } else if (one_tensor) {
            if (xs[0].count() != size * out.count())
                throw invalid_tensor(2029, ErrorType::INVALID_TENSOR_SIZE, "the input has ", xs[0].count(),
                                     " elements, expected ", size, " times the ", out.count(), " of the output");
            inputs = cut(xs[0].bytes, Counts(static_cast<size_t>(size), out.count()), out.dtype);
        }
        check_part(out_name, out.bytes.bytes, in_name, inputs[own()].bytes, size_of(out.dtype), rank);
        check_all_apart(out.bytes, inputs);
        Counts counts;
        for (const ByteRange& each : inputs) counts.push_back(static_cast<int64_t>(each.bytes / size_of(out.dtype)));
        bool has_shape = true;
        Operand stacked{{}, out.dtype, {0, 0}, xs[0].shape};
        if (!one_tensor) {
            has_shape = std::ranges::all_of(xs, [&](const Operand& x) { return x.shape == xs[0].shape; });
            stacked.shape.insert(stacked.shape.begin(), size);
        }
        const uintptr_t input = joined(inputs);
        reads(xs);
        writes({out}, false);
        reduction(stacked, input, out.bytes.address, std::move(counts), 0, has_shape);
    }

    /// Returns where all regions follow each other: where they are, or a copy.
    uintptr_t joined(const Regions& regions) {
        Regions filled = regions;
        std::erase_if(filled, [](const ByteRange& each) { return each.bytes == 0; });
        if (filled.empty()) return 0;
        size_t total = filled[0].bytes;
        bool follow = true;
        for (size_t i = 1; i < filled.size(); total += filled[i++].bytes)
            follow = follow && filled[i].address == filled[i - 1].address + filled[i - 1].bytes;
        if (follow) return filled[0].address;
        call.joined_ = Arena::instance().allocate(total);
        char* at = call.joined_.data();
        for (const ByteRange& each : filled) {
            std::memcpy(at, pointer<const void>(each.address), each.bytes);
            at += each.bytes;
        }
        return reinterpret_cast<uintptr_t>(call.joined_.data());
    }

    void all_gather() {
        const Operand x = tensors.input(in_name, args.inputs);
        reads({x});
        const bool one_tensor = args.one_tensor.value_or(tensors.is_tensor(args.outputs));
        Operands outs;
        if (one_tensor)
            outs.push_back(tensors.output(out_name, args.outputs, &x));
        else
            outs = listed_outputs(&x);
        writes(outs, !one_tensor);
        if (one_tensor && args.counts.is_none()) {
            check_gathered(out_name, outs[0].count(), x.shape, size);
            check_gather_apart(outs[0].bytes, x.bytes, rank);
            return exchange(OpKind::all_gather_into_tensor, x.dtype,
                            gather_request(OpKind::all_gather_into_tensor, size, x.count()), x.bytes.address,
                            outs[0].bytes.address);
        }
        Regions outputs = regions_of(outs);
        if (one_tensor) {
            const Operand& out = outs[0];
            call.counts =
                times(divided(args.names[2], filled(args.counts), out_name, out.shape, size), row_size(out.shape));
            outputs = cut(out.bytes, call.counts, x.dtype);
        }
        check_outputs_apart(outputs, "tensor_list");
        check_part(in_name, x.bytes.bytes, out_name, outputs[own()].bytes, size_of(x.dtype), rank);
        check_all_apart(x.bytes, outputs);
        lists(OpKind::all_gather, x.dtype, outputs, Regions(static_cast<size_t>(size), x.bytes));
    }

    void all_to_all() {
        const Operands xs = listed_inputs();
        const Operands outs = listed_outputs(nullptr);
        std::vector<std::string> dtypes;
        for (const Operands* side : {&xs, &outs})
            for (const Operand& each : *side) dtypes.emplace_back(name_of(each.dtype));
        check_one_dtype(std::move(dtypes));
        const Regions inputs = regions_of(xs), outputs = regions_of(outs);
        for (const ByteRange& each : outputs) check_all_apart(each, inputs);
        check_outputs_apart(outputs, out_name);
        reads(xs);
        writes(outs, true);
        lists(OpKind::all_to_all, xs[0].dtype, outputs, inputs);
    }

    void fill() {
        call.name = out_name;
        switch (args.op) {
            case OpKind::all_reduce:
                return all_reduce();
            case OpKind::reduce:
                return reduce();
            case OpKind::broadcast:
                return broadcast();
            case OpKind::gather:
                return gather();
            case OpKind::scatter:
                return scatter();
            case OpKind::reduce_scatter:
                return reduce_scatter();
            case OpKind::all_gather:
                return all_gather();
            case OpKind::all_to_all:
                return all_to_all();
            case OpKind::barrier:
                return exchange(OpKind::barrier, DType::uint8, Request(OpKind::barrier, size), 0, 0);
            default:
                throw invalid_param(1051, "op is '", name_of(args.op), "', which this call does not make");
        }
    }
};

CheckedCall::CheckedCall(const CallArguments& arguments) : communicator_(arguments.communicator) {
    Preparation{arguments, *this}.fill();
}

void CheckedCall::run(double timeout, uintptr_t stream) const {
    if (reduction_ == nullptr) return exchange_->run(*communicator_, input_, output_, timeout, stream);
    ReadyReduction now = *reduction_;
    now.reduction.stream = pointer(stream);
    now.run(*communicator_, timeout);
}

WorkPtr CheckedCall::submit(double timeout) const {
    if (reduction_ == nullptr) return alltoallv::submit(*communicator_, exchange_, input_, output_, timeout);
    return communicator_->begin(reduction_->reduction.op,
                                [call = reduction_, raw = communicator_.get(), timeout] { call->run(*raw, timeout); });
}

namespace {

/// Returns the texts of a tuple, which keeps them; empty ones without a tuple.
std::array<std::string_view, 3> texts_of(nb::handle texts) {
    std::array<std::string_view, 3> read;
    const auto count = texts.is_valid() ? nb::len(texts) : 0;
    for (size_t i = 0; i < std::min(read.size(), count); ++i) {
        Py_ssize_t size = 0;
        const char* const text =
            PyUnicode_AsUTF8AndSize(PyTuple_GetItem(texts.ptr(), static_cast<Py_ssize_t>(i)), &size);
        if (text == nullptr) throw nb::python_error();
        read[i] = {text, static_cast<size_t>(size)};
    }
    return read;
}

CallArguments arguments_of(nb::handle adapter, CommunicatorPtr communicator, const std::string& op, nb::handle outputs,
                           nb::handle inputs, nb::handle root, nb::handle reduce_op, nb::handle counts,
                           std::optional<bool> one_tensor, nb::handle argument_names, nb::handle leaves = {}) {
    return {adapter,
            std::move(communicator),
            op_from_name(op),
            outputs,
            inputs,
            texts_of(argument_names),
            root,
            reduce_op,
            counts,
            one_tensor,
            leaves};
}

/// Checks and runs a call; its failure to pass the checks is announced.
nb::object call(nb::handle adapter, CommunicatorPtr communicator, const std::string& op, nb::handle outputs,
                nb::handle inputs, nb::handle root, nb::handle reduce_op, nb::handle counts,
                std::optional<bool> one_tensor, nb::handle argument_names, nb::handle async_op, nb::handle timeout,
                nb::handle leaves) {
    const CallArguments args = arguments_of(adapter, communicator, op, outputs, inputs, root, reduce_op, counts,
                                            one_tensor, argument_names, leaves);
    double limit = -1;
    bool later = false;
    auto checked = guarded(*communicator, args.op, [&] {
        limit = read_timeout(timeout);
        later = read_flag(async_op);
        return std::make_unique<CheckedCall>(args);
    });
    nb::object result = checked->result;
    if (later) {
        WorkPtr work = checked->submit(limit);
        return nb::make_tuple(result, std::move(work), nb::cast(checked.release(), nb::rv_policy::take_ownership));
    }
    {
        const LockReleased released(*communicator, checked->bytes());
        checked->run(limit, 0);
    }
    return result;
}

/// Does the same for tensors that are plain; returns None, with nothing done, for all that the front end must look at.
nb::object call_plain(CommunicatorPtr communicator, const std::string& op, nb::handle outputs, nb::handle inputs,
                      nb::handle root, nb::handle reduce_op, nb::handle async_op, std::optional<double> seconds) {
    if (any_watched()) return nb::none();
    const double timeout = seconds.value_or(-1.0);
    std::unique_ptr<CheckedCall> checked;
    try {
        checked = std::make_unique<CheckedCall>(
            arguments_of(nb::none(), communicator, op, outputs, inputs, root, reduce_op, nb::none(), std::nullopt, {}));
    } catch (const Error&) {
        return nb::none();
    }
    nb::object result = checked->result;
    if (async_op.is(nb::bool_(true))) {
        WorkPtr work = checked->submit(timeout);
        return nb::make_tuple(result, std::move(work), nb::cast(checked.release(), nb::rv_policy::take_ownership));
    }
    {
        const LockReleased released(*communicator, checked->bytes());
        checked->run(timeout, 0);
    }
    return result.is_none() ? nb::bool_(true) : std::move(result);
}

}  // namespace

void bind_checked_call(nb::module_& m) {
    nb::class_<CheckedCall>(m, "CheckedCall",
                            "A collective on the caller's tensors that has passed this rank's checks.")
        .def(
            "__init__",
            [](CheckedCall* self, nb::handle adapter, CommunicatorPtr communicator, const std::string& op,
               nb::handle outputs, nb::handle inputs, nb::handle root, nb::handle reduce_op, nb::handle counts,
               std::optional<bool> one_tensor, nb::handle argument_names) {
                new (self) CheckedCall(arguments_of(adapter, std::move(communicator), op, outputs, inputs, root,
                                                    reduce_op, counts, one_tensor, argument_names));
            },
            "adapter"_a, "communicator"_a, "op"_a, "outputs"_a.none() = nb::none(), "inputs"_a.none() = nb::none(),
            "root"_a.none() = nb::none(), "reduce_op"_a.none() = nb::none(), "counts"_a.none() = nb::none(),
            "one_tensor"_a.none() = nb::none(), "names"_a = nb::make_tuple("tensor", "tensor", "counts"))
        .def_ro("result", &CheckedCall::result, "What it writes: a tensor, or a list.")
        .def_ro("inputs", &CheckedCall::inputs, "The tensors that it reads.")
        .def_ro("outputs", &CheckedCall::outputs, "The tensors that it writes.")
        .def_ro("name", &CheckedCall::name, "The argument that holds the outputs.")
        .def_ro("counts", &CheckedCall::counts, "Elements of each rank, where the caller gave counts; else empty.")
        .def("run", &CheckedCall::run, ReleaseGil(), "timeout"_a = -1.0, "stream"_a = 0,
             "On a device's stream it is enqueued; without one the call blocks.")
        .def("submit", &CheckedCall::submit, "timeout"_a = -1.0);
    m.def(
        "call", &call, "adapter"_a, "communicator"_a, "op"_a, "outputs"_a.none() = nb::none(),
        "inputs"_a.none() = nb::none(), "root"_a.none() = nb::none(), "reduce_op"_a.none() = nb::none(),
        "counts"_a.none() = nb::none(), "one_tensor"_a.none() = nb::none(),
        "names"_a = nb::make_tuple("tensor", "tensor", "counts"), "async_op"_a.none() = false,
        "timeout"_a.none() = nb::none(), "leaves"_a.none() = nb::none(),
        nb::sig(
            "def call(adapter: object, communicator: Communicator, op: str, outputs: object = None, inputs: object = "
            "None, root: object = None, reduce_op: object = None, counts: object = None, one_tensor: bool | None = "
            "None, "
            "names: tuple[str, str, str] = ..., async_op: object = False, timeout: object = None, leaves: object "
            "= None) -> typing.Any"),
        "Checks a collective on the caller's tensors and runs it: the result, or with async_op that, the pending call "
        "and what must live until it is done. An error of the arguments is announced to the peers.");
    m.def("call_plain", untyped(&call_plain), "communicator"_a, "op"_a, "outputs"_a.none(), "inputs"_a.none(),
          "root"_a.none() = nb::none(), "reduce_op"_a.none() = nb::none(), "async_op"_a.none() = false,
          "timeout"_a.none() = nb::none(),
          "As `call`, for contiguous tensors of a framework that the core reads and that nobody watches. None, with "
          "nothing done, for everything else, wrong arguments included.");
    m.def("check_one_dtype", &check_one_dtype, "dtypes"_a, "Raises InvalidTensorError if these are several dtypes.");
    m.def(
        "checked_leaves",
        [](nb::handle leaves, const Counts& shape, int size) { return checked_leaves(leaves, shape, size); },
        "leaves"_a.none(), "shape"_a, "size"_a,
        "The number of all ranks' leaves; raises unless an input of that shape holds this rank's.");
    m.def("checked_rank", &checked_rank, "name"_a, "rank"_a.none(), "size"_a,
          "The rank as an integer; raises InvalidParamError if there is none such.");
    m.def(
        "check_reduction",
        [](nb::handle op, const std::string& dtype, nb::handle shown) {
            checked_reduction(op, dtype_from_name(dtype), shown.is_none() ? dtype : utf8(nb::str(shown)));
        },
        "op"_a.none(), "dtype"_a, "shown"_a.none() = nb::none(),
        "Raises InvalidParamError for an op that is none, or is not defined for the dtype, which is `shown` to the "
        "user.");
}

}  // namespace alltoallv
