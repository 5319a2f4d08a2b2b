#include "quant_all_reduce/op_api/aclnn_quant_all_reduce.h"

#include <algorithm>

#include "quant_all_reduce/plan.h"
#include "runtime/aclnn/call.h"
#include "runtime/aclnn/platform.h"
#include "runtime/aclnn/windows.h"

using namespace alltoallv;
using namespace alltoallv::aclnn;

namespace {

int64_t groups_of(int64_t count, int64_t group_size) {
    return count / group_size + (count % group_size != 0);
}

void check_group_size(int64_t group_size) {
    if (group_size < 1) refuse("groupSize is " + std::to_string(group_size) + ", expected at least 1");
}

void check_bits(int64_t bits) {
    if (bits != 8 && bits != 4) refuse("bits is " + std::to_string(bits) + ", expected 8 or 4");
}

/// Bytes of the codes of so many elements.
int64_t code_bytes(int64_t count, int64_t group_size, int64_t bits) {
    return static_cast<int64_t>(
        code_bytes_of(static_cast<uint64_t>(count), static_cast<uint64_t>(group_size), static_cast<uint32_t>(bits)));
}

void check_numel(const View& tensor, int64_t expected) {
    if (tensor.numel() != expected) refuse(tensor.text() + ", expected " + std::to_string(expected) + " elements");
}

/// Which part of a vector a rank sums: whole groups, as many on every rank but the last ones.
struct Parts {
    int64_t count, size;  ///< elements of the vector and of a part

    Parts(int64_t count_, int64_t group_size, uint32_t ranks)
        : count(count_), size(groups_of(groups_of(count_, group_size), ranks) * group_size) {}
    int64_t begin(uint32_t rank) const { return std::min(count, size * static_cast<int64_t>(rank)); }
    int64_t length(uint32_t rank) const { return begin(rank + 1) - begin(rank); }
};

/// Counts and displacements of an all-to-all in which each rank gets its part from all others; `units` states how many
/// the first elements of a vector, or of a part, are.
struct Exchange {
    std::vector<uint64_t> send_counts, sdispls, recv_counts, rdispls;

    template <class Units>
    Exchange(const Parts& parts, const Group& group, const Units& units) {
        const auto own = static_cast<uint64_t>(units(parts.length(group.rank)));
        for (uint32_t j = 0; j < group.size; ++j) {
            send_counts.push_back(static_cast<uint64_t>(units(parts.length(j))));
            sdispls.push_back(static_cast<uint64_t>(units(parts.begin(j))));
            recv_counts.push_back(own);
            rdispls.push_back(own * j);
        }
    }

    void run(const void* from, void* to, HcclDataType type, const Group& group, aclrtStream stream) {
        require_success("HcclAlltoAllV", HcclAlltoAllV(from, send_counts.data(), sdispls.data(), type, to,
                                                       recv_counts.data(), rdispls.data(), type, group.comm, stream));
        keep_until_done(stream, std::make_shared<const Exchange>(std::move(*this)));
    }
};

HcclDataType hccl_type(aclDataType dtype) {
    return dtype == ACL_FLOAT ? HCCL_DATA_TYPE_FP32 : dtype == ACL_FLOAT16 ? HCCL_DATA_TYPE_FP16 : HCCL_DATA_TYPE_BFP16;
}

constexpr uint64_t lane_status_bytes = alltoallv_kernels::status_words * sizeof(int32_t);

/// What a caller gives beside input and output.
struct Options {
    View scale, offset, status;  ///< without data where they are not given
    int64_t bits, group_size;
    bool average, saturate;

