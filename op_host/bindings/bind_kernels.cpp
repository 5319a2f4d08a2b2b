// The CPU kernels on raw addresses.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "op_kernel/cpu/copy.h"
#include "op_kernel/cpu/quantize.h"
#include "op_kernel/cpu/reduce.h"

namespace nb = nanobind;

namespace alltoallv {
namespace {

using kernel::Isa;
using kernel::Overflow;
using kernel::QuantFormat;

using Release = nb::call_guard<nb::gil_scoped_release>;

constexpr const char* isa_names[] = {"base", "v3", "v4"};

/// The instruction set of a name; the best one without.
Isa isa_from_name(const std::optional<std::string>& name) {
    if (!name) return kernel::best_isa();
    for (size_t i = 0; i <= static_cast<size_t>(kernel::best_isa()); ++i) {
        if (*name == isa_names[i]) return static_cast<Isa>(i);
    }
    throw invalid_param("isa is '" + *name + "', expected one of kernel_isas()");
}

Overflow overflow_from_name(const std::string& name) {
    if (name == "saturate") return Overflow::saturate;
    if (name == "raise") return Overflow::raise;
    if (name == "infinity") return Overflow::infinity;
    throw invalid_param("overflow is '" + name + "', expected saturate, raise or infinity");
}

template <class T>
std::vector<const T*> pointers(const std::vector<uintptr_t>& addresses) {
    std::vector<const T*> result;
    for (const uintptr_t address : addresses) result.push_back(pointer<const T>(address));
    return result;
}

void check_lengths(const std::vector<uintptr_t>& codes, const std::vector<uintptr_t>& scales) {
    if (codes.size() == scales.size()) return;
    throw invalid_param("scales are of " + std::to_string(scales.size()) + " sources, expected " +
                        std::to_string(codes.size()) + " as codes");
}

void bind_groups(nb::module_& m) {
    m.def(
        "kernel_scale_bytes",
        [](size_t count, const FormatName& bits, size_t group_size) {
            const QuantFormat format{format_from_name(bits), group_size};
            format.check();
            return format.scale_bytes(count);
        },
        nb::arg("count"), nb::arg("bits"), nb::arg("group_size"));
    m.def(
        "kernel_code_bytes",
        [](size_t count, const FormatName& bits, size_t group_size) {
            const QuantFormat format{format_from_name(bits), group_size};
            format.check();
            return format.code_bytes(count);
        },
        nb::arg("count"), nb::arg("bits"), nb::arg("group_size"));
    m.def(
        "kernel_quantize",
        [](const FormatName& bits, size_t group_size, const std::string& dtype, uintptr_t input, size_t count,
           uintptr_t codes, uintptr_t scales, uintptr_t error, const std::optional<std::string>& isa) {
            kernel::quantize({format_from_name(bits), group_size}, dtype_from_name(dtype), pointer(input), count,
                             pointer(codes), pointer(scales), pointer<float>(error), isa_from_name(isa));
        },
        nb::arg("bits"), nb::arg("group_size"), nb::arg("dtype"), nb::arg("input"), nb::arg("count"), nb::arg("codes"),
        nb::arg("scales"), nb::arg("error") = 0, nb::arg("isa") = nb::none(), Release(),
        "Addresses; error 0: without feedback.");
    m.def(
        "kernel_dequantize",
        [](const FormatName& bits, size_t group_size, const std::string& dtype, uintptr_t codes, uintptr_t scales,
           size_t count, const std::string& overflow, uintptr_t out, const std::optional<std::string>& isa) {
            return kernel::dequantize({format_from_name(bits), group_size}, dtype_from_name(dtype), pointer(codes),
                                      pointer(scales), count, overflow_from_name(overflow), pointer(out), false,
                                      isa_from_name(isa));
        },
        nb::arg("bits"), nb::arg("group_size"), nb::arg("dtype"), nb::arg("codes"), nb::arg("scales"), nb::arg("count"),
        nb::arg("overflow"), nb::arg("out"), nb::arg("isa") = nb::none(), Release(),
        "False: a value did not fit and overflow is raise.");
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
        nb::arg("bits"), nb::arg("group_size"), nb::arg("codes"), nb::arg("scales"), nb::arg("count"),
        nb::arg("average"), nb::arg("sum"), nb::arg("isa") = nb::none(), Release());
    m.def(
        "kernel_cast",
        [](const std::string& dtype, const std::string& overflow, uintptr_t input, size_t count, uintptr_t out,
           const std::optional<std::string>& isa) {
            return kernel::cast(dtype_from_name(dtype), overflow_from_name(overflow), pointer<const float>(input),
                                count, pointer(out), isa_from_name(isa));
        },
        nb::arg("dtype"), nb::arg("overflow"), nb::arg("input"), nb::arg("count"), nb::arg("out"),
        nb::arg("isa") = nb::none(), Release(), "False: a value did not fit and overflow is raise.");
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
        nb::arg("dtype"), nb::arg("inputs"), nb::arg("count"), nb::arg("scales"), nb::arg("n_scales"), nb::arg("first"),
        nb::arg("offset"), nb::arg("overflow"), nb::arg("out"), nb::arg("isa") = nb::none(), Release(),
        "False: a value did not fit and overflow is raise.");
    m.def(
        "kernel_quantize_scaled",
        [](const std::string& dtype, uintptr_t input, size_t count, uintptr_t scales, size_t n_scales, size_t first,
           uintptr_t codes, const std::optional<std::string>& isa) {
            kernel::quantize_scaled(dtype_from_name(dtype), pointer(input), count,
                                    {pointer<const float>(scales), n_scales, first}, pointer(codes),
                                    isa_from_name(isa));
        },
        nb::arg("dtype"), nb::arg("input"), nb::arg("count"), nb::arg("scales"), nb::arg("n_scales"), nb::arg("first"),
        nb::arg("codes"), nb::arg("isa") = nb::none(), Release());
    m.def(
        "kernel_requantize_sum",
        [](const std::vector<uintptr_t>& inputs, size_t count, uintptr_t ratios, size_t n_ratios, size_t first,
           uintptr_t codes, const std::optional<std::string>& isa) {
            kernel::requantize_sum(pointers<void>(inputs).data(), inputs.size(), count,
                                   {pointer<const float>(ratios), n_ratios, first}, pointer(codes), isa_from_name(isa));
        },
        nb::arg("inputs"), nb::arg("count"), nb::arg("ratios"), nb::arg("n_ratios"), nb::arg("first"), nb::arg("codes"),
        nb::arg("isa") = nb::none(), Release());
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
        nb::arg("to"), nb::arg("from_"), nb::arg("nbytes"), Release(), "Non-temporal stores; addresses.");
    m.def(
        "kernel_reduce",
        [](const std::string& dtype, const std::string& op, uintptr_t out, const std::vector<uintptr_t>& inputs,
           size_t count) {
            kernel::reduce(dtype_from_name(dtype), static_cast<kernel::Reduce>(reduce_op_from_name(op)), pointer(out),
                           pointers<void>(inputs).data(), inputs.size(), count);
        },
        nb::arg("dtype"), nb::arg("op"), nb::arg("out"), nb::arg("inputs"), nb::arg("count"), Release(),
        "`count` elements of each input, in the order of the inputs; addresses, `out` may be one of them.");
    bind_groups(m);
    bind_shared_scale(m);
}

}  // namespace alltoallv
