// Python's view of op_host/atb: the param, its checks, and the ATB-shaped operator on raw addresses.
#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "atb/all_to_all_v.h"
#include "base/error.h"
#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace alltoallv {
namespace {

using Values = std::vector<int64_t>;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

constexpr std::array<std::string_view, 4> format_names{"nd", "nchw", "nhwc", "fractal_nz"};

DType dtype_of(std::string_view name) {
    const auto found = std::ranges::find(dtype_table, name, &DTypeInfo::name);
    if (found != dtype_table.end()) return static_cast<DType>(found - dtype_table.begin());
    throw invalid_tensor(ErrorType::INVALID_TENSOR_INI_MATCH, "dtype \"" + std::string(name) + "\" is not known");
}

Format format_of(std::string_view name) {
    const auto found = std::ranges::find(format_names, name);
    if (found != format_names.end()) return static_cast<Format>(found - format_names.begin());
    throw invalid_tensor(ErrorType::INVALID_TENSOR_INI_MATCH,
                         "format \"" + std::string(name) + "\" is not known, expected \"nd\"");
}

/// Arrays are read as tuples: changing a copy in place would be lost silently.
template <Values AllToAllVParam::* field>
nb::typed<nb::tuple, int64_t, nb::ellipsis> get_values(const AllToAllVParam& param) {
    nb::list list;
    for (const int64_t value : param.*field) list.append(value);
    return nb::borrow<nb::typed<nb::tuple, int64_t, nb::ellipsis>>(nb::tuple(list));
}

template <Values AllToAllVParam::* field>
void set_values(AllToAllVParam& param, Values values) {
    param.*field = std::move(values);
}

nb::bytes get_rsv(const AllToAllVParam& param) {
    return nb::bytes(param.rsv.data(), param.rsv.size());
}

void set_rsv(AllToAllVParam& param, nb::handle value) {
    std::vector<uint8_t> bytes;
    if (!nb::try_cast(nb::list(value), bytes)) throw invalid_param("rsv holds values other than integers of 0 to 255");
    if (bytes.size() > param.rsv.size()) {
        throw invalid_param("rsv has " + std::to_string(bytes.size()) + " bytes, expected at most 64");
    }
    param.rsv.fill(0);
    std::ranges::copy(bytes, param.rsv.begin());
}

nb::object get_comm_mode(const AllToAllVParam& param) {
    const bool is_member = param.comm_mode >= CommMode::UNDEFINED && param.comm_mode <= CommMode::MULTI_THREAD;
    return is_member ? nb::cast(param.comm_mode) : nb::cast(static_cast<int>(param.comm_mode));
}

/// Any number passes here, as in ATB; `check_create` judges it.
void set_comm_mode(AllToAllVParam& param, int value) {
    param.comm_mode = static_cast<CommMode>(value);
}

uintptr_t get_hccl_comm(const AllToAllVParam& param) {
    return reinterpret_cast<uintptr_t>(param.hccl_comm);
}
void set_hccl_comm(AllToAllVParam& param, uintptr_t value) {
    param.hccl_comm = reinterpret_cast<void*>(value);
}

std::string repr(nb::handle self) {
    std::string text = "AllToAllVParam(";
    for (const char* name : {"rank", "rank_size", "rank_root", "send_counts", "sdispls", "recv_counts", "rdispls",
                             "backend", "hccl_comm", "comm_mode", "rank_table_file", "comm_domain"}) {
        text += std::string(name) + "=" + nb::repr(self.attr(name)).c_str() + ", ";
    }
    return text + "rsv=" + nb::repr(self.attr("rsv").attr("rstrip")(nb::bytes("\0", 1))).c_str() + ")";
}

/// Assigns keywords through the properties, so that both ways of setting a field accept the same values.
void init_param(AllToAllVParam* self, int rank, int rank_size, int rank_root, Values send_counts, Values sdispls,
                Values recv_counts, Values rdispls, std::string backend, uintptr_t hccl_comm, int comm_mode,
                std::string rank_table_file, std::string comm_domain, nb::handle rsv) {
    AllToAllVParam param{rank,
                         rank_size,
                         rank_root,
                         std::move(send_counts),
                         std::move(sdispls),
                         std::move(recv_counts),
                         std::move(rdispls),
                         std::move(backend),
                         reinterpret_cast<void*>(hccl_comm),
                         static_cast<CommMode>(comm_mode),
                         std::move(rank_table_file),
                         std::move(comm_domain),
                         {}};
    set_rsv(param, rsv);
    new (self) AllToAllVParam(std::move(param));
}

void bind_param(nb::module_& m) {
    nb::class_<DeviceInfo>(m, "DeviceInfo", "The NPU an operation will run on: its SoC name and the visible devices.")
        .def(nb::init<std::string, int>(), "soc_name"_a, "device_count"_a)
        .def_rw("soc_name", &DeviceInfo::soc_name)
        .def_rw("device_count", &DeviceInfo::device_count);

    nb::enum_<CommMode>(m, "CommMode", nb::is_arithmetic(), "Whether the ranks are processes or threads of one.")
        .value("UNDEFINED", CommMode::UNDEFINED)
        .value("MULTI_PROCESS", CommMode::MULTI_PROCESS)
        .value("MULTI_THREAD", CommMode::MULTI_THREAD);

    using Param = AllToAllVParam;
    nb::class_<Param>(m, "AllToAllVParam", "Parameters of the ATB-shaped AllToAllV operator.")
        .def("__init__", &init_param, nb::kw_only(), "rank"_a = 0, "rank_size"_a = 0, "rank_root"_a = 0,
             "send_counts"_a = Values(), "sdispls"_a = Values(), "recv_counts"_a = Values(), "rdispls"_a = Values(),
             "backend"_a = "hccl", "hccl_comm"_a = 0, "comm_mode"_a = 0, "rank_table_file"_a = "", "comm_domain"_a = "",
             "rsv"_a = nb::bytes("", 0))
        .def_rw("rank", &Param::rank)
        .def_rw("rank_size", &Param::rank_size)
        .def_rw("rank_root", &Param::rank_root)
        .def_prop_rw("send_counts", get_values<&Param::send_counts>, set_values<&Param::send_counts>)
        .def_prop_rw("sdispls", get_values<&Param::sdispls>, set_values<&Param::sdispls>)
        .def_prop_rw("recv_counts", get_values<&Param::recv_counts>, set_values<&Param::recv_counts>)
        .def_prop_rw("rdispls", get_values<&Param::rdispls>, set_values<&Param::rdispls>)
        .def_rw("backend", &Param::backend)
        .def_prop_rw("hccl_comm", get_hccl_comm, set_hccl_comm, "Address of an HcclComm that the caller owns, or 0.")
        .def_prop_rw("comm_mode", get_comm_mode, set_comm_mode,
                     nb::for_getter(nb::sig("def comm_mode(self, /) -> int")))
        .def_rw("rank_table_file", &Param::rank_table_file)
        .def_rw("comm_domain", &Param::comm_domain)
        .def_prop_rw("rsv", get_rsv, set_rsv, "64 reserved bytes; fewer are padded with zeros.")
        .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
        .def("__hash__", [](const Param&) -> int { throw nb::type_error("AllToAllVParam is mutable, not hashable"); })
        .def("__repr__", &repr);
}

void bind_checks(nb::module_& m) {
    m.def(
        "check_create",
        [](const AllToAllVParam& param, std::optional<DeviceInfo> device) {
            check_create(param, device ? &*device : nullptr);
        },
        "param"_a, "device"_a = nb::none(), "ATB's CreateOperation checks, in ATB's order.");
    m.def(
        "infer_shape",
        [](const AllToAllVParam& param, Values shape, std::string_view dtype, std::string_view format,
           std::optional<DeviceInfo> device) {
            const TensorDesc input{dtype_of(dtype), std::move(shape), format_of(format)};
            return infer_shape(param, {&input, 1}, device ? &*device : nullptr).shape;
        },
        "param"_a, "shape"_a, "dtype"_a, "format"_a = "nd", "device"_a = nb::none(),
        "Shape of the output; talks to no peer.");
    m.def(
        "check_exchange",
        [](int64_t numel_in, int64_t numel_out, const Values& send_counts, const Values& sdispls,
           const Values& recv_counts, const Values& rdispls, int world_size) {
            return check_exchange(numel_in, numel_out, send_counts, sdispls, recv_counts, rdispls, world_size);
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
        "The sending half of check_exchange, for receive counts that the peers will tell.");
    m.def(
        "parse_domain",
        [](std::string_view text) {
            const Domain domain = parse_domain(text);
            return nb::make_tuple(domain.name, domain.megabytes);
        },
        "text"_a, nb::sig("def parse_domain(text: str) -> tuple[str, int | None]"),
        "Name of a comm_domain, and its buffer budget in MB where it says one.");
}

/// The owner's communicator, or its function, or neither: then the first need of one is an error.
void init_operation(AllToAllVOperation* self, const AllToAllVParam& param, std::optional<DeviceInfo> device,
                    CommunicatorPtr communicator, Connect connect) {
    if (communicator != nullptr) connect = [communicator](const AllToAllVParam&) { return communicator; };
    new (self) AllToAllVOperation(param, std::move(device), std::move(connect));
}

void execute(AllToAllVOperation& self, uintptr_t input, uint64_t input_bytes, uintptr_t output, uint64_t output_bytes,
             double timeout, uintptr_t stream) {
    const Buffer in{reinterpret_cast<void*>(input), input_bytes}, out{reinterpret_cast<void*>(output), output_bytes};
    self.execute({&in, 1}, {&out, 1}, timeout, pointer(stream));
}

/// Peers raise the class that belongs to the code.
ErrorClass class_of(int code) {
    const auto within = [code](ErrorType first, ErrorType last) {
        return code >= static_cast<int>(first) && code <= static_cast<int>(last);
    };
    const bool is_tensor = within(ErrorType::INVALID_IN_TENSOR_NUM, ErrorType::INVALID_TENSOR_SIZE) ||
                           within(ErrorType::INVALID_TENSOR_INI_MATCH, ErrorType::INVALID_TENSOR_DIM_NUM);
    return is_tensor ? ErrorClass::invalid_tensor : ErrorClass::invalid_param;
}

void bind_operator(nb::module_& m) {
    nb::class_<TensorDesc>(m, "TensorDesc", "Shape, dtype and format of a tensor.")
        .def(
            "__init__",
            [](TensorDesc* self, Values shape, std::string_view dtype, std::string_view format) {
                new (self) TensorDesc{dtype_of(dtype), std::move(shape), format_of(format)};
            },
            "shape"_a, "dtype"_a, "format"_a = "nd")
        .def_ro("shape", &TensorDesc::shape)
        .def_prop_ro("dtype", [](const TensorDesc& desc) { return std::string(name_of(desc.dtype)); })
        .def_prop_ro("format", [](const TensorDesc& desc) { return format_names[static_cast<size_t>(desc.format)]; });

    using Operation = AllToAllVOperation;
    using Descs = std::vector<TensorDesc>;
    nb::class_<Operation>(m, "AllToAllVOperation", "The ATB-shaped operator on raw addresses.")
        .def("__init__", &init_operation, "param"_a, "device"_a = nb::none(), "communicator"_a = nb::none(),
             "connect"_a = nb::none())
        .def_prop_ro("param", [](const Operation& self) { return self.param(); })
        .def(
            "infer_shape", [](Operation& self, const Descs& inputs) { return self.infer_shape(inputs); }, "inputs"_a,
            ReleaseGil())
        .def(
            "setup", [](Operation& self, const Descs& inputs, const Descs& outputs) { self.setup(inputs, outputs); },
            "inputs"_a, "outputs"_a, ReleaseGil())
        .def("workspace_size", &Operation::workspace_size)
        .def("execute", &execute, "input"_a, "input_bytes"_a, "output"_a, "output_bytes"_a, "timeout"_a = -1.0,
             "stream"_a = 0, ReleaseGil(),
             "Addresses and sizes in bytes of the two tensors; timeout in seconds, negative: the "
             "communicator's own; on a device's stream it is enqueued.")
        .def(
            "announce",
            [](Operation& self, int code, const std::string& message) {
                self.announce({class_of(code), static_cast<ErrorType>(code), message});
            },
            "code"_a, "message"_a, ReleaseGil(), "Tells the peers that this rank fails its next call.");
}

}  // namespace

void bind_operation(nb::module_& m) {
    bind_param(m);
    bind_checks(m);
    bind_operator(m);
}

}  // namespace alltoallv
