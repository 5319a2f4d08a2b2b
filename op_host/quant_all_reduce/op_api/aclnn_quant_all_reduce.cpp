#include "quant_all_reduce/op_api/aclnn_quant_all_reduce.h"

#include <algorithm>

#include "op_kernel/ascendc/quantized_tiling.h"
#include "runtime/aclnn/call.h"
#include "runtime/aclnn/platform.h"
#include "runtime/aclnn/windows.h"

using namespace alltoallv::aclnn;

namespace {

int64_t groups_of(int64_t count, int64_t group_size) {
    return count / group_size + (count % group_size != 0);
}

void check_group_size(int64_t group_size) {
    if (group_size < 1) refuse("groupSize is " + std::to_string(group_size) + ", expected at least 1");
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

/// Counts and displacements of an all-to-all in which each rank gets its part from all others.
struct Exchange {
    std::vector<uint64_t> send_counts, sdispls, recv_counts, rdispls;

    Exchange(const Parts& parts, const Group& group, int64_t unit) {
        const auto own = static_cast<uint64_t>(groups_of(parts.length(group.rank), unit));
        for (uint32_t j = 0; j < group.size; ++j) {
            send_counts.push_back(static_cast<uint64_t>(groups_of(parts.length(j), unit)));
            sdispls.push_back(static_cast<uint64_t>(groups_of(parts.begin(j), unit)));
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

/// What a caller gives beside input and output.
struct Options {
    View scale, offset, status;  ///< without data where they are not given
    int64_t bits, group_size;
    bool average, saturate;

    bool shares_scale() const { return scale.data != nullptr; }
};

/// One kernel through the windows.
Run fused(const View& x, const Options& options, const View& out, Workspace& workspace,
          std::shared_ptr<const alltoallv_kernels::WindowTiling> windows) {
    alltoallv_kernels::QuantAllReduceTiling numbers{};
    numbers.window = *windows;
    numbers.bits = static_cast<uint32_t>(options.bits);
    numbers.count = static_cast<uint64_t>(x.numel());
    numbers.group = options.shares_scale() ? 0 : static_cast<uint64_t>(options.group_size);
    numbers.channels = options.shares_scale() ? static_cast<uint64_t>(options.scale.numel()) : 1;
    numbers.type = static_cast<uint32_t>(x.dtype);
    numbers.output_type = static_cast<uint32_t>(out.dtype);
    numbers.scale_type = static_cast<uint32_t>(options.scale.dtype);
    numbers.saturate = options.saturate;
    numbers.average = options.average;
    const uint64_t tiling = workspace.add(tiling_bytes);
    const uint64_t own = workspace.add(uint64_t{lanes()} * alltoallv_kernels::status_words * sizeof(int32_t));
    return [=](char* memory, aclrtStream stream) {
        (void)windows;  // live as long as the executor
        char* const status = options.status.data != nullptr ? options.status.data : memory + own;
        if (x.numel() > 0)
            quant_all_reduce(numbers, x.data, options.scale.data, options.offset.data, out.data, status,
                             memory + tiling, stream);
    };
}

/// Where there are no windows: kernels for quantizing and for the sum, HCCL's exchanges between them, all on the
/// caller's stream.
Run all_reduce(const View& x, const Group& group, int64_t group_size, const View& out, Workspace& workspace) {
    const int64_t count = x.numel(), groups = groups_of(count, group_size);
    const Parts parts(count, group_size, group.size);
    const int64_t own = parts.length(group.rank), own_groups = groups_of(own, group_size);
    const auto bytes = [](int64_t elements, size_t each) { return static_cast<uint64_t>(elements) * each; };
    const size_t element = aclDataTypeSize(out.dtype);
    const uint64_t first_tiling = workspace.add(tiling_bytes), second_tiling = workspace.add(tiling_bytes);
    const uint64_t codes = workspace.add(bytes(count, 1)), scales = workspace.add(bytes(groups, sizeof(float)));
    const uint64_t their_codes = workspace.add(bytes(own * group.size, 1));
    const uint64_t their_scales = workspace.add(bytes(own_groups * group.size, sizeof(float)));
    const uint64_t sum = workspace.add(bytes(parts.size, element));
    const uint64_t gathered = workspace.add(bytes(parts.size * group.size, element));
    return [=](char* memory, aclrtStream stream) {
        if (count == 0) return;
        quantize(x.dtype, x.data, count, group_size, memory + codes, memory + scales, memory + first_tiling, stream);
        Exchange(parts, group, 1).run(memory + codes, memory + their_codes, HCCL_DATA_TYPE_INT8, group, stream);
        Exchange(parts, group, group_size)
            .run(memory + scales, memory + their_scales, HCCL_DATA_TYPE_FP32, group, stream);
        dequantize_sum(memory + their_codes, memory + their_scales, group.size, own, group_size, out.dtype,
                       memory + sum, memory + second_tiling, stream);
        require_success("HcclAllGather",
                        HcclAllGather(memory + sum, memory + gathered, static_cast<uint64_t>(parts.size),
                                      hccl_type(out.dtype), group.comm, stream));
        const auto size = static_cast<size_t>(out.bytes());
        require_success("aclrtMemcpyAsync",
                        aclrtMemcpyAsync(out.data, size, memory + gathered, size, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    };
}

}  // namespace

aclnnStatus aclnnAlltoallvQuantizeGetWorkspaceSize(const aclTensor* x, int64_t groupSize, aclTensor* codes,
                                                   aclTensor* scales, uint64_t* workspaceSize,
                                                   aclOpExecutor** executor) {
    return prepare(__func__, workspaceSize, executor, [&](Workspace& workspace) -> Run {
        const View in = view("x", x, floating_types), out = view("codes", codes, {ACL_INT8});
        const View factors = view("scales", scales, {ACL_FLOAT});
        check_group_size(groupSize);
        check_numel(out, in.numel());
        check_numel(factors, groups_of(in.numel(), groupSize));
        require_apart({in}, {out, factors});
        workspace.add(tiling_bytes);
        return [=](char* tiling, aclrtStream stream) {
            quantize(in.dtype, in.data, in.numel(), groupSize, out.data, factors.data, tiling, stream);
        };
    });
}

aclnnStatus aclnnAlltoallvQuantize(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                   aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}

aclnnStatus aclnnAlltoallvDequantizeSumGetWorkspaceSize(const aclTensor* codes, const aclTensor* scales,
                                                        int64_t groupSize, aclTensor* out, uint64_t* workspaceSize,
                                                        aclOpExecutor** executor) {
    return prepare(__func__, workspaceSize, executor, [&](Workspace& workspace) -> Run {
        const View in = view("codes", codes, {ACL_INT8}), factors = view("scales", scales, {ACL_FLOAT});
        const View sum = view("out", out, floating_types);
        check_group_size(groupSize);
        if (in.shape.size() != 2 || in.shape[0] < 1) refuse(in.text() + ", expected [ranks, elements]");
        const int64_t ranks = in.shape[0], count = in.shape[1];
        if (factors.shape != std::vector<int64_t>{ranks, groups_of(count, groupSize)})
            refuse(factors.text() + ", expected [" + std::to_string(ranks) + ", " +
                   std::to_string(groups_of(count, groupSize)) + "]");
        check_numel(sum, count);
        require_apart({in, factors}, {sum});
        workspace.add(tiling_bytes);
        return [=](char* tiling, aclrtStream stream) {
            dequantize_sum(in.data, factors.data, ranks, count, groupSize, sum.dtype, sum.data, tiling, stream);
        };
    });
}

aclnnStatus aclnnAlltoallvDequantizeSum(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
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
        const auto optional = [](const char* name, const aclTensor* tensor, std::initializer_list<aclDataType> dtypes) {
            return tensor == nullptr ? View{name, *dtypes.begin(), {0}, nullptr} : view(name, tensor, dtypes);
        };
        const Options options{optional("scale", scale, floating_types),
                              optional("offset", offset, floating_types),
                              optional("status", status, {ACL_INT32}),
                              bits,
                              groupSize,
                              average,
                              saturate};
        const View in = scale == nullptr ? view("x", x, floating_types) : view("x", x, {ACL_INT8});
        const View sum = view("out", out, floating_types);
        check_numel(sum, in.numel());
        if (bits != 8 && (bits != 4 || scale != nullptr))
            refuse("bits is " + std::to_string(bits) + ", expected 8, or 4 without a scale");
        if (scale == nullptr) {
            check_group_size(groupSize);
        } else {
            if (options.scale.numel() < 1) refuse(options.scale.text() + ", expected 1 element or more");
            check_numel(options.offset, 1);
            if (options.offset.dtype != options.scale.dtype) refuse("offset has another type than scale");
            if (average) refuse("average is true with a scale, expected false");
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
        if (scale != nullptr || bits != 8 || average || !saturate || in_place || status != nullptr)
            refuse(
                "scale, bits = 4, average, saturate = false, status and out = x need windows, which this group has "
                "not, or which "
                "are too small for groupSize");
        return all_reduce(in, ranks, groupSize, sum, workspace);
    });
}

aclnnStatus aclnnAlltoallvQuantAllReduce(void* workspace, uint64_t workspaceSize, aclOpExecutor* executor,
                                         aclrtStream stream) {
    return execute(__func__, workspace, workspaceSize, executor, stream);
}
