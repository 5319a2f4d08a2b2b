// Rows chosen by number against plain loops, in all dtypes that are weighed, with zeros and with streaming stores.
#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "kernel_reference.h"
#include "op_kernel/cpu/coded_rows.h"
#include "op_kernel/cpu/reduce.h"

using namespace alltoallv;          // NOLINT
using namespace alltoallv::kernel;  // NOLINT
using namespace kernel_reference;   // NOLINT

namespace {

using Memory = std::vector<unsigned char>;

Memory some_bytes(size_t count) {
    Memory made(count);
    for (auto& each : made) each = static_cast<unsigned char>(random_below(256));
    return made;
}

/// Of no bytes the pointers may be null, which memcmp may not be given.
bool same_bytes(const void* one, const void* other, size_t bytes) {
    return bytes == 0 || std::memcmp(one, other, bytes) == 0;
}

void test_gather(size_t count, size_t bytes) {
    const size_t stride = bytes + 5, out_stride = bytes + 3, rows = 7;
    const Memory from = some_bytes(rows * stride);
    Memory to(count * out_stride, 77);
    std::vector<int64_t> index(count);
    for (auto& each : index) each = static_cast<int64_t>(random_below(rows + 1)) - 1;
    gather_rows({to.data(), out_stride}, {from.data(), stride}, index.data(), nullptr, count, bytes);
    std::vector<int64_t> where(count);
    for (size_t i = 0; i < count; ++i) where[i] = static_cast<int64_t>(count - 1 - i);
    Memory backwards(to.size(), 77);
    gather_rows({backwards.data(), out_stride}, {from.data(), stride}, index.data(), where.data(), count, bytes);
    const Memory zeros(bytes);
    for (size_t i = 0; i < count; ++i) {
        const auto* want = index[i] < 0 ? zeros.data() : from.data() + static_cast<size_t>(index[i]) * stride;
        EXPECT(same_bytes(to.data() + i * out_stride, want, bytes), "row %zu of %zu bytes", i, bytes);
        EXPECT(same_bytes(backwards.data() + (count - 1 - i) * out_stride, want, bytes), "row %zu, placed", i);
        EXPECT(to[(i + 1) * out_stride - 1] == 77, "beyond row %zu of %zu bytes", i, bytes);
    }
}

/// What the tests of floats choose: rows of 5, by number, and terms of sums.
constexpr size_t count = 5, terms = 3;
constexpr int64_t picked[] = {4, 0, 3, 3, 1}, chosen[] = {0, 1, 2, 4, -1, 3, -1, -1, -1, 2, 2, 2, 3, 0, -1};
constexpr float weights[] = {0.3F, -1.7F, 0, 1, 1e-3F};

Memory some_floats(DType dtype, size_t n) {
    Memory made(n * size_of(dtype));
    for (size_t k = 0; k < n; ++k) put(dtype, made.data(), k, static_cast<float>(random_below(2000)) / 1000 - 1);
    return made;
}

void test_floats(DType dtype, size_t length) {
    const size_t stride = length * size_of(dtype);
    const Memory from = some_floats(dtype, count * length), zeros(stride);
    Memory weighed(from.size()), sums(from.size()), want(stride);
    const ConstRows in{from.data(), stride};
    weigh_rows(dtype, {weighed.data(), stride}, in, picked, weights, count, length);
    sum_rows(dtype, {sums.data(), stride}, in, chosen, terms, count, length);
    for (size_t i = 0; i < count; ++i) {
        for (size_t k = 0; k < length; ++k)
            put(dtype, want.data(), k,
                get(dtype, from.data(), static_cast<size_t>(picked[i]) * length + k) * weights[i]);
        EXPECT(same_bytes(want.data(), weighed.data() + i * stride, stride), "weighed row %zu of %zu", i, length);
        const void* inputs[terms];
        for (size_t term = 0; term < terms; ++term) {
            const int64_t row = chosen[i * terms + term];
            inputs[term] = row < 0 ? zeros.data() : from.data() + static_cast<size_t>(row) * stride;
        }
        reduce(dtype, ReduceOp::sum, want.data(), inputs, terms, length);
        EXPECT(same_bytes(want.data(), sums.data() + i * stride, stride), "sum of row %zu", i);
    }
}

/// Rows of codes do in one step what takes two with rows of values.
void test_codes(DType dtype, CodeFormat format, size_t length) {
    const int64_t where[] = {2, 4, 1, 0, 3};
    const CodedRows coded{{format, std::max<size_t>(length, 1)}, dtype, length};
    const size_t bytes = length * size_of(dtype), stride = coded.bytes() + 12;
    Memory from = some_floats(dtype, count * length), two(from.size()), one(from.size()), sums(from.size());
    std::vector<float> record(count * stride / sizeof(float)), other(record.size());  // aligned
    weigh_rows(dtype, {two.data(), bytes}, {from.data(), bytes}, picked, weights, count, length);
    coded.encode({record.data(), stride}, {two.data(), bytes}, nullptr, nullptr, count);
    coded.encode({other.data(), stride}, {from.data(), bytes}, picked, weights, count);
    EXPECT(same_bytes(record.data(), other.data(), count * stride), "codes of weighed rows of %zu", length);

    const ConstRows in{record.data(), stride};
    EXPECT(coded.decode({from.data(), bytes}, in, nullptr, nullptr, count, Overflow::saturate), "all fits");
    coded.decode({one.data(), bytes}, in, chosen + 3, where, count, Overflow::saturate);
    const Memory zeros(bytes);
    for (size_t i = 0; i < count; ++i) {
        const int64_t row = chosen[3 + i];
        const auto* want = row < 0 ? zeros.data() : from.data() + static_cast<size_t>(row) * bytes;
        EXPECT(same_bytes(one.data() + static_cast<size_t>(where[i]) * bytes, want, bytes), "values of row %zu of %zu",
               i, length);
    }
    sum_rows(dtype, {two.data(), bytes}, {from.data(), bytes}, chosen, terms, count, length);
    coded.sum({sums.data(), bytes}, in, chosen, terms, count);
    EXPECT(same_bytes(sums.data(), two.data(), count * bytes), "sums of rows of %zu", length);
}

}  // namespace

int main() {
    for (const size_t bytes : {0, 1, 17, 1024, 5000}) test_gather(9, bytes);
    test_gather(9000, 4100);  // more than the caches hold
    for (const size_t length : {0, 1, 100, 5000})
        for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) test_floats(dtype, length);
    for (const CodeFormat format : {CodeFormat::int8, CodeFormat::int4})
        for (const size_t length : {0, 1, 101, 5000})
            for (const DType dtype : {DType::float32, DType::bfloat16}) test_codes(dtype, format, length);
    const auto weigh_int8 = [] { weigh_rows(DType::int8, {nullptr, 0}, {nullptr, 0}, nullptr, nullptr, 0, 1); };
    EXPECT(!testing::thrown(weigh_int8).empty(), "weights of int8");
    return report("rows");
}
