// Rows chosen by number against plain loops, in all dtypes that are weighed, with zeros and with streaming stores.
#include "op_kernel/cpu/rows.h"

#include <cstring>
#include <vector>

#include "base/error.h"
#include "kernel_reference.h"
#include "op_kernel/cpu/half.h"
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
    gather_rows({to.data(), out_stride}, {from.data(), stride}, index.data(), count, bytes);
    const Memory zeros(bytes);
    for (size_t i = 0; i < count; ++i) {
        const auto* want = index[i] < 0 ? zeros.data() : from.data() + static_cast<size_t>(index[i]) * stride;
        EXPECT(same_bytes(to.data() + i * out_stride, want, bytes), "row %zu of %zu bytes", i, bytes);
        EXPECT(to[(i + 1) * out_stride - 1] == 77, "beyond row %zu of %zu bytes", i, bytes);
    }
}

/// `read` and `write` convert an element to float and back.
template <class Element, class Read, class Write>
void test_floats(DType dtype, size_t length, Read read, Write write) {
    constexpr size_t count = 5, terms = 3;
    const int64_t index[] = {4, 0, 3, 3, 1}, chosen[] = {0, 1, 2, 4, -1, 3, -1, -1, -1, 2, 2, 2, 3, 0, -1};
    const float weights[] = {0.3F, -1.7F, 0, 1, 1e-3F};
    std::vector<Element> from(count * length), weighed(from.size()), sums(from.size()), want(length);
    for (auto& each : from) each = write(static_cast<float>(random_below(2000)) / 1000 - 1);
    const size_t stride = length * sizeof(Element);
    const ConstRows in{from.data(), stride};
    weigh_rows(dtype, {weighed.data(), stride}, in, index, weights, count, length);
    sum_rows(dtype, {sums.data(), stride}, in, chosen, terms, count, length);
    const std::vector<Element> zeros(length);
    for (size_t i = 0; i < count; ++i) {
        for (size_t k = 0; k < length; ++k) {
            const float factor = read(from[static_cast<size_t>(index[i]) * length + k]);
            EXPECT(weighed[i * length + k] == write(factor * weights[i]), "weighed row %zu, element %zu", i, k);
        }
        const void* inputs[terms];
        for (size_t term = 0; term < terms; ++term) {
            const int64_t row = chosen[i * terms + term];
            inputs[term] = row < 0 ? zeros.data() : from.data() + static_cast<size_t>(row) * length;
        }
        reduce(dtype, ReduceOp::sum, want.data(), inputs, terms, length);
        EXPECT(same_bytes(want.data(), sums.data() + i * length, stride), "sum of row %zu", i);
    }
}

void test_refusal() {
    bool refused = false;
    try {
        weigh_rows(DType::int8, {nullptr, 0}, {nullptr, 0}, nullptr, nullptr, 0, 1);
    } catch (const Error&) {
        refused = true;
    }
    EXPECT(refused, "weights of int8");
}

}  // namespace

int main() {
    for (const size_t bytes : {0, 1, 17, 1024, 5000}) test_gather(9, bytes);
    test_gather(9000, 4100);  // more than the caches hold
    const auto same = [](float value) { return value; };
    for (const size_t length : {0, 1, 100, 5000}) {
        test_floats<float>(DType::float32, length, same, same);
        test_floats<uint16_t>(DType::float16, length, float16_to_float, float_to_float16);
        test_floats<uint16_t>(DType::bfloat16, length, bfloat16_to_float, float_to_bfloat16);
    }
    test_refusal();
    return report("rows");
}
