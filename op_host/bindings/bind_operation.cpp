// Binds op_host/all_to_all_v and quant_all_reduce: the params, their checks, and the ATB-shaped operators on raw
// addresses.
#include <nanobind/operators.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "all_to_all_v/all_to_all_v.h"
#include "bindings/bindings.h"
#include "bindings/guarded.h"
#include "bindings/lock.h"
#include "quant_all_reduce/quant_all_reduce.h"
#include "runtime/base/error.h"
#include "runtime/core/regions.h"

namespace alltoallv {
namespace {

using Values = std::vector<int64_t>;
using Param = AllToAllVParam;

constexpr std::array<std::string_view, 4> format_names{"nd", "nchw", "nhwc", "fractal_nz"};

TensorDesc make_desc(Values shape, std::string_view dtype, std::string_view format) {
    const std::optional<DType> type = table_dtype(dtype);
    const auto layout = std::ranges::find(format_names, format);
    if (!type) throw invalid_tensor(2021, ErrorType::INVALID_TENSOR_INI_MATCH, "dtype \"", dtype, "\" is not known");
    if (layout == format_names.end())
        throw invalid_tensor(2022, ErrorType::INVALID_TENSOR_INI_MATCH, "format \"", format,
                             "\" is not known, expected \"nd\"");
    return {*type, std::move(shape), static_cast<Format>(layout - format_names.begin())};
}

void set_rsv(Param& param, nb::handle value) {
    std::vector<uint8_t> bytes;
    if (!nb::try_cast(nb::list(value), bytes))
        throw invalid_param(1036, "rsv holds values other than integers of 0 to 255");
    if (bytes.size() > param.rsv.size())
        throw invalid_param(1037, "rsv has ", bytes.size(), " bytes, expected at most 64");
    param.rsv.fill(0);
    std::ranges::copy(bytes, param.rsv.begin());
}

nb::object get_comm_mode(const Param& param) {
    const bool is_member = param.comm_mode >= CommMode::UNDEFINED && param.comm_mode <= CommMode::MULTI_THREAD;
    return is_member ? nb::cast(param.comm_mode) : nb::cast(static_cast<int>(param.comm_mode));
}

/// Accepts any number, as in ATB; `check_create` checks it.
void set_comm_mode(Param& param, int value) {
    param.comm_mode = static_cast<CommMode>(value);
}

std::string repr(nb::handle self) {
    std::string text = "AllToAllVParam(";
    for (const char* name : {"rank", "rank_size", "rank_root", "send_counts", "sdispls", "recv_counts", "rdispls",
                             "backend", "hccl_comm", "comm_mode", "rank_table_file", "comm_domain"})
        text += std::string(name) + "=" + nb::repr(self.attr(name)).c_str() + ", ";
    return text + "rsv=" + nb::repr(self.attr("rsv").attr("rstrip")(nb::bytes("\0", 1))).c_str() + ")";
}

void bind_params(nb::module_& m) {
    nb::class_<DeviceInfo>(m, "DeviceInfo", "The NPU an operation will run on: its SoC name and the visible devices.")
        .def(nb::init<std::string, int>(), "soc_name"_a, "device_count"_a)
        .def_rw("soc_name", &DeviceInfo::soc_name)
        .def_rw("device_count", &DeviceInfo::device_count);

    nb::enum_<CommMode>(m, "CommMode", nb::is_arithmetic(), "Whether the ranks are processes or threads of one.")
        .value("UNDEFINED", CommMode::UNDEFINED)
        .value("MULTI_PROCESS", CommMode::MULTI_PROCESS)
        .value("MULTI_THREAD", CommMode::MULTI_THREAD);

    auto param = nb::class_<Param>(m, "AllToAllVParam", "Parameters of the ATB-shaped AllToAllV operator.")
                     .def(nb::init<>())
                     .def_rw("rank", &Param::rank)
                     .def_rw("rank_size", &Param::rank_size)
                     .def_rw("rank_root", &Param::rank_root)
                     .def_rw("backend", &Param::backend)
                     .def_prop_rw(
                         "hccl_comm", [](const Param& self) { return reinterpret_cast<uintptr_t>(self.hccl_comm); },
                         [](Param& self, uintptr_t comm) { self.hccl_comm = pointer(comm); },
                         "Address of an HcclComm that the caller owns, or 0.")
                     .def_prop_rw("comm_mode", get_comm_mode, set_comm_mode,
                                  nb::for_getter(nb::sig("def comm_mode(self, /) -> int")))
                     .def_rw("rank_table_file", &Param::rank_table_file)
                     .def_rw("comm_domain", &Param::comm_domain)
                     .def_prop_rw(
                         "rsv", [](const Param& self) { return nb::bytes(self.rsv.data(), self.rsv.size()); }, set_rsv,
                         "64 reserved bytes; fewer are padded with zeros.")
                     .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
                     .def("__hash__",
                          [](const Param&) -> int { throw nb::type_error("AllToAllVParam is mutable, not hashable"); })
                     .def("__repr__", &repr);
    // Arrays are read as tuples, because a change of a copy in place would be lost silently.
    const auto bind_array = [&param](const char* name, Values Param::* field) {
        param.def_prop_rw(
            name,
            [field](const Param& self) {
                return nb::borrow<nb::typed<nb::tuple, int64_t, nb::ellipsis>>(tuple_of(self.*field));
            },
            [field](Param& self, Values values) { self.*field = std::move(values); });
    };
    bind_array("send_counts", &Param::send_counts);
    bind_array("sdispls", &Param::sdispls);
    bind_array("recv_counts", &Param::recv_counts);
    bind_array("rdispls", &Param::rdispls);

    nb::class_<QuantAllReduceParam>(m, "QuantAllReduceParam", "ATB's quantized AllReduce; `group` has no counts.")
        .def(
            "__init__",
            [](QuantAllReduceParam* self, const Param& group, std::string all_reduce_type, int quant_type,
               int out_data_type, const FormatName& format, int64_t group_size, bool requantizes,
               const std::string& overflow) {
                const Overflow handling = overflow_from_name(overflow);
                const CodeFormat codes = format_from_name(format);
                auto* built = new (self) QuantAllReduceParam;
                built->group = group;
                built->all_reduce_type = std::move(all_reduce_type);
                built->quant_type = static_cast<QuantType>(quant_type);
                built->out_data_type = out_data_type;
                built->format = codes;
                built->group_size = group_size;
                built->requantizes = requantizes;
                built->overflow = handling;
            },
            "group"_a, "all_reduce_type"_a, "quant_type"_a, "out_data_type"_a, "format"_a = "int8",
            "group_size"_a = 128, "requantizes"_a = false, "overflow"_a = "saturate");
}

void bind_checks(nb::module_& m) {
    m.def("check_ranks", &check_ranks, "rank"_a, "rank_size"_a, "own_rank"_a, "size"_a, "domain"_a,
          "Raises InvalidParamError unless a param's two are the communicator's.");
    m.def("check_create", &check_create, "param"_a, "device"_a = nb::none(),
          "ATB's CreateOperation checks, in ATB's order.");
    m.def(
        "infer_shape",
        [](const Param& param, Values shape, std::string_view dtype, std::string_view format,
           const std::optional<DeviceInfo>& device) {
            const TensorDesc input = make_desc(std::move(shape), dtype, format);
            return infer_shape(param, {&input, 1}, device).shape;
        },
        "param"_a, "shape"_a, "dtype"_a, "format"_a = "nd", "device"_a = nb::none(),
        "Shape of the output; talks to no peer.");
    m.def(
        "check_exchange",
        [](int64_t numel_in, int64_t numel_out, const Values& send_counts, const Values& sdispls,
           const Values& recv_counts, const Values& rdispls, int world_size) {
            check_send(numel_in, send_counts, sdispls, world_size);
            return check_receive(numel_out, recv_counts, rdispls, world_size);
        },
        "numel_in"_a, "numel_out"_a, "send_counts"_a, "sdispls"_a, "recv_counts"_a, "rdispls"_a, "world_size"_a,
        "Bounds and overlap of one rank's regions; numel_out -1 is an output not allocated yet. Returns the "
        "elements that the output needs.");
    m.def(
        "check_send",
        [](int64_t numel, const Values& counts, const Values& displs, int world_size) {
            check_send(numel, counts, displs, world_size);
        },
        "numel"_a, "counts"_a, "displs"_a, "world_size"_a,
        "The sending half of check_exchange, for receive counts that the peers will announce.");
    m.def(
        "parse_domain",
        [](std::string_view text) {
            const Domain domain = parse_domain(text, "domain");
            return nb::make_tuple(domain.name, domain.megabytes);
        },
        "text"_a, nb::sig("def parse_domain(text: str) -> tuple[str, int | None]"),
        "Name of a domain, and its buffer budget in MB where it says one.");
}

/// Makes the operation with a communicator, with a function that returns one, or with neither: then needing one fails.
template <class Op, class OpParam>
nb::class_<Op, Operation> bind_operator(nb::module_& m, const char* name) {
    return nb::class_<Op, Operation>(m, name, "The ATB-shaped operator on raw addresses.")
        .def(
            "__init__",
            [](Op* self, const OpParam& param, std::optional<DeviceInfo> device, CommunicatorPtr communicator,
               Connect connect) {
                if (communicator != nullptr) connect = [communicator](const Param&) { return communicator; };
                new (self) Op(param, std::move(device), std::move(connect));
            },
            "param"_a, "device"_a = nb::none(), "communicator"_a = nb::none(), "connect"_a = nb::none());
}

nb::object call_set_up(AllToAllVOperation& self, nb::handle x, nb::object out, nb::handle timeout) {
    const double limit = PyFloat_CheckExact(timeout.ptr()) ? PyFloat_AsDouble(timeout.ptr()) : -1.0;
    if (!timeout.is_none() && !(limit > 0)) return nb::none();
    const ArrayPair arrays(x, out);
    if (!arrays) return nb::none();
    const auto plan = self.plan_for(arrays.input.dtype, arrays.input.shape);
    if (plan == nullptr || plan->communicator->backend() == "hccl") return nb::none();
    Request result(OpKind::all_to_all_v, 0);
    result.shape = plan->outputs[0].shape;
    if (arrays.has_output && (!std::ranges::equal(arrays.output.shape, result.shape) ||
                              overlaps(arrays.output.bytes(), arrays.input.bytes())))
        return nb::none();
    Target target =
        guarded(*plan->communicator, result.op, [&] { return target_of(arrays, x, std::move(out), result); });
    const size_t bytes = static_cast<size_t>(element_count(result.shape)) * size_of(arrays.input.dtype);
    const ByteRange input = arrays.input.bytes(), output{target.address, bytes};
    {
        const LockReleased released(*plan->communicator, std::max(input.bytes, output.bytes));
        self.execute({&input, 1}, {&output, 1}, limit);
    }
    return std::move(target.array);
}

void bind_operations(nb::module_& m) {
    nb::class_<TensorDesc>(m, "TensorDesc", "Shape, dtype and format of a tensor.")
        .def(
            "__init__",
            [](TensorDesc* self, Values shape, std::string_view dtype, std::string_view format) {
                new (self) TensorDesc(make_desc(std::move(shape), dtype, format));
            },
            "shape"_a, "dtype"_a, "format"_a = "nd")
        .def_ro("shape", &TensorDesc::shape)
        .def_prop_ro("dtype", [](const TensorDesc& desc) { return std::string(name_of(desc.dtype)); })
        .def_prop_ro("format", [](const TensorDesc& desc) { return format_names[static_cast<size_t>(desc.format)]; });

    using Descs = std::vector<TensorDesc>;
    using Places = std::vector<std::pair<uintptr_t, size_t>>;
    nb::class_<Operation>(m, "Operation", "Base class of the ATB-shaped operators.")
        .def(
            "check",
            [](const Operation& self, const Descs& inputs, const Descs& outputs) {
                return self.check(inputs, outputs);
            },
            "inputs"_a, "outputs"_a,
            "The output, after the checks of infer_shape and setup; the peers are not notified.")
        .def(
            "infer_shape", [](Operation& self, const Descs& inputs) { return self.infer_shape(inputs); }, "inputs"_a,
            ReleaseGil())
        .def(
            "setup", [](Operation& self, const Descs& inputs, const Descs& outputs) { self.setup(inputs, outputs); },
            "inputs"_a, "outputs"_a, ReleaseGil())
        .def("workspace_size", &Operation::workspace_size)
        .def(
            "execute",
            [](Operation& self, const Places& inputs, const Places& outputs, double timeout, uintptr_t stream) {
                std::vector<ByteRange> ins, outs;
                for (const auto& [address, bytes] : inputs) ins.push_back({address, bytes});
                for (const auto& [address, bytes] : outputs) outs.push_back({address, bytes});
                self.execute(ins, outs, timeout, pointer(stream));
            },
            "inputs"_a, "outputs"_a, "timeout"_a = -1.0, "stream"_a = 0, ReleaseGil(),
            "Pairs of address and bytes; timeout in seconds, negative: the communicator's own; on a device's stream it "
            "is enqueued.")
        .def(
            "announce",
            [](Operation& self, nb::handle error) {
                const Error told = error_of(error);
                const GilReleased release;
                self.announce(told);
            },
            "error"_a, "Tells the peers that this rank fails its next call.");
    bind_operator<AllToAllVOperation, Param>(m, "AllToAllVOperation")
        .def("call", untyped(&call_set_up), "x"_a.none(), "out"_a.none(), "timeout"_a.none(),
             "Runs on tensors for which it is set up, and returns the output; None, with nothing done, for others.")
        .def_prop_ro("param", [](const AllToAllVOperation& self) { return self.param(); });
    bind_operator<QuantAllReduceOperation, QuantAllReduceParam>(m, "QuantAllReduceOperation");
}

}  // namespace

void bind_operation(nb::module_& m) {
    bind_params(m);
    bind_checks(m);
    bind_operations(m);
}

}  // namespace alltoallv
