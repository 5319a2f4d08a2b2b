// Values pass through the caches between two steps; only rows of codes and results are in memory.
#include "op_kernel/cpu/coded_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "op_kernel/cpu/bounds.h"
#include "op_kernel/cpu/elements.h"
#include "op_kernel/cpu/reduce.h"

namespace alltoallv::kernel {

void CodedRows::encode(Rows out, ConstRows in, const int64_t* index, const float* weights, size_t count) const {
    std::vector<Bytes> product(weights == nullptr ? 0 : length * size_of(dtype));
    const size_t codes = format.scale_bytes(length);
    for (size_t i = 0; i < count; ++i) {
        const auto from = static_cast<int64_t>(index == nullptr ? i : static_cast<size_t>(index[i]));
        const void* values = static_cast<const Bytes*>(in.data) + static_cast<size_t>(from) * in.stride;
        if (weights != nullptr) {
            weigh_rows(dtype, {product.data(), 0}, in, &from, weights + i, 1, length);
            values = product.data();
        }
        Bytes* to = static_cast<Bytes*>(out.data) + i * out.stride;
        quantize(format, dtype, values, length, to + codes, to, nullptr);
        std::fill(to + used(), to + bytes(), Bytes{0});
    }
}

bool CodedRows::decode(Rows out, ConstRows in, const int64_t* index, const int64_t* where, size_t count,
                       Overflow overflow) const {
    bool fits = true;
    for (size_t i = 0; i < count; ++i) {
        const size_t place = where == nullptr ? i : static_cast<size_t>(where[i]);
        Bytes* to = static_cast<Bytes*>(out.data) + place * out.stride;
        if (index != nullptr && index[i] < 0) {
            std::fill_n(to, length * size_of(dtype), Bytes{0});
            continue;
        }
        const size_t line = index == nullptr ? i : static_cast<size_t>(index[i]);
        const Bytes* from = static_cast<const Bytes*>(in.data) + line * in.stride;
        fits &= dequantize(format, dtype, from + format.scale_bytes(length), from, length, overflow, to);
    }
    return fits;
}

void CodedRows::bound(ConstRows in, size_t count, Overflow overflow, float* out) const {
    const Bounds bounds(format.codes, 1, false, false, dtype, overflow);
    for (size_t i = 0; i < count; ++i) {
        const Bytes* from = static_cast<const Bytes*>(in.data) + i * in.stride;
        const CodedSource row{from + format.scale_bytes(length), from};
        bounds.find(format, &row, length, nullptr, out + i * format.groups(length));
    }
}

void CodedRows::sum(Rows out, ConstRows in, const int64_t* index, size_t terms, size_t count) const {
    const size_t width = length * size_of(dtype);
    std::vector<Bytes> values(terms * width);
    std::vector<const void*> chosen(terms);
    for (size_t term = 0; term < terms; ++term) chosen[term] = values.data() + term * width;
    for (size_t i = 0; i < count; ++i) {
        decode({values.data(), width}, in, index + i * terms, nullptr, terms, Overflow::saturate);
        reduce(dtype, ReduceOp::sum, static_cast<Bytes*>(out.data) + i * out.stride, chosen.data(), terms, length);
    }
}

}  // namespace alltoallv::kernel
