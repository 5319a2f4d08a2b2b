// Binds quantized reductions, and the rows of quantized exchanges, on raw addresses.
#include <algorithm>
#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "op_kernel/cpu/bounds.h"
#include "op_kernel/cpu/coded_rows.h"
#include "runtime/core/communicator.h"
#include "runtime/core/quant_terms.h"
#include "runtime/hccl/hccl_communicator.h"

namespace alltoallv {
namespace {

/// The address of an optional array; an array without elements may have address 0.
using Address = std::optional<uintptr_t>;

std::vector<float> floats_at(uintptr_t address, size_t count) {
    const auto* first = pointer<const float>(address);
    return {first, first + count};
}

/// A call without its addresses; pending calls share it with the plan and need no Python to release it.
struct QuantPlanData {
    QuantReduction request;  // its spans are of the vectors
    std::vector<int64_t> counts;
    std::vector<float> scale, scale_2;

    void run(Communicator& communicator, uintptr_t input, uintptr_t output, Address error, Address gather_error,
             uintptr_t bounds, double timeout) const {
        QuantReduction call = request;
        call.bounds = pointer<float>(bounds);
        call.input = pointer(input);
        call.output = pointer(output);
        call.feeds_back = error.has_value();
        call.gather_feeds_back = gather_error.has_value();
        call.error = pointer<float>(error.value_or(0));
        call.gather_error = pointer<float>(gather_error.value_or(0));
        communicator.quant_reduce(call, timeout);
    }

    bool launch(Communicator& communicator, uintptr_t input, uintptr_t output,
                std::pair<uintptr_t, uintptr_t> scale_and_offset, std::pair<bool, bool> feedback,
                uintptr_t stream) const {
        QuantReduction call = request;
        bool launched = false;
        call.launched = &launched;
        call.input = pointer(input);
        call.output = pointer(output);
        call.device_scale = pointer<const float>(scale_and_offset.first);
        call.device_offset = pointer<const float>(scale_and_offset.second);
        std::tie(call.feeds_back, call.gather_feeds_back) = feedback;
        call.stream = pointer(stream);
        communicator.quant_reduce(call, -1);
        return launched;
    }

