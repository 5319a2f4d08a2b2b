// aclnn's operators on emulated NPUs: results against their definitions, and the numbers of what they refuse.
#include <cmath>
#include <csignal>
#include <optional>

#include "all_to_all_v/op_api/aclnn_all_to_all_v.h"
#include "hccl_group.h"
#include "op_kernel/cpu/half.h"
#include "quant_all_reduce/op_api/aclnn_quant_all_reduce.h"
#include "rows/op_api/aclnn_rows.h"

using namespace testing;

namespace {

/// A tensor over device memory, contiguous unless strides are given.
class Tensor {
  public:
    Tensor(aclDataType dtype, std::vector<int64_t> shape, void* data, const std::vector<int64_t>& strides = {})
        : tensor_(aclCreateTensor(shape.data(), shape.size(), dtype, strides.empty() ? nullptr : strides.data(), 0,
                                  ACL_FORMAT_ND, shape.data(), shape.size(), data)) {}
    ~Tensor() { aclDestroyTensor(tensor_); }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;
    operator aclTensor*() const { return tensor_; }

  private:
    aclTensor* tensor_;
};

/// The name of a group for operators, which keep something for it until this ends.
class Named {
  public:
    explicit Named(const Group& g) { CHECK_EQ(HcclGetCommName(g.comm, name_), 0); }
    ~Named() { aclnnAlltoallvReleaseGroup(name_); }
    Named(const Named&) = delete;
    Named& operator=(const Named&) = delete;
    operator const char*() const { return name_; }

  private:
    char name_[hccl_comm_name_bytes] = {};
};

/// The result of a GetWorkspaceSize, run once.
struct Prepared {
    uint64_t bytes = 12345;
    aclOpExecutor* executor = nullptr;

