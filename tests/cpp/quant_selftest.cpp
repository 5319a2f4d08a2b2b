// Quantized reductions over shared memory without Python: exact sums with a shared scale, equal results on all
// ranks in the dynamic mode, groups longer than the scratch, disagreement, overflow; 2 and 4 ranks.
#include <cmath>
#include <numeric>

#include "core/quant_reduction.h"
#include "transport_fixture.h"

using namespace alltoallv;
using namespace testing;

namespace {

void is_wrong(const std::string& what) {
    throw std::runtime_error(what);
}

/// int8 with scale 1/2: half of the integer sum, exactly.
void shared_scale(Communicator& communicator, size_t count) {
    const int size = communicator.size();
    std::vector<int8_t> input(count);
    const auto value = [](int rank, size_t i) { return static_cast<int8_t>(mix(i * 8 + static_cast<size_t>(rank))); };
    for (size_t i = 0; i < count; ++i) input[i] = value(communicator.rank(), i);
    std::vector<float> output(count, -1.0f);
    const float scale = 0.5f;
    const auto total = static_cast<int64_t>(count);
    QuantReduction q;
    q.mode = QuantMode::shared_scale;
    q.dtype = DType::int8;
    q.counts = {&total, 1};
    q.scale = {&scale, 1};
    q.offset = 3;
    q.input = input.data();
    q.output = output.data();
    communicator.quant_reduce(q, -1);
    for (size_t i = 0; i < count; ++i) {
        int sum = 3 * size;
        for (int r = 0; r < size; ++r) sum += value(r, i);
        if (output[i] != static_cast<float>(sum) / 2) is_wrong("element " + std::to_string(i) + " of a shared scale");
    }
}

/// A result close to the sum, in place too, whose error feedback is what was lost.
void dynamic(Communicator& communicator, size_t count, int64_t group_size, CodeFormat format, bool requantizes) {
    const int size = communicator.size();
    std::vector<float> vector(count), wanted(count, 0.0f), error(count, 0.0f);
    for (int r = 0; r < size; ++r) {
        for (size_t i = 0; i < count; ++i) {
            const float x = static_cast<float>(mix(i * 8 + static_cast<size_t>(r)) % 2001) / 1000.0f - 1.0f;
            wanted[i] += x;
            if (r == communicator.rank()) vector[i] = x;
        }
    }
    const auto total = static_cast<int64_t>(count);
    const QuantPart part = quant_part(total, group_size, size, communicator.rank());
    std::vector<float> gather_error(static_cast<size_t>(part.count), 0.0f);
    QuantReduction q;
    q.counts = {&total, 1};
    q.format = format;
    q.group_size = group_size;
    q.requantizes = requantizes;
    q.input = q.output = vector.data();
    q.error = error.data();
    q.gather_error = requantizes ? gather_error.data() : nullptr;
    q.feeds_back = true;
    q.gather_feeds_back = requantizes;
    communicator.quant_reduce(q, -1);
    const float step = 1.0f / info(format).most;  // of one rank's codes, whose values are at most 1
    const float limit = step * static_cast<float>(size) * (requantizes ? 1.1f : 0.6f);
    for (size_t i = 0; i < count; ++i) {
        if (!(std::abs(vector[i] - wanted[i]) <= limit))
            is_wrong("element " + std::to_string(i) + " of groups of " + std::to_string(group_size) + " is off");
        if (!(std::abs(error[i]) <= step * 0.51f)) is_wrong("error feedback " + std::to_string(i));
    }
    // Adding the feedback of all ranks gives the sum back, where nothing else was lost.
    if (requantizes || count == 0) return;
    std::vector<float> lost(count);
    const std::vector<int64_t> counts(static_cast<size_t>(size), 0);
    std::vector<int64_t> parts = counts;
    parts[0] = total;
    Reduction sum;
    sum.input = error.data();
    sum.output = lost.data();
    sum.counts = parts;
    communicator.reduce(sum, -1);
    for (size_t i = 0; i < count; ++i)
        if (!(std::abs(vector[i] + lost[i] - wanted[i]) < 1e-4f))
            is_wrong("what was lost of element " + std::to_string(i));
}

void disagreement(Communicator& communicator) {
    const int64_t total = 1000;
    std::vector<float> vector(1000, 30000.0f);
    QuantReduction q;
    q.counts = {&total, 1};
    q.input = q.output = vector.data();
    q.format = communicator.rank() == 0 ? CodeFormat::int4 : CodeFormat::int8;
    fails(ErrorClass::peer_mismatch, "rank 0 has format int4, rank 1 has format int8",
          [&] { communicator.quant_reduce(q, -1); });
    q.format = CodeFormat::int8;
    std::vector<uint16_t> halves(1000);
    q.output = halves.data();
    q.out_dtype = DType::float16;
    q.overflow = Overflow::raise;
    q.average = false;
    vector[999] = 60000.0f;
    fails(ErrorClass::value_overflow, "of the result hold a value that float16 cannot",
          [&] { communicator.quant_reduce(q, -1); });
}

TEST(everything, const Mode& mode, int size) {
    all_pass(mode.run(size, [&](int rank) {
        const CommunicatorPtr communicator = make_shm_communicator(options_of(mode, rank, size));
        for (const size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{UNDER_SANITIZER ? 100001 : 300001}}) {
            shared_scale(*communicator, count);
            for (const CodeFormat format : {CodeFormat::int8, CodeFormat::int4}) {
                for (const bool requantizes : {false, true}) {
                    for (const int64_t group_size : {int64_t{128}, int64_t{1} << 40, int64_t{40000}})
                        dynamic(*communicator, count, group_size, format, requantizes);
                }
            }
        }
        disagreement(*communicator);
        shared_scale(*communicator, 5000);
        communicator->destroy();
    }));
}

}  // namespace
