// Communicators over HCCL; libhccl and libascendcl are opened when the first of these functions needs them.
#include "bindings/bindings.h"
#include "runtime/bootstrap/registry.h"
#include "runtime/hccl/hccl_communicator.h"
#include "runtime/hccl/library.h"
#include "runtime/hccl/synchronization.h"
#include "runtime/hosts/tcp_communicator.h"
#include "runtime/shm/shm_communicator.h"

namespace alltoallv {
namespace {

/// Finds or makes the communicator. Its ranks agree in their own domain, over shared memory, or over TCP between hosts.
/// If the caller has since replaced the HcclComm of that name, the old communicator is left.
CommunicatorPtr find_or_make(const HcclOptions& hccl, CommunicatorOptions options, const CommunicatorFactory& make) {
    options.job += "/hccl";
    options.domain = hccl.domain;
    options.rank = hccl.rank;
    options.size = hccl.size;
    options.budget_mb = 0;
    const auto find = [&] {
        return find_or_make_communicator(options, [&](const CommunicatorOptions& control) {
            cann();  // before the peers have to wait
            return make(control);
        });
    };
    const CommunicatorPtr communicator = find();
    const auto* over_hccl = dynamic_cast<const HcclCommunicator*>(communicator.get());
    if (over_hccl == nullptr || over_hccl->borrowed() == hccl.comm) return communicator;
    communicator->destroy();
    return find();
}

CommunicatorPtr make_on_one_host(const HcclOptions& hccl, const CommunicatorOptions& options) {
    return find_or_make(hccl, options, [&hccl](const CommunicatorOptions& control) {
        return make_communicator<HcclCommunicator>(hccl, make_shm_communicator(control));
    });
}

CommunicatorPtr make_across_hosts(const HcclOptions& hccl, const CommunicatorOptions& options,
                                  const TcpAddress& rank_0) {
    return find_or_make(hccl, options, [&](const CommunicatorOptions& control) {
        if (!rank_0.host.empty())
            return make_communicator<HcclCommunicator>(hccl, make_tcp_communicator(control, rank_0));
        return make_communicator<HcclCommunicator>(hccl, nullptr, [&](const GatherBytes& gather, std::string& failure) {
            return make_tcp_communicator(control, gather, failure);
        });
    });
}

}  // namespace

void bind_hccl(nb::module_& m) {
    nb::class_<HcclOptions>(m, "HcclOptions")
        .def(nb::init<>())
        .def_rw("rank", &HcclOptions::rank)
        .def_rw("size", &HcclOptions::size)
        .def_rw("domain", &HcclOptions::domain)
        .def_rw("buffer_mb", &HcclOptions::buffer_mb)
        .def_rw("timeout", &HcclOptions::timeout)
        .def_rw("check", &HcclOptions::check)
        .def_rw("device", &HcclOptions::device)
        .def_prop_rw(
            "comm", [](const HcclOptions& self) { return reinterpret_cast<uintptr_t>(self.comm); },
            [](HcclOptions& self, uintptr_t comm) { self.comm = pointer(comm); })
        .def_rw("rank_table", &HcclOptions::rank_table);

    m.def(
        "hccl_communicator",
        [](const HcclOptions& options, CommunicatorPtr control) -> CommunicatorPtr {
            return make_communicator<HcclCommunicator>(options, std::move(control));
        },
        ReleaseGil(), "options"_a, "control"_a,
        "A new communicator over HCCL of the ranks of `control`, one in host memory on which they agree and which goes "
        "with it. Collective.");
    m.def(
        "hccl_communicator_on_host", &make_on_one_host, ReleaseGil(), "options"_a, "control"_a,
        "The communicator over HCCL of a domain whose ranks share this host and agree over shared memory, made if need "
        "be; `control` gives job, timeout and warn_after.");
    m.def(
        "hccl_communicator_across_hosts",
        [](const HcclOptions& options, const CommunicatorOptions& control, const std::string& host, int port) {
            return make_across_hosts(options, control, {host, port});
        },
        ReleaseGil(), "options"_a, "control"_a, "host"_a = "", "port"_a = 0,
        "The same for ranks that agree over TCP, with rank 0 listening on that port of that host. Without a host the "
        "options name an HcclComm or a rank table, and HCCL carries rank 0's addresses.");
    m.def(
        "hccl_comm_name", [](uintptr_t comm) { return name_of(static_cast<HcclComm>(pointer(comm))); }, "comm"_a,
        "HCCL's name of an HcclComm: equal on all of its ranks.");
    m.def(
        "hccl_comm_name",
        [](const CommunicatorPtr& communicator) {
            const auto* over_hccl = dynamic_cast<const HcclCommunicator*>(communicator.get());
            return over_hccl != nullptr ? over_hccl->hccl_name() : std::string();
        },
        "communicator"_a, "The same of ours, as HCCL's logs have it; empty where it has no HcclComm.");
    m.attr("kernels_rule") = kernels_rule;
    m.def("kernels_missing", &kernels_missing, ReleaseGil(),
          "Why the kernels in Ascend C cannot serve in this process; empty if they can.");
    m.def(
        "why_no_kernels",
        [](const CommunicatorPtr& communicator) {
            auto* const over_hccl = dynamic_cast<HcclCommunicator*>(communicator.get());
            return over_hccl == nullptr ? std::string("it is not over HCCL") : over_hccl->why_no_kernels();
        },
        ReleaseGil(), "communicator"_a,
        "Why they do not serve a communicator; empty if they do. Collective when it is first asked.");
    m.def(
        "exchange_counted_on_device",
        [](const CommunicatorPtr& communicator, const std::string& dtype, int64_t row, uintptr_t input,
           int64_t input_rows, uintptr_t send_counts, uintptr_t sdispls, uintptr_t output, int64_t capacity,
           bool expects, uintptr_t recv_counts, uintptr_t status, uintptr_t stream) {
            auto* const over_hccl = dynamic_cast<HcclCommunicator*>(communicator.get());
            if (over_hccl == nullptr)
                throw backend_unavailable(5004, "all_to_all_v with a capacity needs a communicator over HCCL, but '",
                                          communicator->domain(), "' is over ", communicator->backend());
            CountedOnDevice call;
            call.dtype = dtype_from_name(dtype);
            call.row = row;
            call.ranks = communicator->size();
            call.input = pointer(input);
            call.input_rows = input_rows;
            call.send_counts = pointer(send_counts);
            call.sdispls = pointer(sdispls);
            call.output = pointer(output);
            call.capacity = capacity;
            call.expects = expects;
            call.recv_counts = pointer(recv_counts);
            call.status = pointer(status);
            call.stream = pointer(stream);
            over_hccl->exchange_counted_on_device(call);
        },
        ReleaseGil(), "communicator"_a, "dtype"_a, "row"_a, "input"_a, "input_rows"_a, "send_counts"_a, "sdispls"_a,
        "output"_a, "capacity"_a, "expects"_a, "recv_counts"_a, "status"_a, "stream"_a,
        "Enqueues an all_to_all_v of rows of `row` elements, whose counts are int64 in device memory; sdispls may be "
        "0. "
        "status: int32, [48, 8].");
    m.def("leave_out_synchronizations", &leave_out_synchronizations, "names"_a,
          "For tests: names separated by commas, see op_host/runtime/hccl/synchronization.h.");
    m.def(
        "npu_current_device",
        [] {
            int32_t device = -1;
            return cann().aclrtGetDevice(&device) == 0 ? device : -1;
        },
        "The calling thread's device; -1 if it has none.");
    m.def(
        "cann_available", [] { return cann().HcclAlltoAllV != nullptr; },
        "True, or the error that describes what is missing.");
    m.def(
        "npu_devices",
        [] {
            const DeviceQuery query = query_devices();
            return nb::make_tuple(query.soc_name, query.count);
        },
        nb::sig("def npu_devices() -> tuple[str, int]"), "Name of the SoC and number of visible devices.");
}

}  // namespace alltoallv