    template <class Second>
    int run(Second second, aclrtStream stream) {
        const DeviceArray<char> workspace(bytes);
        const int status = second(workspace.data(), bytes, executor, stream);
        aclrtSynchronizeStream(stream);
        return status;
    }
};

struct Coded {
    std::vector<int8_t> codes;
    std::vector<float> scales;
};

/// The definition: absmax / 127 or 7 per group, half to even.
Coded quantized(const std::vector<float>& x, size_t group, float most = 127) {
    Coded result{std::vector<int8_t>(x.size()), {}};
    for (size_t begin = 0; begin < x.size(); begin += group) {
        const size_t end = std::min(x.size(), begin + group);
        float largest = 0;
        for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
        const float scale = largest / most;
        result.scales.push_back(scale);
        for (size_t i = begin; i < end; ++i)
            result.codes[i] = static_cast<int8_t>(scale == 0 ? 0 : std::nearbyint(x[i] / scale));
    }
    return result;
}

float decoded(const Coded& coded, size_t group, size_t i) {
    return static_cast<float>(coded.codes[i]) * coded.scales[i / group];
}

/// Quarters whose largest of a group is 127 / 4 or 7 / 4, so that no rounding depends on how a scale is used.
std::vector<float> data(int rank, size_t count, size_t group, int most = 127) {
    std::vector<float> x(count);
    for (size_t i = 0; i < count; ++i) {
        const int quarters = static_cast<int>(i * 37 + static_cast<size_t>(rank) * 11) % (2 * most);
        x[i] = static_cast<float>(quarters - most) / 4;
    }
    for (size_t begin = 0; begin < count; begin += group)
        x[begin] = static_cast<float>(rank % 2 == 0 ? most : -most) / 4;
    return x;
}

TEST(quantize_and_sum) {
    const Stream stream;
    const size_t group = 7, count = 45, ranks = 3;
    std::vector<int8_t> all_codes;
    std::vector<float> all_scales, expected(count);
    for (size_t r = 0; r < ranks; ++r) {
        const std::vector<float> x = data(static_cast<int>(r), count, group);
        const Coded reference = quantized(x, group);
        const DeviceArray<float> input(x), scales(reference.scales.size());
        const DeviceArray<int8_t> codes(count);
        const Tensor tx(ACL_FLOAT, {9, 5}, input.data()), tc(ACL_INT8, {count}, codes.data());
        const Tensor ts(ACL_FLOAT, {7}, scales.data());
        Prepared call;
        CHECK_EQ(aclnnAlltoallvQuantizeGetWorkspaceSize(tx, 8, group, tc, ts, &call.bytes, &call.executor), 0);
        CHECK_EQ(call.run(aclnnAlltoallvQuantize, stream), 0);
        CHECK(codes.values() == reference.codes);
        CHECK(scales.values() == reference.scales);
        all_codes.insert(all_codes.end(), reference.codes.begin(), reference.codes.end());
        all_scales.insert(all_scales.end(), reference.scales.begin(), reference.scales.end());
        for (size_t i = 0; i < count; ++i) expected[i] += decoded(reference, group, i);
    }
    const DeviceArray<int8_t> codes(all_codes);
    const DeviceArray<float> scales(all_scales), out(count);
    const DeviceArray<uint16_t> half(count);
    const Tensor tc(ACL_INT8, {ranks, count}, codes.data()), ts(ACL_FLOAT, {ranks, 7}, scales.data());
    const Tensor to(ACL_FLOAT, {count}, out.data()), th(ACL_FLOAT16, {count}, half.data());
    Prepared call, rounded;
    CHECK_EQ(aclnnAlltoallvDequantizeSumGetWorkspaceSize(tc, ts, 8, group, to, &call.bytes, &call.executor), 0);
    CHECK_EQ(aclnnAlltoallvDequantizeSumGetWorkspaceSize(tc, ts, 8, group, th, &rounded.bytes, &rounded.executor), 0);
    CHECK_EQ(aclSetAclOpExecutorRepeatable(call.executor), 0);
    for (int repeat = 0; repeat < 2; ++repeat) {
        CHECK_EQ(aclrtMemset(out.data(), out.bytes(), 0, out.bytes()), 0);
        CHECK_EQ(call.run(aclnnAlltoallvDequantizeSum, stream), 0);
        CHECK(out.values() == expected);
    }
    CHECK_EQ(aclDestroyAclOpExecutor(call.executor), 0);
    CHECK_EQ(rounded.run(aclnnAlltoallvDequantizeSum, stream), 0);
    const std::vector<uint16_t> halves = half.values();
    for (size_t i = 0; i < count; ++i) CHECK_EQ(halves[i], alltoallv::kernel::float_to_float16(expected[i]));
}

TEST(refusals) {
    const Stream stream;
    const DeviceArray<float> x(std::vector<float>(8, 1.0F)), scales(2);
    const DeviceArray<int8_t> codes(std::vector<int8_t>(8, 77));
    const Tensor tx(ACL_FLOAT, {8}, x.data()), tc(ACL_INT8, {8}, codes.data()), ts(ACL_FLOAT, {2}, scales.data());
    const Tensor strided(ACL_FLOAT, {4, 2}, x.data(), {1, 4}), nowhere(ACL_FLOAT, {8}, nullptr);
    const Tensor ints(ACL_INT32, {8}, x.data()), over(ACL_INT8, {8}, x.data());
    const Tensor three(ACL_FLOAT, {3}, scales.data()), one(ACL_FLOAT, {1}, scales.data());
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    const auto first = [&](aclTensor* a, int64_t group, aclTensor* b, aclTensor* c) {
        return aclnnAlltoallvQuantizeGetWorkspaceSize(a, 8, group, b, c, &bytes, &executor);
    };
    CHECK_EQ(first(nullptr, 4, tc, ts), 161001);
    check_message("x is null");
    CHECK_EQ(first(tx, 4, nullptr, ts), 161001);
    CHECK_EQ(first(nowhere, 4, tc, ts), 161001);
    CHECK_EQ(aclnnAlltoallvQuantizeGetWorkspaceSize(tx, 8, 4, tc, ts, nullptr, &executor), 161001);
    CHECK_EQ(aclnnAlltoallvQuantizeGetWorkspaceSize(tx, 8, 4, tc, ts, &bytes, nullptr), 161001);
    CHECK_EQ(first(ints, 4, tc, ts), 161002);
    check_message("x has the type int32, expected float32, float16, bfloat16");
    CHECK_EQ(first(strided, 4, tc, ts), 161002);
    check_message("x is not contiguous");
    CHECK_EQ(first(tx, 0, tc, ts), 161002);
    check_message("groupSize is 0, expected at least 1");
    CHECK_EQ(first(tx, 4, tc, three), 161002);
    check_message("scales has the shape [3], expected 2 elements");
    CHECK_EQ(first(tx, 4, over, ts), 161002);
    check_message("codes and x share memory");
    CHECK_EQ(aclnnAlltoallvQuantizeGetWorkspaceSize(tx, 5, 4, tc, ts, &bytes, &executor), 161002);
    check_message("bits is 5, expected 8 or 4");
    CHECK_EQ(aclnnAlltoallvQuantizeGetWorkspaceSize(tx, 4, 4, tc, ts, &bytes, &executor), 161002);
    check_message("codes has the shape [8], expected 4 elements");
    CHECK(executor == nullptr);

    const DeviceArray<float> y(8);
    const Tensor ty(ACL_FLOAT, {8}, y.data());
    const auto sum = [&](aclTensor* a, aclTensor* scale, aclTensor* offset, bool average, aclTensor* out) {
        return aclnnAlltoallvQuantAllReduceGetWorkspaceSize(a, scale, offset, "nobody", 8, 4, average, true, out,
                                                            nullptr, &bytes, &executor);
    };
    CHECK_EQ(sum(tc, ts, nullptr, false, ty), 161002);
    check_message("one is null, expected both or neither");
    CHECK_EQ(sum(tx, ts, one, false, ty), 161002);
    check_message("x has the type float32, expected int8");
    CHECK_EQ(sum(tc, ts, three, false, ty), 161002);
    check_message("offset has the shape [3], expected 1 elements");
    CHECK_EQ(sum(tc, ts, one, true, ty), 161002);
    check_message("average is true with a scale");
    CHECK_EQ(sum(tc, ts, one, false, tx), 161002);  // tc and tx do not share memory: the group is refused
    check_message("which names no communicator of this process");
    const auto reduce = [&](const char* group) {
        return aclnnAlltoallvQuantAllReduceGetWorkspaceSize(tx, nullptr, nullptr, group, 8, 4, false, true, ty, nullptr,
                                                            &bytes, &executor);
    };
    CHECK_EQ(reduce(nullptr), 161001);
    CHECK_EQ(reduce("nobody"), 161002);
    check_message("which names no communicator of this process");
    CHECK_EQ(reduce(std::string(128, 'a').c_str()), 161002);

    CHECK_EQ(aclnnAlltoallvQuantize(nullptr, 0, nullptr, stream), 161001);
    CHECK_EQ(first(tx, 4, tc, ts), 0);
    const DeviceArray<char> workspace(bytes);
    CHECK_EQ(aclnnAlltoallvDequantizeSum(workspace.data(), bytes, executor, stream), 161002);  // another's executor
    CHECK_EQ(aclnnAlltoallvQuantize(nullptr, bytes, executor, stream), 161001);
    CHECK_EQ(aclnnAlltoallvQuantize(workspace.data(), bytes - 1, executor, stream), 161002);
    CHECK_EQ(aclrtSynchronizeStream(stream), 0);
    CHECK(codes.values() == std::vector<int8_t>(8, 77));  // nothing has run yet
    CHECK_EQ(aclnnAlltoallvQuantize(workspace.data(), bytes, executor, stream), 0);
    CHECK_EQ(aclrtSynchronizeStream(stream), 0);
    CHECK(codes.values() == std::vector<int8_t>(8, 127));
}

TEST(rows_by_indices) {
    const Stream stream;
    const DeviceArray<int16_t> x(std::vector<int16_t>{0, 1, 2, 10, 11, 12, 20, 21, 22});
    const DeviceArray<int> index(std::vector<int>{2, -1, 0, 2});
    const DeviceArray<int16_t> gathered(std::vector<int16_t>(12, 7)), scattered(std::vector<int16_t>(12, 7));
    const Tensor tx(ACL_INT16, {3, 3}, x.data()), ti(ACL_INT32, {4}, index.data());
    const Tensor tg(ACL_INT16, {4, 3}, gathered.data());
    Prepared gather;
    CHECK_EQ(aclnnAlltoallvGatherRowsGetWorkspaceSize(tx, ti, tg, &gather.bytes, &gather.executor), 0);
    CHECK_EQ(gather.run(aclnnAlltoallvGatherRows, stream), 0);
    CHECK(gathered.values() == (std::vector<int16_t>{20, 21, 22, 7, 7, 7, 0, 1, 2, 20, 21, 22}));

    const DeviceArray<int> back(std::vector<int>{3, 4, 0});
    const Tensor tb(ACL_INT32, {3}, back.data()), ts(ACL_INT16, {4, 3}, scattered.data());
    Prepared scatter;
    CHECK_EQ(aclnnAlltoallvScatterRowsGetWorkspaceSize(tx, tb, ts, &scatter.bytes, &scatter.executor), 0);
    CHECK_EQ(aclnnAlltoallvGatherRows(x.data(), scatter.bytes, scatter.executor, stream), 161002);  // another's
    CHECK_EQ(scatter.run(aclnnAlltoallvScatterRows, stream), 0);
    CHECK(scattered.values() == (std::vector<int16_t>{20, 21, 22, 7, 7, 7, 7, 7, 7, 0, 1, 2}));

    const auto refused = [&](aclTensor* from, aclTensor* at, aclTensor* to) {
        return aclnnAlltoallvGatherRowsGetWorkspaceSize(from, at, to, &gather.bytes, &gather.executor);
    };
    const Tensor wide(ACL_INT16, {4, 2}, scattered.data());
    const Tensor scalar(ACL_INT16, {}, x.data());
    CHECK_EQ(refused(nullptr, ti, tg), 161001);
    CHECK_EQ(refused(tx, tg, tg), 161002);
    check_message("index has the type aclDataType 6, expected int32");
    CHECK_EQ(refused(tx, tb, tg), 161002);
    check_message("index has the shape [3], expected [4], an index for each row of out");
    CHECK_EQ(refused(tx, ti, wide), 161002);
    check_message("out has the shape [4, 2], expected rows shaped as x's");
    CHECK_EQ(refused(scalar, ti, tg), 161002);
    check_message("x has no dimensions");
    CHECK_EQ(aclnnAlltoallvScatterRowsGetWorkspaceSize(tx, ti, ts, &scatter.bytes, &scatter.executor), 161002);
    check_message("index has the shape [4], expected [3], an index for each row of x");
    const Tensor other(ACL_FLOAT16, {4, 3}, scattered.data());
    CHECK_EQ(refused(tx, ti, other), 161002);
    check_message("out has another type than x");
}

TEST(an_empty_tensor_is_contiguous) {
    const DeviceArray<float> x(1), scales(1);
    const DeviceArray<int8_t> codes(1);
    const Tensor tx(ACL_FLOAT, {0, 3}, x.data(), {0, 0}), tc(ACL_INT8, {0}, codes.data());
    const Tensor ts(ACL_FLOAT, {0}, scales.data());
    uint64_t bytes = 0;
    aclOpExecutor* executor = nullptr;
    CHECK_EQ(aclnnAlltoallvQuantizeGetWorkspaceSize(tx, 8, 4, tc, ts, &bytes, &executor), 0);
    CHECK_EQ(aclDestroyAclOpExecutor(executor), 0);
}

TEST(int4) {
    const Stream stream;
    const size_t group = 7, count = 45;
    const int64_t bytes = 6 * 4 + 2;  // a group of 7 has 4 bytes, one of 3 has 2
    const std::vector<float> x = data(0, count, group, 7);
    const Coded reference = quantized(x, group, 7);
    std::vector<int8_t> packed;
    for (size_t begin = 0; begin < count; begin += group)
        for (size_t i = begin; i < std::min(count, begin + group); i += 2) {
            const int odd = i + 1 < std::min(count, begin + group) ? reference.codes[i + 1] : 0;
            packed.push_back(static_cast<int8_t>((reference.codes[i] & 15) | (odd & 15) << 4));
        }
    const DeviceArray<float> input(x), scales(reference.scales.size()), out(count);
    const DeviceArray<int8_t> codes(packed.size());
    const Tensor tx(ACL_FLOAT, {45}, input.data()), tc(ACL_UINT8, {bytes}, codes.data());
    const Tensor ts(ACL_FLOAT, {7}, scales.data()), to(ACL_FLOAT, {45}, out.data());
    Prepared first, second;
    CHECK_EQ(aclnnAlltoallvQuantizeGetWorkspaceSize(tx, 4, group, tc, ts, &first.bytes, &first.executor), 0);
    CHECK_EQ(first.run(aclnnAlltoallvQuantize, stream), 0);
    CHECK(codes.values() == packed);
    CHECK(scales.values() == reference.scales);
    const Tensor one_c(ACL_INT8, {1, bytes}, codes.data()), one_s(ACL_FLOAT, {1, 7}, scales.data());
    CHECK_EQ(aclnnAlltoallvDequantizeSumGetWorkspaceSize(one_c, one_s, 4, group, to, &second.bytes, &second.executor),
             0);
    CHECK_EQ(second.run(aclnnAlltoallvDequantizeSum, stream), 0);
    CHECK(out.values() == x);
}

TEST(shared_scale_sum) {
    const Stream stream;
    const DeviceArray<int8_t> x(std::vector<int8_t>{1, 2, 3, 4, -10, 20, -30, 127});  // of two ranks
    const DeviceArray<float> scale(std::vector<float>{0.5F, 2}), offset(std::vector<float>{3}), out(4);
    const Tensor tx(ACL_INT8, {2, 4}, x.data()), ts(ACL_FLOAT, {2}, scale.data()), tf(ACL_FLOAT, {1}, offset.data());
    const Tensor to(ACL_FLOAT, {4}, out.data()), three(ACL_FLOAT, {3}, out.data());
    Prepared call;
    CHECK_EQ(aclnnAlltoallvSharedScaleSumGetWorkspaceSize(tx, ts, tf, three, &call.bytes, &call.executor), 161002);
    check_message("out has the shape [3], expected 4 elements");
    CHECK_EQ(aclnnAlltoallvSharedScaleSumGetWorkspaceSize(tx, ts, tf, to, &call.bytes, &call.executor), 0);
    CHECK_EQ(call.run(aclnnAlltoallvSharedScaleSum, stream), 0);
    const std::vector<float> expected = {-1.5F, 56, -10.5F, 274};
    CHECK(out.values() == expected);
}

/// A group of so many elements does not fit into a window, so that HCCL moves what kernels have made.
constexpr int64_t too_large = int64_t{1} << 40;

void check_reduces(Group& g, const char* name, size_t count, int64_t group_size, int bits, bool average) {
    const size_t group = std::min<size_t>(static_cast<size_t>(group_size), std::max<size_t>(count, 1));
    const int most = bits == 8 ? 127 : 7;
    std::vector<float> expected(count);
    for (int r = 0; r < g.size; ++r) {
        const Coded coded = quantized(data(r, count, group, most), group, static_cast<float>(most));
        for (size_t i = 0; i < count; ++i) expected[i] += decoded(coded, group, i);
    }
    if (average)
        for (float& value : expected) value /= static_cast<float>(g.size);
    const DeviceArray<float> x(data(g.rank, count, group, most)), out(count);
    const DeviceArray<int32_t> status(std::vector<int32_t>(16, -1));
    const Tensor tx(ACL_FLOAT, {static_cast<int64_t>(count)}, x.data());
    const Tensor to(ACL_FLOAT, {static_cast<int64_t>(count)}, out.data()), ts(ACL_INT32, {2, 8}, status.data());
    Prepared call;
    CHECK_EQ(aclnnAlltoallvQuantAllReduceGetWorkspaceSize(tx, nullptr, nullptr, name, bits, group_size, average, true,
                                                          to, ts, &call.bytes, &call.executor),
             0);
    if (count == 200) {
        CHECK_EQ(aclnnAlltoallvQuantAllReduce(nullptr, call.bytes, call.executor, g.stream), 161001);
        CHECK_EQ(aclnnAlltoallvQuantAllReduce(x.data(), call.bytes - 1, call.executor, g.stream), 161002);
    }
    CHECK_EQ(call.run(aclnnAlltoallvQuantAllReduce, g.stream), 0);
    CHECK(out.values() == expected);
    if (count > 0) CHECK_EQ(status.values()[0], 0);
}

TEST(all_reduce, Group& g) {
    const Named name(g);
    for (const size_t count : {0u, 1u, 8u, 9u, 200u, 1001u})
        for (const int64_t group_size : {int64_t{8}, int64_t{7}, too_large})
            for (const int bits : {8, 4}) check_reduces(g, name, count, group_size, bits, count == 9);
}

/// The sum of int8 values with a scale for each of two channels.
void check_shares_scale(Group& g, const char* name, int64_t count) {
    std::vector<int8_t> values;
    std::vector<float> expected;
    for (int64_t i = 0; i < count; ++i) {
        values.push_back(static_cast<int8_t>(g.rank % 5 + i % 20));
        float sum = 3.0F * static_cast<float>(g.size);
        for (int r = 0; r < g.size; ++r) sum += static_cast<float>(r % 5 + i % 20);
        expected.push_back(sum * (i % 2 == 0 ? 0.5F : 2.0F));
    }
    const DeviceArray<int8_t> x(values);
    const DeviceArray<float> scale(std::vector<float>{0.5F, 2}), offset(std::vector<float>{3}), out(values.size());
    const Tensor tx(ACL_INT8, {count}, x.data()), to(ACL_FLOAT, {count}, out.data());
    const Tensor ts(ACL_FLOAT, {2}, scale.data()), tf(ACL_FLOAT, {1}, offset.data());
    Prepared call;
    CHECK_EQ(aclnnAlltoallvQuantAllReduceGetWorkspaceSize(tx, ts, tf, name, 8, 1, false, true, to, nullptr, &call.bytes,
                                                          &call.executor),
             0);
    CHECK_EQ(call.run(aclnnAlltoallvQuantAllReduce, g.stream), 0);
    CHECK(out.values() == expected);
}

TEST(one_scale_for_all_ranks, Group& g) {
    const Named name(g);
    for (const int64_t count : {2, 10, 1002}) check_shares_scale(g, name, count);
}

/// More ranks than a window serves.
TEST(all_reduce_of_65_ranks) {
    in_group(65, [](Group& g) {
        const Named name(g);
        check_reduces(g, name, 300, 2, 4, false);
        check_shares_scale(g, name, 300);
    });
}

/// Rank r sends (r + 2 j) % 4 rows of two numbers to rank j.
std::vector<int64_t> counts_of(const Group& g, int rank) {
    std::vector<int64_t> counts;
    for (int j = 0; j < g.size; ++j) counts.push_back((rank + 2 * j) % 4);
    return counts;
}

struct Exchange {
    std::vector<int> out;
    std::vector<int64_t> recv_counts;
    std::vector<int32_t> status;
};

/// Blocks lie in the reverse order of the ranks, with displacements, and one row before the first. `out` has -1.
Exchange exchange(Group& g, const char* name, const std::vector<int64_t>& counts, int64_t capacity) {
    std::vector<int> rows = {-9, -9};
    std::vector<int64_t> displs(counts.size());
    for (int j = g.size; j-- > 0;) {
        displs[static_cast<size_t>(j)] = static_cast<int64_t>(rows.size()) / 2;
        for (int k = 0; k < counts[static_cast<size_t>(j)]; ++k)
            rows.insert(rows.end(), {1000 * g.rank + 100 * j + k, 7});
    }
    const auto ranks = static_cast<int64_t>(g.size), input_rows = static_cast<int64_t>(rows.size()) / 2;
    const DeviceArray<int> x(rows), out(std::vector<int>(static_cast<size_t>(2 * capacity), -1));
    const DeviceArray<int64_t> sends(counts), places(displs), receives(counts.size());
    uint32_t lanes = 0;
    uint64_t lane_bytes = 0;
    CHECK_EQ(aclnnAlltoallvGetWindows(name, &lanes, &lane_bytes), 0);
    CHECK(lanes > 1 && lane_bytes > 0);
    const DeviceArray<int32_t> status(8 * lanes);
    const Tensor tx(ACL_INT32, {input_rows, 2}, x.data()), to(ACL_INT32, {capacity, 2}, out.data());
    const Tensor tc(ACL_INT64, {ranks}, sends.data()), td(ACL_INT64, {ranks}, places.data());
    const Tensor tr(ACL_INT64, {ranks}, receives.data()), ts(ACL_INT32, {lanes, 8}, status.data());
    Prepared call;
    CHECK_EQ(aclnnAlltoallvAllToAllVGetWorkspaceSize(tx, tc, td, name, false, to, tr, ts, &call.bytes, &call.executor),
             0);
    CHECK_EQ(call.run(aclnnAlltoallvAllToAllV, g.stream), 0);
    return {out.values(), receives.values(), status.values()};
}

bool untouched(const Exchange& result) {
    return std::all_of(result.out.begin(), result.out.end(), [](int value) { return value == -1; });
}

TEST(all_to_all_v_with_device_counts, Group& g) {
    const Named name(g);
    std::vector<int> expected;
    std::vector<int64_t> receives;
    for (int i = 0; i < g.size; ++i) {
        receives.push_back((i + 2 * g.rank) % 4);
        for (int k = 0; k < receives.back(); ++k) expected.insert(expected.end(), {1000 * i + 100 * g.rank + k, 7});
    }
    expected.resize(2 * 20, -1);
    const Exchange result = exchange(g, name, counts_of(g, g.rank), 20);
    CHECK_EQ(result.status[0], 0);
    CHECK(result.recv_counts == receives);
    CHECK(result.out == expected);
}

/// None waits for a rank whose windows fail; they can be made later.
TEST(windows_fail_on_all_ranks, Group& g) {
    const Named name(g);
    const int failing = g.size - 1;
    for (const char* call : {"HcclGetHcclBuffer", "HcclKfcAllocOpArgs"}) {
        uint32_t lanes = 0;
        uint64_t bytes = 0;
        if (g.rank == failing) option("faults", std::string(call) + "=fail:4");
        CHECK_EQ(aclnnAlltoallvGetWindows(name, &lanes, &bytes), 361001);
        check_message(g.rank == failing ? std::string(call) + " returned 4"
                                        : "rank " + std::to_string(failing) + " has failed to make its windows");
        option("faults", "");
        CHECK_EQ(exchange(g, name, counts_of(g, g.rank), 20).status[0], 0);
        CHECK_EQ(aclnnAlltoallvReleaseGroup(name), 0);
    }
}

TEST(all_ranks_agree_on_an_overflow, Group& g) {
    const Named name(g);
    const Exchange result =
        exchange(g, name, std::vector<int64_t>(static_cast<size_t>(g.size), 2), g.rank == 0 ? 1 : 20);
    CHECK_EQ(result.status[0], 4);
    CHECK_EQ(result.status[1], 0);
    CHECK(untouched(result));
    CHECK_EQ(exchange(g, name, counts_of(g, g.rank), 20).status[0], 0);  // the communicator stays usable
}

TEST(all_ranks_agree_on_bad_counts, Group& g) {
    const Named name(g);
    std::vector<int64_t> counts(static_cast<size_t>(g.size), 0);
    if (g.rank == g.size - 1) counts[0] = -1;
    const Exchange result = exchange(g, name, counts, 4);
    CHECK_EQ(result.status[0], 5);
    CHECK_EQ(result.status[1], g.size - 1);
    CHECK(untouched(result));
}

/// The last rank is killed between two calls: the others' next one ends in time, and names it.
TEST(killed_rank) {
    static constexpr int size = 3, victim = 2;
    CHECK_EQ(HcclGetRootInfo(&root), 0);
    const std::vector<int> statuses = run_processes(size, [](int rank) {
        CHECK_EQ(setenv("HCCL_EXEC_TIMEOUT", "1", 1), 0);
        Group g(rank, size);
        const Named name(g);
        CHECK_EQ(exchange(g, name, counts_of(g, rank), 20).status[0], 0);
        if (rank == victim) kill(getpid(), SIGKILL);
        const Exchange result = exchange(g, name, counts_of(g, rank), 20);
        CHECK(result.status[0] == 1 || result.status[0] == 2);
        CHECK_EQ(result.status[1], victim);
        CHECK(untouched(result));
        CHECK_EQ(exchange(g, name, counts_of(g, rank), 20).status[0], 3);
    });
    for (int rank = 0; rank < size; ++rank)
        CHECK_EQ(statuses[static_cast<size_t>(rank)], rank == victim ? 128 + SIGKILL : 0);
}

}  // namespace
