// Binds plans: the counts are converted once, a call passes two addresses.
#include "bindings/plan.h"

#include <algorithm>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "runtime/base/error.h"

namespace alltoallv {
namespace {

using Counts = std::vector<int64_t>;

/// Makes a request from checked lists, in elements.
Request request_of(const std::string& op, const Counts (&lists)[4], int root, int64_t row, bool byte_displs,
                   int64_t terms, const Counts& steps) {
    Request request(op_from_name(op), static_cast<int>(lists[0].size()));
    request.learns = lists[2].empty();
    const std::span<int64_t> arrays[] = {request.send_counts(), request.sdispls(), request.recv_counts(),
                                         request.rdispls()};
    for (size_t i = 0; i < 4; ++i)
        std::copy_n(lists[i].begin(), std::min(lists[i].size(), arrays[i].size()), arrays[i].begin());
    request.root = root;
    request.terms = terms;
    request.row = row;
    request.byte_displs = byte_displs;
    const size_t ranks = lists[0].size();
    if (!steps.empty() && steps.size() != 4 * ranks)
        throw invalid_param(1038, "steps has ", steps.size(), " entries, expected ", 4 * ranks);
    for (size_t i = 0; i < steps.size(); i += 2) {
        if (steps[i] < 0 || steps[i + 1] < steps[i])
            throw invalid_param(1039, "steps has rows of ", steps[i], " elements, ", steps[i + 1], " apart");
        (i < 2 * ranks ? request.send_steps : request.recv_steps).push_back({steps[i], steps[i + 1]});
    }
    return request;
}

}  // namespace

ReadyExchange::ReadyExchange(Request request, DType dtype, int rank)
    : request_(std::move(request)), exchange_(request_.exchange(dtype, nullptr, nullptr)) {
    summary_ = summarize(exchange_, rank);
    exchange_.summary = &summary_;
}

Exchange ReadyExchange::at(uintptr_t input, uintptr_t stream) const {
    Exchange exchange = exchange_;
    exchange.input = pointer(input);
    exchange.stream = pointer(stream);
    return exchange;
}

void ReadyExchange::run(Communicator& communicator, uintptr_t input, uintptr_t output, double timeout,
                        uintptr_t stream) const {
    Exchange exchange = at(input, stream);
    exchange.output = pointer(output);
    communicator.exchange(exchange, timeout);
}

std::vector<int64_t> ReadyExchange::compare(Communicator& communicator, double timeout) const {
    Exchange exchange = at(0, 0);
    exchange.moves = false;
    std::vector<int64_t> learnt;
    exchange.allocate = [&](std::span<const int64_t> counts) -> void* {
        learnt.assign(counts.begin(), counts.end());
        return nullptr;
    };
    communicator.exchange(exchange, timeout);
    return learnt;
}

void ReadyExchange::learn(Communicator& communicator, uintptr_t input, double timeout, Learnt& learnt) const {
    Exchange exchange = at(input, 0);
    const size_t element = size_of(exchange.dtype);
    exchange.allocate = [&](std::span<const int64_t> counts) -> void* {
        learnt.counts.assign(counts.begin(), counts.end());
        int64_t total = 0;
        for (const int64_t count : counts) total += count;
        learnt.block = Arena::instance().allocate(static_cast<size_t>(total) * element);
        return learnt.block.data();
    };
    communicator.exchange(exchange, timeout);
}

void ReadyExchange::learn(Communicator& communicator, uintptr_t input, double timeout, uintptr_t stream,
                          const std::function<uintptr_t(Counts)>& allocate) const {
    Exchange exchange = at(input, stream);
    exchange.allocate = [&](std::span<const int64_t> counts) -> void* {
        const GilHeld gil;
        return pointer(allocate(Counts(counts.begin(), counts.end())));
    };
    communicator.exchange(exchange, timeout);
}

Plan plan_of(CommunicatorPtr communicator, Request request, const std::string& dtype) {
    const int rank = communicator->rank();
    return {std::move(communicator),
            std::make_shared<const ReadyExchange>(std::move(request), dtype_from_name(dtype), rank)};
}

WorkPtr submit(Communicator& communicator, std::shared_ptr<const ReadyExchange> exchange, uintptr_t input,
               uintptr_t output, double timeout) {
    const OpKind op = exchange->request().op;
    return communicator.begin(op, [exchange = std::move(exchange), &communicator, input, output, timeout] {
        exchange->run(communicator, input, output, timeout);
    });
}

LearningWork submit_learning(Communicator& communicator, std::shared_ptr<const ReadyExchange> exchange, uintptr_t input,
                             double timeout) {
    auto learnt = std::make_shared<Learnt>();
    const OpKind op = exchange->request().op;
    WorkPtr work = communicator.begin(op, [exchange, &communicator, input, timeout, learnt] {
        exchange->learn(communicator, input, timeout, *learnt);
    });
    return {std::move(work), std::move(exchange), std::move(learnt)};
}

void bind_plan(nb::module_& m) {
    nb::class_<LearningWork>(m, "LearningWork")
        .def_ro("work", &LearningWork::work)
        .def(
            "take",
            [](const LearningWork& self) {
                return nb::make_tuple(Block(std::move(self.learnt->block)), self.learnt->counts);
            },
            "Once, after the work: the memory and the receive counts, in elements.")
        .def(
            "shape", [](const LearningWork& self) { return tuple_of(self.shape()); },
            nb::sig("def shape(self) -> tuple[int, ...]"), "Of the output, after the work.")
        .def(
            "output",
            [](const LearningWork& self, nb::handle like) {
                return nb::steal<nb::any>(
                    framework_of(like)->make(like, self.shape(), std::move(self.learnt->block)).release());
            },
            "like"_a, "Once, after the work: the output, of the kind and the dtype of the input.");

    nb::class_<Plan>(m, "Plan", "An exchange with its counts, ready to run on any buffers that fit them.")
        .def(
            "__init__",
            [](Plan* self, CommunicatorPtr communicator, const std::string& op, const std::string& dtype,
               Counts send_counts, Counts sdispls, Counts recv_counts, Counts rdispls, int root, int64_t row,
               bool byte_displs, int64_t terms, const Counts& steps) {
                const Counts lists[4] = {std::move(send_counts), std::move(sdispls), std::move(recv_counts),
                                         std::move(rdispls)};
                new (self) Plan(plan_of(std::move(communicator),
                                        request_of(op, lists, root, row, byte_displs, terms, steps), dtype));
            },
            "communicator"_a, "op"_a, "dtype"_a, "send_counts"_a, "sdispls"_a, "recv_counts"_a, "rdispls"_a,
            "root"_a = 0, "row"_a = 1, "byte_displs"_a = false, "terms"_a = 0, "steps"_a = Counts(),
            "Of counts that have been checked, in elements; see `Request.plan`. terms: what else the ranks agree on. "
            "steps: the length of rows and the distance between them, of every send region and then of every receive "
            "region, if they are not in one piece; a length 0 is one piece.")
        .def(
            "run",
            [](const Plan& self, uintptr_t input, uintptr_t output, double timeout, uintptr_t stream) {
                self.data->run(*self.communicator, input, output, timeout, stream);
            },
            ReleaseGil(), "input"_a, "output"_a, "timeout"_a = -1.0, "stream"_a = 0,
            "On a device's stream it is enqueued; without one the call blocks.")
        .def(
            "compare", [](const Plan& self, double timeout) { return self.data->compare(*self.communicator, timeout); },
            ReleaseGil(), "timeout"_a = -1.0,
            "The ranks' agreement alone, where the data move by other means. Returns the receive counts if they are "
            "learnt, else nothing.")
        .def(
            "run_learning",
            [](const Plan& self, uintptr_t input, double timeout) {
                Learnt learnt;
                {
                    const GilReleased release;
                    self.data->learn(*self.communicator, input, timeout, learnt);
                }
                return nb::make_tuple(std::move(learnt.block), learnt.counts);
            },
            "input"_a, "timeout"_a = -1.0,
            nb::sig("def run_learning(self, input: int, timeout: float = -1.0) -> tuple[Block, list[int]]"),
            "The memory, and the receive counts that the peers have announced, in elements.")
        .def(
            "run_learning_into",
            [](const Plan& self, uintptr_t input, const std::function<uintptr_t(Counts)>& allocate, double timeout,
               uintptr_t stream) { self.data->learn(*self.communicator, input, timeout, stream, allocate); },
            ReleaseGil(), "input"_a, "allocate"_a, "timeout"_a = -1.0, "stream"_a = 0,
            "The same with an output that `allocate` makes of the receive counts; it returns the address.")
        .def(
            "submit",
            [](const Plan& self, uintptr_t input, uintptr_t output, double timeout) {
                return submit(*self.communicator, self.data, input, output, timeout);
            },
            "input"_a, "output"_a, "timeout"_a = -1.0)
        .def(
            "submit_learning",
            [](const Plan& self, uintptr_t input, double timeout) {
                return submit_learning(*self.communicator, self.data, input, timeout);
            },
            "input"_a, "timeout"_a = -1.0);
}

}  // namespace alltoallv
