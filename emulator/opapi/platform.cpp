// The emulator's part of libcust_opapi.so: kernels as tasks of emulated streams.
//
// They are those of op_kernel/cpu, which have the bits of the kernels for devices.
#include "runtime/aclnn/platform.h"

#include <vector>

#include "op_kernel/cpu/quantize.h"
#include "runtime/failure.h"
#include "runtime/memory.h"
#include "runtime/stream.h"

namespace alltoallv::aclnn {
namespace {

DType dtype_of(aclDataType dtype) {
    return dtype == ACL_FLOAT ? DType::float32 : dtype == ACL_FLOAT16 ? DType::float16 : DType::bfloat16;
}

/// Enqueues a kernel that reads and writes these ranges of device memory.
struct Range {
    const char* name;
    const void* address;
    size_t bytes;
};
void enqueue(const char* kernel, const std::vector<Range>& ranges, aclrtStream stream, std::function<void()> run) {
    for (const Range& range : ranges)
        if (range.bytes > 0) emulator::check_device_range(range.name, range.address, range.bytes);
    emulator::stream_of(stream)->enqueue([kernel, run = std::move(run)] { return emulator::guarded(kernel, run); });
}

kernel::QuantFormat format_of(int64_t group_size) {
    return {.codes = CodeFormat::int8, .group_size = static_cast<size_t>(group_size)};
}

}  // namespace

aclnnStatus report(const char* function, aclnnStatus status, const std::string& message) {
    return emulator::report(function, status, message);
}

void quantize(aclDataType dtype, const void* x, int64_t count, int64_t group_size, void* codes, void* scales,
              aclrtStream stream) {
    const auto elements = static_cast<size_t>(count);
    const kernel::QuantFormat format = format_of(group_size);
    const std::vector<Range> ranges = {{"x", x, elements * aclDataTypeSize(dtype)},
                                       {"codes", codes, elements},
                                       {"scales", scales, format.scale_bytes(elements)}};
    enqueue("quantize", ranges, stream,
            [=] { kernel::quantize(format, dtype_of(dtype), x, elements, codes, scales, nullptr); });
}

void dequantize_sum(const void* codes, const void* scales, int64_t ranks, int64_t count, int64_t group_size,
                    aclDataType dtype, void* out, aclrtStream stream) {
    const auto elements = static_cast<size_t>(count), records = static_cast<size_t>(ranks);
    const kernel::QuantFormat format = format_of(group_size);
    const std::vector<Range> ranges = {{"codes", codes, records * elements},
                                       {"scales", scales, records * format.scale_bytes(elements)},
                                       {"out", out, elements * aclDataTypeSize(dtype)}};
    enqueue("dequantize_sum", ranges, stream, [=] {
        std::vector<const void*> code_records, scale_records;
        for (size_t j = 0; j < records; ++j) {
            code_records.push_back(static_cast<const char*>(codes) + j * elements);
            scale_records.push_back(static_cast<const char*>(scales) + j * format.scale_bytes(elements));
        }
        std::vector<float> sum(elements);
        kernel::dequantize_sum(format, code_records.data(), scale_records.data(), records, elements, false, sum.data());
        kernel::cast(dtype_of(dtype), Overflow::saturate, sum.data(), elements, out);
    });
}

}  // namespace alltoallv::aclnn