    void compare(Communicator& communicator, bool feeds_back, bool gather_feeds_back) const {
        QuantReduction call = request;
        call.moves = false;
        call.feeds_back = feeds_back;
        call.gather_feeds_back = gather_feeds_back;
        communicator.quant_reduce(call, -1);
    }
};

struct QuantPlan {
    CommunicatorPtr communicator;
    std::shared_ptr<const QuantPlanData> data;
};

void make_plan(QuantPlan* self, CommunicatorPtr communicator, const std::string& op, const std::string& dtype,
               const std::string& out_dtype, std::vector<int64_t> counts, const FormatName& format, int64_t group_size,
               bool requantizes, bool average, const std::string& overflow, uintptr_t scale, size_t scales,
               uintptr_t scale_2, float offset, const std::optional<std::vector<int64_t>>& shape, bool bound,
               int64_t leaves) {
    auto data = std::make_shared<QuantPlanData>();
    data->counts = std::move(counts);
    data->scale = floats_at(scale, scales);
    data->scale_2 = floats_at(scale_2, scale_2 == 0 ? 0 : scales);
    QuantReduction& request = data->request;
    request.op = op_from_name(op);
    request.mode = scale_2 != 0 ? QuantMode::two_scales : scale != 0 ? QuantMode::shared_scale : QuantMode::dynamic;
    request.dtype = dtype_from_name(dtype);
    request.out_dtype = dtype_from_name(out_dtype);
    request.overflow = overflow_from_name(overflow);
    request.average = average;
    request.requantizes = requantizes;
    request.format = format_from_name(format);
    request.group_size = group_size;
    request.offset = offset;
    request.tells_bound = bound;
    request.leaves = leaves;
    request.counts = data->counts;
    request.scale = data->scale;
    request.scale_2 = data->scale_2;
    if (shape) request.shape = ShapeWords(*shape);
    new (self) QuantPlan{std::move(communicator), std::move(data)};
}

kernel::CodedRows coded_rows(const FormatName& format, size_t group_size, DType dtype, size_t length) {
    const kernel::CodedRows rows{{format_from_name(format), group_size}, dtype, length};
    rows.format.check();
    return rows;
}

void bind_rows(nb::module_& m) {
    m.def(
        "quantized_row_bytes",
        [](size_t length, const FormatName& format, size_t group_size) {
            return coded_rows(format, group_size, DType::float32, length).bytes();
        },
        "length"_a, "format"_a, "group_size"_a,
        "Bytes of a row of `length` elements: scales, codes, padding to 4 bytes.");
    m.def(
        "quantized_row_terms",
        [](const FormatName& format, int64_t group_size, const std::string& dtype, const std::string& out_dtype,
           const std::string& overflow, bool quantizes_gradient) {
            return word_of(RowTerms(format_from_name(format), group_size, dtype_from_name(dtype),
                                    dtype_from_name(out_dtype), overflow_from_name(overflow), quantizes_gradient));
        },
        "format"_a, "group_size"_a, "dtype"_a, "out_dtype"_a, "overflow"_a, "quantizes_gradient"_a,
        "What ranks agree on beside the bytes of a row, for `terms` of an exchange.");
    m.def(
        "quantize_rows",
        [](const FormatName& format, size_t group_size, const std::string& dtype, uintptr_t input, size_t rows,
           size_t length, uintptr_t out) {
            const auto coded = coded_rows(format, group_size, dtype_from_name(dtype), length);
            coded.encode({pointer(out), coded.bytes()}, {pointer(input), length * size_of(coded.dtype)}, nullptr,
                         nullptr, rows);
        },
        "format"_a, "group_size"_a, "dtype"_a, "input"_a, "rows"_a, "length"_a, "out"_a, ReleaseGil(),
        "Row i of `out` becomes the codes of row i. `out` is aligned to 4 bytes.");
    m.def(
        "dequantize_rows",
        [](const FormatName& format, size_t group_size, const std::string& dtype, uintptr_t input, size_t rows,
           size_t length, const std::string& overflow, uintptr_t out) {
            const auto coded = coded_rows(format, group_size, dtype_from_name(dtype), length);
            return coded.decode({pointer(out), length * size_of(coded.dtype)}, {pointer(input), coded.bytes()}, nullptr,
                                nullptr, rows, overflow_from_name(overflow));
        },
        "format"_a, "group_size"_a, "dtype"_a, "input"_a, "rows"_a, "length"_a, "overflow"_a, "out"_a, ReleaseGil(),
        "Row i of `out` becomes the values of row i. False: a value did not fit and overflow is raise.");
    m.def(
        "bound_rows",
        [](const FormatName& format, size_t group_size, const std::string& dtype, uintptr_t input, size_t rows,
           size_t length, const std::string& overflow, uintptr_t out) {
            const auto coded = coded_rows(format, group_size, dtype_from_name(dtype), length);
            coded.bound({pointer(input), coded.bytes()}, rows, overflow_from_name(overflow), pointer<float>(out));
        },
        "format"_a, "group_size"_a, "dtype"_a, "input"_a, "rows"_a, "length"_a, "overflow"_a, "out"_a, ReleaseGil(),
        "What the values of rows can be wrong by: `out` holds one float32 per group.");
}

void bind_bounds(nb::module_& m) {
    m.def(
        "code_errors",
        [](const FormatName& format, size_t ranks) { return kernel::code_errors(format_from_name(format), ranks); },
        "format"_a, "ranks"_a, "What each code can be wrong by in a sum over `ranks`, in units of its group's scale.");
    m.def(
        "turned_errors",
        [](const FormatName& format, size_t ranks) { return kernel::turned_errors(format_from_name(format), ranks); },
        "format"_a, "ranks"_a,
        "What elements of rotated groups can be wrong by, likewise, by the binary logarithm of the largest block.");
    m.def(
        "scale_errors", [](const FormatName& format) { return kernel::scale_errors(format_from_name(format)); },
        "format"_a, "Where scales are bytes: the scale by which errors count, for each byte; else empty.");
    m.def(
        "largest_magnitude",
        [](const std::string& dtype, uintptr_t input, size_t count) {
            return kernel::largest_magnitude(dtype_from_name(dtype), pointer(input), count, nullptr);
        },
        "dtype"_a, "input"_a, "count"_a, ReleaseGil(), "Its bits in float32, without sign: NaN is above inf.");
}

}  // namespace

void bind_quant(nb::module_& m) {
    m.def(
        "check_quantized_all_reduce",
        [](const FormatName& format, bool dynamic, bool bound, bool feeds_back, bool gather_feeds_back,
           int64_t leaves) {
            QuantReduction asked;
            asked.format = format_from_name(format);
            asked.mode = dynamic ? QuantMode::dynamic : QuantMode::shared_scale;
            asked.tells_bound = bound;
            std::tie(asked.feeds_back, asked.gather_feeds_back) = std::pair(feeds_back, gather_feeds_back);
            asked.leaves = leaves;
            check_options(asked);
        },
        "format"_a, "dynamic"_a, "bound"_a, "feeds_back"_a, "gather_feeds_back"_a, "leaves"_a,
        "Raises InvalidParamError for options that exclude each other.");
    nb::class_<CodeFormatInfo>(m, "CodeFormatInfo", "What elements become in a quantized collective.")
        .def_ro("bits", &CodeFormatInfo::bits, "Of a code.")
        .def_ro("mantissa", &CodeFormatInfo::mantissa, "Bits of a code's mantissa; -1: codes are integers.")
        .def_ro("bias", &CodeFormatInfo::bias, "Of a code's exponent.")
        .def_ro("most", &CodeFormatInfo::most, "The largest value of a code.")
        .def_prop_ro(
            "scale",
            [](const CodeFormatInfo& self) { return std::string(scale_names[static_cast<size_t>(self.scale)]); },
            "A group's scale: 'float32', 'e8m0' or 'e4m3'.")
        .def_ro("group_size", &CodeFormatInfo::group_size, "Elements of a group; 0: any number.")
        .def_prop_ro(
            "rounds_up", [](const CodeFormatInfo& self) { return self.has(rounds_up); },
            "Whether a scale of e8m0 is rounded up.")
        .def_prop_ro(
            "rotated", [](const CodeFormatInfo& self) { return self.has(rotated); },
            "Whether groups are rotated where that makes their scale smaller.")
        .def_prop_ro(
            "spikes", [](const CodeFormatInfo& self) { return self.has(spikes); },
            "Whether the largest magnitudes of a group are kept apart.")
        .def_prop_ro("longest_group", &CodeFormatInfo::longest_group, "Most elements of a group; 0: any number.")
        .def_prop_ro("has_floats", &CodeFormatInfo::has_floats, "Whether a record of scales consists of float32.")
        .def("scale_bytes", &CodeFormatInfo::scale_bytes, "groups"_a, "Of the record of scales of so many groups.")
        .def("code_bytes", &CodeFormatInfo::code_bytes, "count"_a, "group_size"_a, "Of the codes of `count` elements.");
    nb::dict formats;
    for (const CodeFormatInfo& format : code_format_table)
        formats[nb::str(format.name.data(), format.name.size())] = nb::cast(format);
    m.attr("code_formats") = formats;
    nb::class_<QuantPlan>(m, "QuantPlan", "A quantized reduction, ready to run on any buffers that fit it.")
        .def("__init__", &make_plan, "communicator"_a, "op"_a, "dtype"_a, "out_dtype"_a, "counts"_a,
             "format"_a = "int8", "group_size"_a = 128, "requantizes"_a = false, "average"_a = false,
             "overflow"_a = "saturate", "scale"_a = 0, "scales"_a = 0, "scale_2"_a = 0, "offset"_a = 0.0f,
             "shape"_a = nb::none(), "bound"_a = false, "leaves"_a = 0,
             "counts: of every rank for a reduce_scatter, else one entry. scale and scale_2: addresses of `scales` "
             "float32 each, copied. shape: of the input, for the ranks to compare. bound: also tells what results can "
             "be wrong by. leaves: of all ranks, as in a reduction.")
        .def(
            "run",
            [](const QuantPlan& self, uintptr_t input, uintptr_t output, Address error, Address gather_error,
               uintptr_t bounds, double timeout) {
                self.data->run(*self.communicator, input, output, error, gather_error, bounds, timeout);
            },
            ReleaseGil(), "input"_a, "output"_a, "error"_a = nb::none(), "gather_error"_a = nb::none(), "bounds"_a = 0,
            "timeout"_a = -1.0, "bounds: address of one float32 per group of the output.")
        .def(
            "kernel_serves",
            [](const QuantPlan& self, bool feeds_back, bool gather_feeds_back) {
                QuantReduction call = self.data->request;
                call.feeds_back = feeds_back;
                call.gather_feeds_back = gather_feeds_back;
                auto* const over_hccl = dynamic_cast<HcclCommunicator*>(self.communicator.get());
                return over_hccl != nullptr && over_hccl->kernel_serves(call);
            },
            ReleaseGil(), "feeds_back"_a, "gather_feeds_back"_a,
            "Whether `launch` will, if that must be known before. Collective when a communicator is first asked.")
        .def(
            "launch",
            [](const QuantPlan& self, uintptr_t input, uintptr_t output, uintptr_t scale, uintptr_t offset,
               bool feeds_back, bool gather_feeds_back, uintptr_t stream) {
                return self.data->launch(*self.communicator, input, output, {scale, offset},
                                         {feeds_back, gather_feeds_back}, stream);
            },
            ReleaseGil(), "input"_a, "output"_a, "scale"_a, "offset"_a, "feeds_back"_a, "gather_feeds_back"_a,
            "stream"_a,
            "Enqueues the reduction where a device's kernels serve it, on all ranks alike; else only compares the "
            "ranks' "
            "arguments, and returns False. scale and offset: addresses on the device, or 0.")
        .def(
            "compare",
            [](const QuantPlan& self, bool feeds_back, bool gather_feeds_back) {
                self.data->compare(*self.communicator, feeds_back, gather_feeds_back);
            },
            ReleaseGil(), "feeds_back"_a, "gather_feeds_back"_a,
            "The ranks' agreement alone, where the data move by other means.")
        .def(
            "submit",
            [](const QuantPlan& self, uintptr_t input, uintptr_t output, Address error, Address gather_error,
               uintptr_t bounds, double timeout) {
                return self.communicator->begin(
                    self.data->request.op, [data = self.data, communicator = self.communicator.get(), input, output,
                                            error, gather_error, bounds, timeout] {
                        data->run(*communicator, input, output, error, gather_error, bounds, timeout);
                    });
            },
            "input"_a, "output"_a, "error"_a = nb::none(), "gather_error"_a = nb::none(), "bounds"_a = 0,
            "timeout"_a = -1.0);
    bind_rows(m);
    bind_bounds(m);
}

}  // namespace alltoallv