    bool shares_scale() const { return scale.data != nullptr; }
};

/// Enqueues codes and scales of x.
void quantize(const View& x, int64_t bits, int64_t group_size, void* codes, void* scales, void* tiling,
              aclrtStream stream) {
    const auto count = static_cast<uint64_t>(x.numel()), group = static_cast<uint64_t>(group_size);
    if (count == 0) return;
    const auto [numbers, cores] =
        plan_quantize(count, group, static_cast<uint32_t>(x.dtype), static_cast<uint32_t>(bits), vector_cores());
    const std::vector<Argument> arguments = {
        x.argument(),
        {"codes", codes, code_bytes_of(count, group, numbers.bits)},
        {"scales", scales, static_cast<uint64_t>(groups_of(x.numel(), group_size)) * sizeof(float)}};
    launch("alltoallv_quantize", cores, arguments, numbers, tiling, stream);
}

/// Enqueues the sum of what codes and scales of several ranks stand for.
void dequantize_sum(const void* codes, const void* scales, int64_t ranks, int64_t count, int64_t group_size,
                    const Options& options, aclDataType dtype, void* out, void* tiling, aclrtStream stream) {
    const auto n = static_cast<uint64_t>(count), group = static_cast<uint64_t>(group_size);
    if (n == 0) return;
    const auto [numbers, cores] =
        plan_dequantize_sum(static_cast<uint32_t>(ranks), n, group, static_cast<uint32_t>(dtype),
                            static_cast<uint32_t>(options.bits), options.saturate, options.average, vector_cores());
    const std::vector<Argument> arguments = {
        {"codes", codes, numbers.ranks * code_bytes_of(n, group, numbers.bits)},
        {"scales", scales, numbers.ranks * static_cast<uint64_t>(groups_of(count, group_size)) * sizeof(float)},
        {"out", out, n * aclDataTypeSize(dtype)}};
    launch("alltoallv_dequantize_sum", cores, arguments, numbers, tiling, stream);
}

/// Enqueues the sum of int8 values with one scale and offset.
void shared_scale_sum(const void* x, int64_t ranks, int64_t count, const Options& options, aclDataType dtype, void* out,
                      void* tiling, aclrtStream stream) {
    const auto n = static_cast<uint64_t>(count);
    if (n == 0) return;
    const auto [numbers, cores] = plan_shared_scale_sum(
        static_cast<uint32_t>(ranks), n, static_cast<uint64_t>(options.scale.numel()), static_cast<uint32_t>(dtype),
        static_cast<uint32_t>(options.scale.dtype), options.saturate, vector_cores());
    const std::vector<Argument> arguments = {{"x", x, numbers.ranks * n},
                                             options.scale.argument(),
                                             options.offset.argument(),
                                             {"out", out, n * aclDataTypeSize(dtype)}};
    launch("alltoallv_shared_scale_sum", cores, arguments, numbers, tiling, stream);
}

/// One kernel through the windows.
Run fused(const View& x, const Options& options, const View& out, Workspace& workspace,
          std::shared_ptr<const alltoallv_kernels::WindowTiling> windows) {
    alltoallv_kernels::QuantAllReduceTiling numbers{};
    numbers.window = *windows;
    numbers.count = static_cast<uint64_t>(x.numel());
    numbers.group = options.shares_scale() ? 0 : static_cast<uint64_t>(options.group_size);
    numbers.channels = options.shares_scale() ? static_cast<uint64_t>(options.scale.numel()) : 1;
    numbers.type = static_cast<uint32_t>(x.dtype);
    numbers.output_type = static_cast<uint32_t>(out.dtype);
    numbers.scale_type = static_cast<uint32_t>(options.scale.dtype);
    numbers.saturate = options.saturate;
    numbers.average = options.average;
    numbers.bits = static_cast<uint32_t>(options.bits);
    const uint64_t tiling = workspace.add(tiling_bytes), status_bytes = numbers.window.lanes * lane_status_bytes;
    const uint64_t own = workspace.add(status_bytes);
    return [=](char* memory, aclrtStream stream) {
        (void)windows;  // live as long as the executor
        if (x.numel() == 0) return;
        char* const status = options.status.data != nullptr ? options.status.data : memory + own;
        const char* kernel = "alltoallv_quant_all_reduce";
        const std::vector<Argument> arguments = {x.argument(),
                                                 options.scale.argument(),
                                                 options.offset.argument(),
                                                 out.argument(),
                                                 {"status", status, status_bytes}};
        launch(kernel, numbers.window.lanes, arguments, numbers, memory + tiling, stream);
        check_status(kernel, status, stream);
    };
}

/// Where there are no windows: kernels for quantizing and for the sum, HCCL's exchanges between them, all on the
/// caller's stream.
Run all_reduce(const View& x, const Group& group, const Options& options, const View& out, Workspace& workspace) {
    const bool shares_scale = options.shares_scale();
    const int64_t count = x.numel(), least_one = std::max<int64_t>(count, 1);
    const int64_t unit = shares_scale ? options.scale.numel() : std::min(options.group_size, least_one);
    const Parts parts(count, unit, group.size);
    const int64_t own = parts.length(group.rank);
    const auto in_codes = [=, bits = options.bits](int64_t elements) { return code_bytes(elements, unit, bits); };
    const auto in_scales = [=](int64_t elements) { return shares_scale ? 0 : groups_of(elements, unit); };
    const auto part = [&](int64_t elements, size_t each) {
        return workspace.add(static_cast<uint64_t>(elements) * each);
    };
    const size_t element = aclDataTypeSize(out.dtype);
    const uint64_t first_tiling = workspace.add(tiling_bytes), second_tiling = workspace.add(tiling_bytes);
    const uint64_t codes = part(shares_scale ? 0 : in_codes(count), 1), scales = part(in_scales(count), sizeof(float));
    const uint64_t their_codes = part(in_codes(own) * group.size, 1);
    const uint64_t their_scales = part(in_scales(own) * group.size, sizeof(float));
    const uint64_t sum = part(parts.size, element), gathered = part(parts.size * group.size, element);
    return [=](char* memory, aclrtStream stream) {
        if (options.status.data != nullptr) {
            const auto bytes = static_cast<size_t>(options.status.bytes());
            require_success("aclrtMemsetAsync", aclrtMemsetAsync(options.status.data, bytes, 0, bytes, stream));
        }
        if (count == 0) return;
        if (!shares_scale)
            quantize(x, options.bits, unit, memory + codes, memory + scales, memory + first_tiling, stream);
        Exchange(parts, group, in_codes)
            .run(shares_scale ? x.data : memory + codes, memory + their_codes, HCCL_DATA_TYPE_INT8, group, stream);
        if (shares_scale) {
            shared_scale_sum(memory + their_codes, group.size, own, options, out.dtype, memory + sum,
                             memory + second_tiling, stream);
        } else {
            Exchange(parts, group, in_scales)
                .run(memory + scales, memory + their_scales, HCCL_DATA_TYPE_FP32, group, stream);
            dequantize_sum(memory + their_codes, memory + their_scales, group.size, own, unit, options, out.dtype,
                           memory + sum, memory + second_tiling, stream);
        }
        require_success("HcclAllGather",
                        HcclAllGather(memory + sum, memory + gathered, static_cast<uint64_t>(parts.size),
                                      hccl_type(out.dtype), group.comm, stream));
        const auto size = static_cast<size_t>(out.bytes());
        require_success("aclrtMemcpyAsync",
                        aclrtMemcpyAsync(out.data, size, memory + gathered, size, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    };
}

View optional_view(const char* name, const aclTensor* tensor, std::initializer_list<aclDataType> dtypes) {
    return tensor == nullptr ? View{name, *dtypes.begin(), {0}, nullptr} : view(name, tensor, dtypes);
}

void check_scale(const View& scale, const View& offset) {
    if (scale.numel() < 1) refuse(scale.text() + ", expected 1 element or more");
    check_numel(offset, 1);
    if (offset.dtype != scale.dtype) refuse("offset has another type than scale");
}

}  // namespace

aclnnStatus aclnnAlltoallvQuantizeGetWorkspaceSize(const aclTensor* x, int64_t bits, int64_t groupSize,
                                                   aclTensor* codes, aclTensor* scales, uint64_t* workspaceSize,
                                                   aclOpExecutor** executor) {
    return prepare(__func__, workspaceSize, executor, [&](Workspace& workspace) -> Run {
        const View in = view("x", x, floating_types), out = view("codes", codes, {ACL_INT8, ACL_UINT8});
        const View factors = view("scales", scales, {ACL_FLOAT});
        check_group_size(groupSize);
        check_bits(bits);
        check_numel(out, code_bytes(in.numel(), groupSize, bits));
        check_numel(factors, groups_of(in.numel(), groupSize));
        require_apart({in}, {out, factors});
        workspace.add(tiling_bytes);
        return [=](char* tiling, aclrtStream stream) {
            quantize(in, bits, groupSize, out.data, factors.data, tiling, stream);
        };
    });
}

aclnnStatus aclnnAlltoallvQuantize(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                   aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnAlltoallvDequantizeSumGetWorkspaceSize(const aclTensor* codes, const aclTensor* scales, int64_t bits,
                                                        int64_t groupSize, aclTensor* out, uint64_t* workspaceSize,
                                                        aclOpExecutor** executor) {
    return prepare(__func__, workspaceSize, executor, [&](Workspace& workspace) -> Run {
        const View in = view("codes", codes, {ACL_INT8, ACL_UINT8}), factors = view("scales", scales, {ACL_FLOAT});
        const View sum = view("out", out, floating_types);
        check_group_size(groupSize);
        check_bits(bits);
        const int64_t count = sum.numel(), bytes = code_bytes(count, groupSize, bits);
        if (in.shape.size() != 2 || in.shape[0] < 1 || in.shape[1] != bytes)
            refuse(in.text() + ", expected [ranks, " + std::to_string(bytes) + "] for the elements of out");
        const int64_t ranks = in.shape[0];
        if (factors.shape != std::vector<int64_t>{ranks, groups_of(count, groupSize)})
            refuse(factors.text() + ", expected [" + std::to_string(ranks) + ", " +
                   std::to_string(groups_of(count, groupSize)) + "]");
        require_apart({in, factors}, {sum});
        workspace.add(tiling_bytes);
        Options options{};
        options.bits = bits;
        options.saturate = true;
        return [=](char* tiling, aclrtStream stream) {
            dequantize_sum(in.data, factors.data, ranks, count, groupSize, options, sum.dtype, sum.data, tiling,
                           stream);
        };
    });
}

aclnnStatus aclnnAlltoallvDequantizeSum(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                        aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnAlltoallvSharedScaleSumGetWorkspaceSize(const aclTensor* x, const aclTensor* scale,
                                                         const aclTensor* offset, aclTensor* out,
                                                         uint64_t* workspaceSize, aclOpExecutor** executor) {
    return prepare(__func__, workspaceSize, executor, [&](Workspace& workspace) -> Run {
        const View in = view("x", x, {ACL_INT8}), sum = view("out", out, floating_types);
        Options options{};
        options.scale = view("scale", scale, floating_types);
        options.offset = view("offset", offset, floating_types);
        options.saturate = true;
        check_scale(options.scale, options.offset);
        if (in.shape.size() != 2 || in.shape[0] < 1) refuse(in.text() + ", expected [ranks, elements]");
        const int64_t ranks = in.shape[0], count = in.shape[1];
        check_numel(sum, count);
        require_apart({in, options.scale, options.offset}, {sum});
        workspace.add(tiling_bytes);
        return [=](char* tiling, aclrtStream stream) {
            shared_scale_sum(in.data, ranks, count, options, sum.dtype, sum.data, tiling, stream);
        };
    });
}

aclnnStatus aclnnAlltoallvSharedScaleSum(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                         aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnAlltoallvQuantAllReduceGetWorkspaceSize(const aclTensor* x, const aclTensor* scale,
                                                         const aclTensor* offset, const char* group, int64_t bits,
                                                         int64_t groupSize, bool average, bool saturate, aclTensor* out,
                                                         aclTensor* status, uint64_t* workspaceSize,
                                                         aclOpExecutor** executor) {
    return prepare(__func__, workspaceSize, executor, [&](Workspace& workspace) {
        if ((scale == nullptr) != (offset == nullptr))
            refuse("scale and offset: one is null, expected both or neither");
        const Options options{optional_view("scale", scale, floating_types),
                              optional_view("offset", offset, floating_types),
                              optional_view("status", status, {ACL_INT32}),
                              bits,
                              groupSize,
                              average,
                              saturate};
        const View in = scale == nullptr ? view("x", x, floating_types) : view("x", x, {ACL_INT8});
        const View sum = view("out", out, floating_types);
        check_numel(sum, in.numel());
        check_bits(bits);
        if (scale == nullptr) {
            check_group_size(groupSize);
        } else {
            check_scale(options.scale, options.offset);
            if (average) refuse("average is true with a scale, expected false");
            if (bits != 8) refuse("bits is 4 with a scale, expected 8");
        }
        if (status != nullptr) check_numel(options.status, 8 * int64_t{lanes()});
        const bool in_place = in.data == sum.data && in.dtype == sum.dtype;
        require_apart({in_place ? View{"x", in.dtype, {0}, nullptr} : in, options.scale, options.offset},
                      {sum, options.status});
        const Group ranks = group_named(group);
        auto windows = windows_of(ranks);
        const uint64_t own_scales = scale == nullptr ? static_cast<uint64_t>(groupSize) : 0;
        if (windows &&
            alltoallv_kernels::fits_window(own_scales, aclDataTypeSize(sum.dtype), windows->lane_bytes, ranks.size))
            return fused(in, options, sum, workspace, std::move(windows));
        return all_reduce(in, ranks, options, sum, workspace);
    });
}

aclnnStatus aclnnAlltoallvQuantAllReduce(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                         aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}
