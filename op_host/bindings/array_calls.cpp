// Reads, checks and runs collectives on the user's arrays here if they are plain, so that a call costs the same whether
// or not an earlier one had the same counts. For other arrays every function returns None and does nothing; the front
// end then adapts them or raises an error.
#include <algorithm>
#include <string_view>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/counts.h"
#include "bindings/guarded.h"
#include "bindings/lock.h"
#include "bindings/plan.h"
#include "op_kernel/cpu/reduce.h"
#include "runtime/base/error.h"
#include "runtime/core/communicator.h"
#include "runtime/core/regions.h"

namespace alltoallv {
namespace {

/// Returns what must live until an asynchronous call is done: the input, or its copy.
nb::object kept_input(const ArrayPair& arrays, nb::handle input) {
    return arrays.copy.is_valid() ? arrays.copy : nb::borrow(input);
}

/// A call as autograd needs it: a linear map that knows its transpose.
struct LinearCall {
    Request request;
    std::vector<int64_t> shape_in;
};

/// Copies to an output with gaps; returns what the caller gets.
nb::object settled(const ArrayPair& arrays, nb::object output, nb::object result) {
    if (!arrays.gapped) return result;
    arrays.framework->copy_to(output, result);
    return output;
}

/// Runs a call; returns the output, with the pending call and the input's memory if the call is asynchronous.
nb::object run(Communicator& communicator, Request request, const ArrayPair& arrays, nb::handle like, Target target,
               bool async_op, double timeout) {
    const uintptr_t input = arrays.input.address, output = target.address;
    if (async_op) {
        auto ready = std::make_shared<const ReadyExchange>(std::move(request), arrays.input.dtype, communicator.rank());
        WorkPtr work = submit(communicator, std::move(ready), input, output, timeout);
        return nb::make_tuple(std::move(target.array), std::move(work), kept_input(arrays, like));
    }
    const Exchange exchange = request.exchange(arrays.input.dtype, pointer(input), pointer(output));
    {
        const size_t numel = arrays.has_output ? arrays.output.size : static_cast<size_t>(element_count(request.shape));
        const size_t size = std::max(arrays.input.size, numel);
        const LockReleased released(communicator, size * size_of(arrays.input.dtype));
        communicator.exchange(exchange, timeout);
    }
    return std::move(target.array);
}

nb::object learn(Communicator& communicator, Request request, const ArrayPair& arrays, nb::handle like, bool async_op,
                 double timeout, LinearCall* linear) {
    const auto ready =
        std::make_shared<const ReadyExchange>(std::move(request), arrays.input.dtype, communicator.rank());
    if (async_op)
        return nb::make_tuple(nb::none(), submit_learning(communicator, ready, arrays.input.address, timeout),
                              kept_input(arrays, like));
    Learnt learnt;
    {
        const GilReleased release;
        ready->learn(communicator, arrays.input.address, timeout, learnt);
    }
    const std::vector<int64_t> shape = ready->request().shape_for(learnt.counts);
    if (linear != nullptr) {
        Request& learnt_request = linear->request;
        learnt_request.learns = false;
        std::ranges::copy(learnt.counts, learnt_request.recv_counts().begin());
        pack(learnt_request.recv_counts(), learnt_request.rdispls());
        learnt_request.shape = shape;
    }
    return arrays.framework->make(like, shape, std::move(learnt.block));
}

/// Throws invalid_param if an array is not the `same` as before the other arguments were read.
void check_unchanged(bool same) {
    if (same) return;
    throw invalid_param(1029,
                        "an array was changed while the other arguments were read, expected it to stay unchanged");
}

/// Runs the call that `read` makes of the arrays and its other arguments; makes the output if none is given.
/// Reading `counts`, `async_op` and `timeout` may run code of the caller, which may change the arrays.
/// `linear`: the caller records the gradient, for which it is filled.
template <class Read>
nb::object call(Communicator& communicator, OpKind op, nb::handle input, nb::object output, nb::handle async_op,
                nb::handle timeout, std::initializer_list<nb::handle> counts, Read read,
                ArrayPair::Use use = ArrayPair::Use::plain, LinearCall* linear = nullptr) {
    ArrayPair arrays(input, output, use);
    if (!arrays) return arrays.wants_gradient ? nb::borrow(Py_NotImplemented) : nb::none();
    if (arrays.gapped && !nb::handle(async_op).is(nb::bool_(false))) return nb::none();
    const bool fixed = PyBool_Check(async_op.ptr()) &&
                       (timeout.is_none() || PyFloat_CheckExact(timeout.ptr()) || PyLong_CheckExact(timeout.ptr())) &&
                       std::ranges::all_of(counts, reads_in_place);
    if (!fixed) arrays.keep_shapes();
    Target target{};
    double limit = -1;
    bool later = false;
    Request request = guarded(communicator, op, [&] {
        limit = read_timeout(timeout);
        later = read_flag(async_op);
        Request read_request = read(arrays);
        if (!fixed) check_unchanged(ArrayPair(input, output, use) == arrays);
        if (!read_request.learns && read_request.size() != 0) target = target_of(arrays, input, output, read_request);
        return read_request;
    });
    if (request.size() == 0 || (request.row == 0 && request.learns)) return nb::none();
    if (linear != nullptr) *linear = {request, {arrays.input.shape.begin(), arrays.input.shape.end()}};
    if (request.learns) return learn(communicator, std::move(request), arrays, input, later, limit, linear);
    return settled(arrays, output,
                   run(communicator, std::move(request), arrays, input, std::move(target), later, limit));
}

nb::object exchange_by_counts(Communicator& communicator, nb::handle input, nb::object out, nb::handle send_counts,
                              nb::handle recv_counts, nb::handle sdispls, nb::handle rdispls, nb::handle unit,
                              nb::handle async_op, nb::handle timeout, LinearCall* linear) {
    const auto read = [&](const ArrayPair& arrays) {
        Request parsed = read_all_to_all_v(communicator.size(), arrays.input.shape, send_counts, recv_counts, sdispls,
                                           rdispls, unit, arrays.output_shape());
        if (arrays.has_output) check_apart(arrays.output.bytes(), arrays.input.bytes());
        return parsed;
    };
    return call(communicator, OpKind::all_to_all_v, input, std::move(out), async_op, timeout,
                {send_counts, recv_counts, sdispls, rdispls}, read,
                linear == nullptr ? ArrayPair::Use::asks : ArrayPair::Use::tracked, linear);
}

nb::object all_to_all_v(Communicator& communicator, nb::handle input, nb::object out, nb::handle send_counts,
                        nb::handle recv_counts, nb::handle sdispls, nb::handle rdispls, nb::handle unit,
                        nb::handle async_op, nb::handle timeout) {
    return exchange_by_counts(communicator, input, std::move(out), send_counts, recv_counts, sdispls, rdispls, unit,
                              async_op, timeout, nullptr);
}

nb::object linear_all_to_all_v(Communicator& communicator, nb::handle input, nb::handle send_counts,
                               nb::handle recv_counts, nb::handle sdispls, nb::handle rdispls, nb::handle unit) {
    auto linear = std::make_unique<LinearCall>(Request(OpKind::all_to_all_v, 0), std::vector<int64_t>{});
    nb::object result = exchange_by_counts(communicator, input, nb::none(), send_counts, recv_counts, sdispls, rdispls,
                                           unit, nb::bool_(false), nb::none(), linear.get());
    if (result.is_none()) return result;
    return nb::make_tuple(std::move(result), nb::cast(linear.release(), nb::rv_policy::take_ownership));
}

/// Runs the map, or its transpose. Returns None where the regions that would then receive overlap.
nb::object apply(const LinearCall& linear, Communicator& communicator, nb::handle input, bool transposed) {
    const Request& forward = linear.request;
    Request request(forward.op, forward.size());
    const auto half = static_cast<ptrdiff_t>(2 * request.send_counts().size());
    const auto middle = forward.values().begin() + half;
    std::copy(transposed ? middle : forward.values().begin(), transposed ? forward.values().end() : middle,
              request.send_counts().begin());
    std::copy(transposed ? forward.values().begin() : middle, transposed ? middle : forward.values().end(),
              request.recv_counts().begin());
    try {
        check_no_overlap(request.recv_counts(), request.rdispls());
    } catch (const Error&) {
        return nb::none();
    }
    const std::vector<int64_t>& shape = transposed ? linear.shape_in : forward.shape;
    return call(communicator, forward.op, input, nb::none(), nb::bool_(false), nb::none(), {},
                [&](const ArrayPair& arrays) {
                    request.row = forward.row;
                    if (request.row != 0) request.check(static_cast<int64_t>(arrays.input.size), element_count(shape));
                    request.shape = shape;
                    return std::move(request);
                });
}

nb::object all_to_all_single(Communicator& communicator, nb::object output, nb::handle input,
                             nb::handle output_split_sizes, nb::handle input_split_sizes, nb::handle async_op,
                             nb::handle timeout, bool compares_rows) {
    if (output.is_none()) return nb::none();
    const auto read = [&](const ArrayPair& arrays) {
        Request parsed = read_all_to_all_single(communicator.size(), arrays.output.shape, arrays.input.shape,
                                                output_split_sizes, input_split_sizes);
        if (!arrays.gapped) check_apart(arrays.output.bytes(), arrays.input.bytes());
        if (!compares_rows) parsed.row = std::min<int64_t>(parsed.row, 1);
        if (arrays.gapped) parsed.shape.assign(arrays.output.shape.begin(), arrays.output.shape.end());
        return parsed;
    };
    return call(communicator, OpKind::all_to_all_single, input, std::move(output), async_op, timeout,
                {output_split_sizes, input_split_sizes}, read,
                compares_rows ? ArrayPair::Use::plain : ArrayPair::Use::gaps);
}

nb::object all_to_all_nd(Communicator& communicator, nb::handle input, nb::object out, nb::handle scatter_dim,
                         nb::handle gather_dim, nb::handle scatter_sizes, nb::handle gather_sizes,
                         nb::handle async_op) {
    const Framework* const framework = framework_of(input);
    ArrayView seen;
    if (framework == nullptr || !framework->view(input, seen)) return nb::none();  // gaps are read where they lie
    const auto read = [&](const ArrayPair& arrays) {
        std::optional<Request> parsed = read_all_to_all_nd(communicator.size(), communicator.rank(), arrays.input.shape,
                                                           scatter_dim, gather_dim, scatter_sizes, gather_sizes);
        const bool fits = parsed && (!arrays.has_output || (std::ranges::equal(arrays.output.shape, parsed->shape) &&
                                                            !overlaps(arrays.output.bytes(), arrays.input.bytes())));
        if (!fits) parsed = Request(OpKind::all_to_all_nd, 0);
        return *std::move(parsed);
    };
    return call(communicator, OpKind::all_to_all_nd, input, std::move(out), async_op, nb::none(),
                {scatter_sizes, gather_sizes}, read);
}

template <OpKind op>
nb::object gather(Communicator& communicator, nb::object output, nb::handle input, nb::handle async_op,
                  nb::handle timeout, bool gaps) {
    if (output.is_none() && op == OpKind::all_gather_into_tensor) return nb::none();
    return call(
        communicator, op, input, std::move(output), async_op, timeout, {},
        [&](const ArrayPair& arrays) {
            Request parsed = gather_request(op, communicator.size(), static_cast<int64_t>(arrays.input.size));
            parsed.shape.assign(arrays.input.shape.begin(), arrays.input.shape.end());
            parsed.shape.insert(parsed.shape.begin(), communicator.size());
            if (arrays.has_output) {
                if (arrays.gapped) parsed.shape.assign(arrays.output.shape.begin(), arrays.output.shape.end());
                check_gathered(op == OpKind::all_gather ? "out" : "output_tensor",
                               static_cast<int64_t>(arrays.output.size), arrays.input.shape, communicator.size());
                if (!arrays.gapped)
                    check_gather_apart(arrays.output.bytes(), arrays.input.bytes(), communicator.rank());
            }
            return parsed;
        },
        gaps ? ArrayPair::Use::gaps : ArrayPair::Use::plain);
}

/// Exchanges by a layout that was computed from counts before: int64 of shape [4, W], in elements. If transposed, it
/// sends what it would receive. Also returns None if the receive regions then overlap.
nb::object exchange(Communicator& communicator, const std::string& op, nb::handle input, nb::handle layout,
                    int64_t numel_out, int64_t row, bool transposed) {
    const Framework* const framework = framework_of(layout);
    ArrayView counts;
    const auto size = static_cast<size_t>(communicator.size());
    if (framework == nullptr || !framework->view(layout, counts) || counts.dtype != DType::int64 ||
        counts.size != 4 * size)
        return nb::none();
    const OpKind kind = op_from_name(op);
    const int64_t* const first = pointer<const int64_t>(counts.address);
    Request request(kind, communicator.size());
    std::copy_n(first + (transposed ? 2 * size : 0), 2 * size, request.send_counts().begin());
    std::copy_n(first + (transposed ? 0 : 2 * size), 2 * size, request.recv_counts().begin());
    if (transposed) {
        try {
            check_receive(-1, request.recv_counts(), request.rdispls(), communicator.size());
        } catch (const Error&) {
            return nb::none();
        }
    }
    return call(communicator, kind, input, nb::none(), nb::bool_(false), nb::none(), {}, [&](const ArrayPair& arrays) {
        request.check(static_cast<int64_t>(arrays.input.size), numel_out);
        if (numel_out >= 0) request.shape[0] = numel_out;
        request.row = std::max<int64_t>(row, 1);
        return std::move(request);
    });
}

/// Returns the index of a word among those that a parameter accepts.
template <size_t n>
std::optional<size_t> word(nb::handle value, const std::string_view (&words)[n]) {
    if (PyUnicode_Check(value.ptr()) == 0) return std::nullopt;
    for (size_t i = 0; i < n; ++i)
        if (PyUnicode_CompareWithASCIIString(value.ptr(), words[i].data()) == 0) return i;
    return std::nullopt;
}

std::optional<ReduceOp> reduction_of(nb::handle op, DType dtype) {
    const std::optional<ReduceOp> reduce_op = reduce_op_of(op);
    return reduce_op && kernel::reduces(dtype, *reduce_op) ? reduce_op : std::nullopt;
}

/// Reduces: every rank gets the whole result, or an equal part of dimension 0.
nb::object reduce(Communicator& communicator, const std::string& op, nb::handle input, nb::object output,
                  nb::handle reduce_op, double timeout, bool async_op) {
    const ArrayPair arrays(input, output, async_op ? ArrayPair::Use::plain : ArrayPair::Use::gaps);
    if (!arrays) return nb::none();
    const std::optional<ReduceOp> combine = reduction_of(reduce_op, arrays.input.dtype);
    const OpKind kind = op_from_name(op);
    const auto size = static_cast<size_t>(communicator.size());
    const bool scatters = kind == OpKind::reduce_scatter;
    Request result(kind, 0);
    result.shape.assign(arrays.input.shape.begin(), arrays.input.shape.end());
    if (scatters) {
        if (!arrays.has_output && (result.shape.empty() || result.shape[0] % communicator.size() != 0))
            return nb::none();
        if (arrays.input.size % size != 0) return nb::none();
        if (!result.shape.empty()) result.shape[0] /= communicator.size();
    }
    const size_t numel = scatters ? arrays.input.size / size : arrays.input.size;
    const bool fits = !arrays.has_output || arrays.output.size == numel;
    const bool in_place = !scatters && arrays.has_output && arrays.output.address == arrays.input.address;
    if (!combine || !fits) return nb::none();
    if (arrays.gapped) result.shape.assign(arrays.output.shape.begin(), arrays.output.shape.end());
    if (arrays.has_output && !in_place && !arrays.gapped && overlaps(arrays.output.bytes(), arrays.input.bytes()))
        return nb::none();
    const Target target = guarded(communicator, kind, [&] { return target_of(arrays, input, output, result); });
    auto call = std::make_shared<ReadyReduction>();
    call->counts = scatters ? std::vector<int64_t>(size, static_cast<int64_t>(numel))
                            : even_parts(static_cast<int64_t>(numel), communicator.size());
    call->reduction.op = kind;
    call->reduction.dtype = arrays.input.dtype;
    call->reduction.reduce_op = *combine;
    call->reduction.shape = ShapeWords(arrays.input.shape);
    call->reduction.input = pointer<const void>(arrays.input.address);
    call->reduction.output = pointer<void>(target.address);
    if (async_op)
        return nb::make_tuple(
            target.array,
            communicator.begin(kind, [call, &communicator, timeout] { call->run(communicator, timeout); }),
            kept_input(arrays, input));
    {
        const LockReleased released(communicator, arrays.input.bytes().bytes);
        call->run(communicator, timeout);
    }
    return settled(arrays, output, target.array);
}

/// A quantized reduction with its count, for pending calls.
struct ReadyQuantReduction {
    QuantReduction reduction;
    int64_t count = 0;

