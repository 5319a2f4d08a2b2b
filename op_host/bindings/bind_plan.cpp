// Exchanges: the counts are converted once, a call passes two addresses.
#include <nanobind/stl/function.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>
#include <vector>

#include "bindings/array_call.h"
#include "bindings/bindings.h"
#include "core/communicator.h"
#include "transport/shm/arena.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

using Counts = std::vector<int64_t>;

struct Learnt {
    Block block;
    Counts counts;
};

/// Counts and descriptor of an exchange; pending calls share them with the Plan and need no Python to drop them.
class PlanData {
  public:
    PlanData(int rank, const std::string& op, const std::string& dtype, Counts send_counts, Counts sdispls,
             Counts recv_counts, Counts rdispls, int64_t root, int64_t row, bool byte_displs)
        : send_counts_(std::move(send_counts)),
          sdispls_(std::move(sdispls)),
          recv_counts_(std::move(recv_counts)),
          rdispls_(std::move(rdispls)) {
        exchange_.op = op_from_name(op);
        exchange_.dtype = dtype_from_name(dtype);
        exchange_.root = root;
        exchange_.row = row;
        exchange_.byte_displs = byte_displs;
        exchange_.send_counts = send_counts_;
        exchange_.sdispls = sdispls_;
        exchange_.recv_counts = recv_counts_;
        exchange_.rdispls = rdispls_;
        summary_ = summarize(exchange_, rank);
        exchange_.summary = &summary_;
    }
    PlanData(const PlanData&) = delete;  // the exchange points into this object
    PlanData& operator=(const PlanData&) = delete;

    void run(Communicator& communicator, uintptr_t input, uintptr_t output, double timeout,
             uintptr_t stream = 0) const {
        Exchange exchange = exchange_;
        exchange.input = pointer(input);
        exchange.output = pointer(output);
        exchange.stream = pointer(stream);
        communicator.exchange(exchange, timeout);
    }

    void run_learning(Communicator& communicator, uintptr_t input, double timeout, Learnt& learnt) const {
        Exchange exchange = exchange_;
        exchange.input = pointer(input);
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

    void run_learning_into(Communicator& communicator, uintptr_t input,
                           const std::function<uintptr_t(Counts)>& allocate, double timeout, uintptr_t stream) const {
        Exchange exchange = exchange_;
        exchange.input = pointer(input);
        exchange.stream = pointer(stream);
        exchange.allocate = [&](std::span<const int64_t> counts) -> void* {
            const nb::gil_scoped_acquire gil;
            return pointer(allocate(Counts(counts.begin(), counts.end())));
        };
        communicator.exchange(exchange, timeout);
    }

  private:
    Counts send_counts_, sdispls_, recv_counts_, rdispls_;
    Exchange exchange_;
    ExchangeSummary summary_;
};

struct Plan {
    CommunicatorPtr communicator;
    std::shared_ptr<const PlanData> data;
};

/// An asynchronous call whose output is known only at its end.
struct LearningWork {
    WorkPtr work;
    std::shared_ptr<Learnt> learnt;
};

}  // namespace

void bind_plan(nb::module_& m) {
    nb::class_<LearningWork>(m, "LearningWork")
        .def_ro("work", &LearningWork::work)
        .def("take", [](const LearningWork& self) {
            return nb::make_tuple(Block(std::move(self.learnt->block)), self.learnt->counts);
        });

    nb::class_<Plan>(m, "Plan", "An exchange with its counts, ready to run on any buffers that fit them.")
        .def(
            "__init__",
            [](Plan* self, CommunicatorPtr communicator, const std::string& op, const std::string& dtype,
               Counts send_counts, Counts sdispls, Counts recv_counts, Counts rdispls, int64_t root, int64_t row,
               bool byte_displs) {
                const int rank = communicator->rank();
                new (self) Plan{
                    std::move(communicator),
                    std::make_shared<PlanData>(rank, op, dtype, std::move(send_counts), std::move(sdispls),
                                               std::move(recv_counts), std::move(rdispls), root, row, byte_displs)};
            },
            nb::arg("communicator"), nb::arg("op"), nb::arg("dtype"), nb::arg("send_counts"), nb::arg("sdispls"),
            nb::arg("recv_counts"), nb::arg("rdispls"), nb::arg("root") = 0, nb::arg("row") = 1,
            nb::arg("byte_displs") = false)
        .def(
            "run",
            [](const Plan& self, uintptr_t input, uintptr_t output, double timeout, uintptr_t stream) {
                const nb::gil_scoped_release release;
                self.data->run(*self.communicator, input, output, timeout, stream);
            },
            nb::arg("input"), nb::arg("output"), nb::arg("timeout") = -1.0, nb::arg("stream") = 0,
            "On a device's stream it is enqueued; without one the call blocks.")
        .def(
            "run_learning",
            [](const Plan& self, uintptr_t input, double timeout) {
                Learnt learnt;
                {
                    const nb::gil_scoped_release release;
                    self.data->run_learning(*self.communicator, input, timeout, learnt);
                }
                return nb::make_tuple(std::move(learnt.block), learnt.counts);
            },
            nb::arg("input"), nb::arg("timeout") = -1.0, "Receive counts from the peers: (block, recv_counts).")
        .def(
            "run_learning_into",
            [](const Plan& self, uintptr_t input, const std::function<uintptr_t(Counts)>& allocate, double timeout,
               uintptr_t stream) {
                const nb::gil_scoped_release release;
                self.data->run_learning_into(*self.communicator, input, allocate, timeout, stream);
            },
            nb::arg("input"), nb::arg("allocate"), nb::arg("timeout") = -1.0, nb::arg("stream") = 0,
            "The same with an output that `allocate` makes of the receive counts; it returns the address.")
        .def(
            "submit",
            [](const Plan& self, uintptr_t input, uintptr_t output, double timeout) {
                // The queue belongs to the communicator and ends before it: a plain pointer is enough.
                return self.communicator->submit([data = self.data, communicator = self.communicator.get(), input,
                                                  output,
                                                  timeout] { data->run(*communicator, input, output, timeout); });
            },
            nb::arg("input"), nb::arg("output"), nb::arg("timeout") = -1.0)
        .def(
            "submit_learning",
            [](const Plan& self, uintptr_t input, double timeout) {
                auto learnt = std::make_shared<Learnt>();
                WorkPtr work =
                    self.communicator->submit([data = self.data, communicator = self.communicator.get(), input, timeout,
                                               learnt] { data->run_learning(*communicator, input, timeout, *learnt); });
                return LearningWork{std::move(work), std::move(learnt)};
            },
            nb::arg("input"), nb::arg("timeout") = -1.0)
        .def(
            "on_arrays",
            [](const Plan& self, Arrays arrays) {
                return ArrayCall{std::move(arrays), false,
                                 [plan = self](uintptr_t input, uintptr_t output, double timeout) {
                                     plan.data->run(*plan.communicator, input, output, timeout);
                                 }};
            },
            nb::arg("arrays"), "The same for such arrays, apart from each other.");
}

}  // namespace alltoallv
