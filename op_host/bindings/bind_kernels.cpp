// Binds the CPU kernels on raw addresses.

#include "bindings/bindings.h"
#include "op_kernel/cpu/copy.h"
#include "op_kernel/cpu/quantize.h"
#include "op_kernel/cpu/reduce.h"
#include "runtime/base/error.h"

namespace alltoallv {
namespace {

using kernel::Isa;
using kernel::QuantFormat;

constexpr const char* isa_names[] = {"base", "v3", "v4", "vbmi"};

/// Returns the instruction set of that name, or the best one without a name.
Isa isa_from_name(const std::optional<std::string>& name) {
    if (!name) return kernel::best_isa();
    for (size_t i = 0; i <= static_cast<size_t>(kernel::best_isa()); ++i)
        if (*name == isa_names[i]) return static_cast<Isa>(i);
    throw invalid_param(1031, "isa is '", *name, "', expected one of kernel_isas()");
}

template <class T>
std::vector<const T*> pointers(const std::vector<uintptr_t>& addresses) {
    std::vector<const T*> result;
    for (const uintptr_t address : addresses) result.push_back(pointer<const T>(address));
    return result;
}

void check_lengths(const std::vector<uintptr_t>& codes, const std::vector<uintptr_t>& scales) {
    if (codes.size() == scales.size()) return;
    throw invalid_param(1032, "scales are of ", scales.size(), " sources, expected ", codes.size(), " as codes");
}

void bind_groups(nb::module_& m) {
    m.def(
        "kernel_quantize",
        [](const FormatName& bits, size_t group_size, const std::string& dtype, uintptr_t input, size_t count,
           uintptr_t codes, uintptr_t scales, uintptr_t error, const std::optional<std::string>& isa) {
            kernel::quantize({format_from_name(bits), group_size}, dtype_from_name(dtype), pointer(input), count,
                             pointer(codes), pointer(scales), pointer<float>(error), isa_from_name(isa));
        },
        "bits"_a, "group_size"_a, "dtype"_a, "input"_a, "count"_a, "codes"_a, "scales"_a, "error"_a = 0,
        "isa"_a = nb::none(), ReleaseGil(), "Addresses; error 0: without feedback.");
    m.def(
        "kernel_dequantize",
        [](const FormatName& bits, size_t group_size, const std::string& dtype, uintptr_t codes, uintptr_t scales,
           size_t count, const std::string& overflow, uintptr_t out, const std::optional<std::string>& isa) {
            return kernel::dequantize({format_from_name(bits), group_size}, dtype_from_name(dtype), pointer(codes),
                                      pointer(scales), count, overflow_from_name(overflow), pointer(out), false,
                                      isa_from_name(isa));
        },
        "bits"_a, "group_size"_a, "dtype"_a, "codes"_a, "scales"_a, "count"_a, "overflow"_a, "out"_a,
        "isa"_a = nb::none(), ReleaseGil(), "False: a value did not fit and overflow is raise.");
    m.def(
        "kernel_dequantize_sum",
        [](const FormatName& bits, size_t group_size, const std::vector<uintptr_t>& codes,
           const std::vector<uintptr_t>& scales, size_t count, bool average, uintptr_t sum,
           const std::optional<std::string>& isa) {
            check_lengths(codes, scales);
            kernel::dequantize_sum({format_from_name(bits), group_size}, pointers<void>(codes).data(),
                                   pointers<void>(scales).data(), codes.size(), count, average, pointer<float>(sum),
                                   isa_from_name(isa));
        },
        "bits"_a, "group_size"_a, "codes"_a, "scales"_a, "count"_a, "average"_a, "sum"_a, "isa"_a = nb::none(),
        ReleaseGil());
    m.def(
        "kernel_cast",
        [](const std::string& dtype, const std::string& overflow, uintptr_t input, size_t count, uintptr_t out,
           const std::optional<std::string>& isa) {
            return kernel::cast(dtype_from_name(dtype), overflow_from_name(overflow), pointer<const float>(input),
                                count, pointer(out), isa_from_name(isa));
        },
        "dtype"_a, "overflow"_a, "input"_a, "count"_a, "out"_a, "isa"_a = nb::none(), ReleaseGil(),
        "False: a value did not fit and overflow is raise.");
}

void bind_shared_scale(nb::module_& m) {
    m.def(
        "kernel_sum_shared_scale",
        [](const std::string& dtype, const std::vector<uintptr_t>& inputs, size_t count, uintptr_t scales,
           size_t n_scales, size_t first, float offset, const std::string& overflow, uintptr_t out,
           const std::optional<std::string>& isa) {
            return kernel::sum_shared_scale(dtype_from_name(dtype), pointers<void>(inputs).data(), inputs.size(), count,
                                            {pointer<const float>(scales), n_scales, first}, offset,
                                            overflow_from_name(overflow), pointer(out), isa_from_name(isa));
        },
        "dtype"_a, "inputs"_a, "count"_a, "scales"_a, "n_scales"_a, "first"_a, "offset"_a, "overflow"_a, "out"_a,
        "isa"_a = nb::none(), ReleaseGil(), "False: a value did not fit and overflow is raise.");
}

}  // namespace

void bind_kernels(nb::module_& m) {
    m.def(
        "kernel_isas",
        [] {
            const auto best = static_cast<size_t>(kernel::best_isa());
            return std::vector<std::string>(isa_names, isa_names + best + 1);
        },
        "Instruction sets of this processor that kernels have clones for, the best one last.");
    m.def(
        "kernel_copy_streaming",
        [](uintptr_t to, uintptr_t from, size_t bytes) { kernel::copy_streaming(pointer(to), pointer(from), bytes); },
        "to"_a, "from_"_a, "nbytes"_a, ReleaseGil(), "Non-temporal stores; addresses.");
    m.def(
        "kernel_reduce",
        [](const std::string& dtype, const std::string& op, uintptr_t out, const std::vector<uintptr_t>& inputs,
           size_t count) {
            kernel::reduce(dtype_from_name(dtype), reduce_op_from_name(op), pointer(out), pointers<void>(inputs).data(),
                           inputs.size(), count);
        },
        "dtype"_a, "op"_a, "out"_a, "inputs"_a, "count"_a, ReleaseGil(),
        "`count` elements of each input, in the order of the inputs; addresses, `out` may be one of them.");
    bind_groups(m);
    bind_shared_scale(m);
}

}  // namespace alltoallv