    void run(Communicator& communicator, double timeout) {
        reduction.counts = {&count, 1};
        communicator.quant_reduce(reduction, timeout);
    }
};

/// Returns where the state of error feedback lies that a dict has under this name, or nothing if it does not fit.
std::optional<float*> state_of(nb::handle states, const char* name, int64_t count) {
    PyObject* const state = PyDict_GetItemString(states.ptr(), name);  // borrowed
    const Framework* const framework = state == nullptr ? nullptr : framework_of(state);
    ArrayView seen;
    if (framework == nullptr || !framework->view(state, seen) || seen.dtype != DType::float32 ||
        static_cast<int64_t>(seen.size) != count)
        return std::nullopt;
    return pointer<float>(seen.address);
}

nb::object quantized_all_reduce(Communicator& communicator, nb::handle input, nb::object output, nb::handle format,
                                nb::handle group_size, nb::handle gather, nb::handle op, nb::handle overflow,
                                nb::handle states, bool async_op, double timeout, bool tracked) {
    const ArrayPair arrays(input, output, tracked ? ArrayPair::Use::tracked : ArrayPair::Use::asks);
    if (!arrays) return arrays.wants_gradient ? nb::borrow(Py_NotImplemented) : nb::none();
    if (!info(arrays.input.dtype).quantizes || PyUnicode_Check(format.ptr()) == 0) return nb::none();
    if (!group_size.is_none() && PyLong_CheckExact(group_size.ptr()) == 0) return nb::none();
    int group_overflow = 0;
    const std::optional<CodeFormat> codes = code_format(nb::cast<std::string>(format));
    const int64_t group = group_size.is_none() ? (codes ? usual_group(*codes) : 0)
                                               : PyLong_AsLongLongAndOverflow(group_size.ptr(), &group_overflow);
    const std::optional<size_t> gathers = word(gather, {"full", "quantized"}), averages = word(op, {"sum", "avg"}),
                                handling = word(overflow, overflow_names);
    if (!codes || group_overflow != 0 || !takes_group(*codes, group)) return nb::none();
    if (!gathers || !averages || !handling) return nb::none();
    const bool in_place = arrays.has_output && arrays.output.address == arrays.input.address;
    if (arrays.has_output && (!std::ranges::equal(arrays.output.shape, arrays.input.shape) ||
                              (!in_place && overlaps(arrays.output.bytes(), arrays.input.bytes()))))
        return nb::none();
    auto ready = std::make_shared<ReadyQuantReduction>();
    ready->count = static_cast<int64_t>(arrays.input.size);
    QuantReduction& call = ready->reduction;
    call.requantizes = *gathers == 1;
    if (!states.is_none()) {
        const int64_t part = quant_part(ready->count, group, communicator.size(), communicator.rank()).count;
        const auto error = state_of(states, "error", ready->count);
        const std::optional<float*> gather_error =
            call.requantizes ? state_of(states, "gather_error", part) : std::optional<float*>(nullptr);
        if (!error || !gather_error) return nb::none();
        call.feeds_back = true;
        call.gather_feeds_back = call.requantizes;
        call.error = *error;
        call.gather_error = *gather_error;
    }
    Request result(OpKind::quantized_all_reduce, 0);
    result.shape.assign(arrays.input.shape.begin(), arrays.input.shape.end());
    const Target target = guarded(communicator, result.op, [&] { return target_of(arrays, input, output, result); });
    call.op = result.op;
    call.mode = QuantMode::dynamic;
    call.dtype = call.out_dtype = arrays.input.dtype;
    call.overflow = static_cast<Overflow>(*handling);
    call.average = *averages == 1;
    call.format = *codes;
    call.group_size = group;
    call.shape = ShapeWords(arrays.input.shape);
    call.input = pointer<const void>(arrays.input.address);
    call.output = pointer<void>(target.address);
    if (async_op)
        return nb::make_tuple(
            target.array,
            communicator.begin(result.op, [ready, &communicator, timeout] { ready->run(communicator, timeout); }),
            nb::make_tuple(kept_input(arrays, input), states.is_none() ? nb::none() : states.attr("copy")()));
    const nb::object kept = states.is_none() ? nb::none() : nb::object(states.attr("copy")());
    {
        const LockReleased released(communicator, arrays.input.bytes().bytes);
        ready->run(communicator, timeout);
    }
    return target.array;
}

}  // namespace

void bind_array_calls(nb::module_& m) {
    m.def(
        "all_to_all_v", untyped(&all_to_all_v), "communicator"_a, "input"_a.none(), "out"_a.none(),
        "send_counts"_a.none(), "recv_counts"_a.none(), "sdispls"_a.none(), "rdispls"_a.none(), "unit"_a.none(),
        "async_op"_a.none(), "timeout"_a.none(),
        "The output, made here if `out` is None; with async_op that, or None, the pending call, or a LearningWork, and "
        "what the call reads. None, with nothing done, for arrays that the front end has to look at; NotImplemented "
        "for "
        "one that autograd records, which is for `linear_all_to_all_v`.");
    nb::class_<LinearCall>(m, "LinearCall", "An exchange that has run, as a linear map.")
        .def_prop_ro(
            "layout",
            [](const LinearCall& self) {
                const std::vector<int64_t> all = self.request.in_elements();
                return nb::bytearray(reinterpret_cast<const char*>(all.data()), all.size() * sizeof(int64_t));
            },
            "int64 of shape [4, W], in elements.")
        .def_prop_ro("row", [](const LinearCall& self) { return std::max<int64_t>(self.request.row, 1); })
        .def("apply", untyped(&apply), "communicator"_a, "input"_a.none(), "transposed"_a,
             "The map, or its transpose, of a tensor; None as for `all_to_all_v`.");
    m.def("check_unchanged", &check_unchanged, "same"_a,
          "Raises InvalidParamError if an array was changed while the other arguments were read.");
    m.def("linear_all_to_all_v", untyped(&linear_all_to_all_v), "communicator"_a, "input"_a.none(),
          "send_counts"_a.none(), "recv_counts"_a.none(), "sdispls"_a.none(), "rdispls"_a.none(), "unit"_a.none(),
          "The output and the LinearCall, for a caller that records the gradient; None as for `all_to_all_v`.");
    m.def("all_to_all_single", untyped(&all_to_all_single), "communicator"_a, "output"_a.none(), "input"_a.none(),
          "output_split_sizes"_a.none(), "input_split_sizes"_a.none(), "async_op"_a.none(), "timeout"_a.none(),
          "compares_rows"_a = true,
          "As `all_to_all_v` returns. Without compares_rows the ranks' rows may have other lengths, as long as the "
          "elements agree.");
    m.def("all_to_all_nd", untyped(&all_to_all_nd), "communicator"_a, "input"_a.none(), "out"_a.none(),
          "scatter_dim"_a.none(), "gather_dim"_a.none(), "scatter_sizes"_a.none(), "gather_sizes"_a.none(),
          "async_op"_a.none(), "As `all_to_all_v` returns; None also for wrong arguments, and for an input with gaps.");
    m.def("all_gather", untyped(&gather<OpKind::all_gather>), "communicator"_a, "output"_a.none(), "input"_a.none(),
          "async_op"_a.none(), "timeout"_a.none(), "gaps"_a = false,
          "Stacked; as `all_to_all_v` returns. gaps: the output may have some.");
    m.def("all_gather_into_tensor", untyped(&gather<OpKind::all_gather_into_tensor>), "communicator"_a,
          "output"_a.none(), "input"_a.none(), "async_op"_a.none(), "timeout"_a.none(), "gaps"_a = false,
          "The same under another name.");
    m.def(
        "exchange", untyped(&exchange), "communicator"_a, "op"_a, "input"_a.none(), "layout"_a.none(), "numel_out"_a,
        "row"_a, "transposed"_a = false,
        "By a layout, int64 of shape [4, W] in elements, into a new flat array of `numel_out` elements, or with -1 as "
        "many as needed; transposed, what was received is sent. None as for `all_to_all_v`.");
    m.def("reduce", untyped(&reduce), "communicator"_a, "op"_a, "input"_a.none(), "output"_a.none(),
          "reduce_op"_a.none(), "timeout"_a = -1.0, "async_op"_a = false,
          "'all_reduce' or, in equal parts, 'reduce_scatter'; as `all_to_all_v` returns.");
    m.def(
        "quantized_all_reduce", untyped(&quantized_all_reduce), "communicator"_a, "input"_a.none(), "output"_a.none(),
        "format"_a.none(), "group_size"_a.none(), "gather"_a.none(), "op"_a.none(), "overflow"_a.none(),
        "states"_a.none() = nb::none(), "async_op"_a = false, "timeout"_a = -1.0, "tracked"_a = false,
        "With scales of its own, into the input's dtype; as `all_to_all_v` returns. states: a dict of error feedback's "
        "arrays, as they must be for this call. tracked: the caller records the gradient.");
}

}  // namespace alltoallv
