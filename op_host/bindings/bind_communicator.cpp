// Binds communicators, reductions and pending calls.
#include <exception>
#include <future>
#include <thread>

#include "bindings/bindings.h"
#include "bindings/guarded.h"
#include "bindings/plan.h"
#include "runtime/base/place.h"
#include "runtime/base/processors.h"
#include "runtime/base/quiet_thread.h"
#include "runtime/bootstrap/registry.h"
#include "runtime/control/liveness.h"
#include "runtime/control/trace.h"
#include "runtime/core/communicator.h"
#include "runtime/core/peer_names.h"
#include "runtime/shm/shm_communicator.h"
#include "runtime/simulated/simulated_world.h"

namespace alltoallv {
namespace {

/// Makes all ranks of a thread domain at once: each must enter the rendezvous on its own thread.
std::vector<CommunicatorPtr> make_threads(const CommunicatorOptions& common) {
    std::vector<CommunicatorPtr> communicators(static_cast<size_t>(common.size));
    std::vector<std::exception_ptr> errors(communicators.size() + 1);
    std::vector<std::thread> threads;
    std::promise<bool> all_made;
    const auto make = [&, go = all_made.get_future().share()](size_t i) {
        if (!go.get()) return;  // a rank has no thread: the others would wait for it
        CommunicatorOptions options = common;
        options.rank = static_cast<int>(i);
        options.threads = true;
        try {
            communicators[i] = find_or_make_communicator(options, make_shm_communicator);
        } catch (...) {
            errors[i] = std::current_exception();
        }
    };
    try {
        for (size_t i = 0; i < communicators.size(); ++i)
            threads.push_back(quiet_thread("alltoallv-join", "the ranks of a domain", [&, i] { make(i); }));
    } catch (...) {
        errors.back() = std::current_exception();
    }
    all_made.set_value(!errors.back());
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
    return communicators;
}

ReadyReduction reduction_of(const std::string& op, const std::string& dtype, const std::string& reduce_op,
                            uintptr_t input, uintptr_t output, std::vector<int64_t> counts, int root,
                            const std::optional<std::vector<int64_t>>& shape, int64_t leaves) {
    Reduction reduction;
    reduction.op = op_from_name(op);
    reduction.dtype = dtype_from_name(dtype);
    reduction.reduce_op = reduce_op_from_name(reduce_op);
    reduction.input = pointer(input);
    reduction.output = pointer(output);
    reduction.root = root;
    reduction.leaves = leaves;
    if (shape) reduction.shape = ShapeWords(*shape);
    return {reduction, std::move(counts)};
}

}  // namespace

void bind_communicator(nb::module_& m) {
    nb::class_<CommunicatorOptions>(m, "CommunicatorOptions")
        .def(nb::init<>())
        .def_rw("rank", &CommunicatorOptions::rank)
        .def_rw("size", &CommunicatorOptions::size)
        .def_rw("domain", &CommunicatorOptions::domain)
        .def_rw("budget_mb", &CommunicatorOptions::budget_mb)
        .def_rw("threads", &CommunicatorOptions::threads)
        .def_rw("processes", &CommunicatorOptions::processes)
        .def_rw("job", &CommunicatorOptions::job)
        .def_rw("secret", &CommunicatorOptions::secret)
        .def_rw("timeout", &CommunicatorOptions::timeout)
        .def_rw("join_timeout", &CommunicatorOptions::join_timeout)
        .def_rw("check", &CommunicatorOptions::check)
        .def_rw("path", &CommunicatorOptions::path)
        .def_rw("copy_threads", &CommunicatorOptions::copy_threads)
        .def_rw("warn_after", &CommunicatorOptions::warn_after)
        .def_rw("cure", &CommunicatorOptions::cure);

    nb::class_<Work>(m, "Work")
        .def(
            "wait",
            [](Work& self, double seconds) {
                try {
                    return self.wait(seconds);
                } catch (const nb::python_error& error) {
                    throw nb::python_error(error);  // a copy: one can be raised once, and a call may be asked again
                }
            },
            "seconds"_a = -1.0, ReleaseGil(), "False if not finished within the time; raises what the call raised.")
        .def("done", &Work::done);

    nb::class_<MessageWork, Work>(m, "MessageWork")
        .def_prop_ro("source", &MessageWork::source, "The rank that a message has come from.")
        .def_prop_ro("tag", &MessageWork::tag, "Of a message that has come.")
        .def_prop_ro("count", &MessageWork::count, "Its elements.")
        .def_prop_ro(
            "memory", [](const MessageWork& work) { return nb::bytes(work.memory().data(), work.memory().size()); },
            "A copy of the message that a recv of any number has got.")
        .def_prop_ro(
            "dtype", [](const MessageWork& work) { return peer_name(work.dtype()); }, "The name of their type.");

    nb::class_<Communicator>(m, "Communicator", nb::is_weak_referenceable())
        .def_prop_ro("rank", &Communicator::rank)
        .def_prop_ro("size", &Communicator::size)
        .def_prop_ro("domain", &Communicator::domain)
        .def_prop_ro("backend", &Communicator::backend)
        .def("check_enqueued", &Communicator::check_enqueued, "done"_a, ReleaseGil(),
             "Raises what is known to have failed behind calls enqueued on a device; `done`: they have ended.")
        .def_prop_ro("usable", &Communicator::usable)
        .def_prop_ro("processes", &Communicator::processes, "Numbers of the ranks' processes, for `check_living`.")
        .def_prop_ro("control", &Communicator::control, nb::sig("def control(self, /) -> Communicator | None"),
                     "Of ranks on devices: the communicator of the same ranks in host memory.")
        .def("set_timeout", &Communicator::set_timeout, "seconds"_a,
             "Changes how many seconds calls wait that have no limit of their own, from the next one on.")
        .def(
            "fail",
            [](Communicator& self, const std::string& op, nb::handle error) {
                const OpKind kind = op_from_name(op);
                const Error told = error_of(error);
                const GilReleased release;
                self.fail(kind, told);
            },
            "op"_a, "error"_a)
        .def(
            "post",
            [](Communicator& self, const std::string& op, const std::string& dtype, uintptr_t data, int64_t count,
               int peer, int32_t tag, double timeout, bool waits, bool at_most) {
                using Looks = PeerMessage::Looks;
                const Looks looks = op == "probe" ? Looks::until_found : op == "look" ? Looks::once : Looks::no;
                const PeerMessage message{looks == Looks::no ? op_from_name(op) : OpKind::recv,
                                          dtype_from_name(dtype),
                                          pointer(data),
                                          count,
                                          peer,
                                          tag,
                                          at_most,
                                          looks};
                MessageWorkPtr work = self.post(message, timeout, waits);
                if (waits) work->wait(-1);
                return work;
            },
            ReleaseGil(), "op"_a, "dtype"_a, "data"_a, "count"_a, "peer"_a, "tag"_a, "timeout"_a = -1.0,
            "waits"_a = false, "at_most"_a = false,
            "'send' or 'recv' of a message, or what finds one and leaves it: 'probe' waits for it, 'look' does not. "
            "peer "
            "-1: from any rank; tag -2**31: with any that is not negative; count -1: a recv of any number, which gets "
            "memory. waits: returns when it is done. at_most: a message of fewer elements will do.")
        .def(
            "reduce",
            [](Communicator& self, const std::string& op, const std::string& dtype, const std::string& reduce_op,
               uintptr_t input, uintptr_t output, std::vector<int64_t> counts, double timeout, uintptr_t stream,
               int root, const std::optional<std::vector<int64_t>>& shape, bool moves, int64_t leaves, bool ordered,
               bool exclusive) {
                ReadyReduction call =
                    reduction_of(op, dtype, reduce_op, input, output, std::move(counts), root, shape, leaves);
                call.reduction.stream = pointer(stream);
                call.reduction.moves = moves;
                call.reduction.ordered = ordered;
                call.reduction.exclusive = exclusive;
                call.run(self, timeout);
            },
            ReleaseGil(), "op"_a, "dtype"_a, "reduce_op"_a, "input"_a, "output"_a, "counts"_a, "timeout"_a = -1.0,
            "stream"_a = 0, "root"_a = 0, "shape"_a = nb::none(), "moves"_a = true, "leaves"_a = 0, "ordered"_a = false,
            "exclusive"_a = false,
            "On a device's stream it is enqueued; without one the call blocks. root: of a reduce. shape: of the input, "
            "for the ranks to compare. moves: False for their agreement alone, where the data move by other means. "
            "leaves: of all ranks, which `check_leaves` has seen; counts are the result's. ordered: a device "
            "adds "
            "in the order of ranks. exclusive: of a scan.")
        .def(
            "submit_reduce",
            [](const CommunicatorPtr& self, const std::string& op, const std::string& dtype,
               const std::string& reduce_op, uintptr_t input, uintptr_t output, std::vector<int64_t> counts,
               double timeout, int root, const std::optional<std::vector<int64_t>>& shape, int64_t leaves) {
                auto call = std::make_shared<ReadyReduction>(
                    reduction_of(op, dtype, reduce_op, input, output, std::move(counts), root, shape, leaves));
                return self->begin(call->reduction.op, [call, raw = self.get(), timeout] { call->run(*raw, timeout); });
            },
            "op"_a, "dtype"_a, "reduce_op"_a, "input"_a, "output"_a, "counts"_a, "timeout"_a = -1.0, "root"_a = 0,
            "shape"_a = nb::none(), "leaves"_a = 0)
        .def("abort", &Communicator::abort, "reason"_a, ReleaseGil())
        .def("destroy", &Communicator::destroy, ReleaseGil())
        .def("stats", &Communicator::stats)
        .def("flight_record", &Communicator::flight_record);

    m.def(
        "communicator",
        [](const CommunicatorOptions& options) { return find_or_make_communicator(options, make_shm_communicator); },
        ReleaseGil(), "options"_a, "The communicator of a domain, made if need be.");
    m.def(
        "processes_of", [](const std::string& job, int size) { return Liveness::untold(processes_of(job, size)); },
        "job"_a, "size"_a,
        "Numbers of the processes of a job of that size, 0 for those whose loss has been raised; empty: unknown.");
    m.def(
        "process_number",
        [](const std::string& place, uint32_t pid) { return Liveness::process(place_number(place), pid); }, "place"_a,
        "pid"_a, "The number of a process with that `this_place()`.");
    m.def("check_living", &Liveness::check, "processes"_a, "rank"_a, "domain"_a,
          "Raises PeerLostError if one of these, by rank, but the own one, is known to be lost.");
    m.def(
        "cache_bytes", [] { return last_level_cache_bytes(affinity()); },
        "Bytes of the last-level caches of the processors that this process may use: exchanges that outgrow them write "
        "past them.");
    m.def(
        "set_trace_target",
        [](const nb::bytes& folder, size_t most_bytes) {
            const TraceTarget before = set_trace_target({{folder.c_str(), folder.size()}, most_bytes});
            return nb::make_tuple(nb::bytes(before.folder.data(), before.folder.size()), before.most_bytes);
        },
        nb::sig("def set_trace_target(folder: bytes, most_bytes: int) -> tuple[bytes, int]"), "folder"_a,
        "most_bytes"_a,
        "Begins to trace this process's operators into files there, each of at most so many bytes, or ends that with "
        "an empty name; returns the arguments until now.");
    m.def("thread_communicators", &make_threads, "options"_a, ReleaseGil());
    m.def("simulated_communicators", &simulate, ReleaseGil(), "size"_a, "domain"_a, "timeout"_a,
          "Of ranks that are threads and meet at a table.");
    m.def("destroy_all", &destroy_all_communicators, ReleaseGil());
}

}  // namespace alltoallv
