#include "runtime/quantized/quant_codecs.h"

#include <algorithm>
#include <cstring>

#include "op_kernel/cpu/copy.h"
#include "runtime/base/error.h"

namespace alltoallv {
namespace {

/// Groups up to this size are summed whole; longer ones are cut into pieces.
constexpr size_t longest_group = 16384;
constexpr size_t summed_at_once = 2048;  // elements: the sums stay in the first-level cache

kernel::Scales scales_from(std::span<const float> values, size_t first) {
    return {values.data(), values.size(), first};
}

}  // namespace

bool QuantCodec::decode(const QuantRange& range, const char* result, char* out) {
    kernel::copy(out, result, out_bytes(range.count), streams);
    return true;
}

void QuantCodec::keep_bounds(const QuantRange& range) {
    std::vector<char> own(bound_bytes(range.count));
    copy_bounds(own.data());
    keep_bounds(range, own.data());
}

DynamicCodec::DynamicCodec(const QuantReduction& request, size_t ranks, const std::vector<QuantPart>& parts)
    : QuantCodec(request), parts_(parts), error_(request.error), codes_(ranks), scales_at_(ranks) {
    int64_t longest = 1;
    for (const QuantPart& part : parts) longest = std::max(longest, part.count);
    const bool fixed = info(request.format).group_size != 0;
    group_size_ = static_cast<size_t>(fixed ? request.group_size : std::min(request.group_size, longest));
    cuts_groups_ = group_size_ > longest_group;
    if (request.tells_bound)
        bounds_.emplace(request.format, ranks, request.average, request.requantizes, request.out_dtype,
                        request.overflow);
}

kernel::QuantFormat DynamicCodec::format_for(size_t count) const {
    return {request_.format, cuts_groups_ ? std::max<size_t>(count, 1) : group_size_};
}

/// Returns the format of `count` elements of a piece, from its element `first` on.
kernel::QuantFormat DynamicCodec::format_at(size_t first, size_t count) const {
    kernel::QuantFormat format = format_for(count);
    format.first_group = cuts_groups_ ? 0 : first / group_size_;
    return format;
}

void DynamicCodec::cut() {
    if (info(request_.format).shaped())
        throw invalid_param("group_size is ", group_size_, ", which is too long for ", codes_.size(),
                            " ranks in format ", info(request_.format).name);
    cuts_groups_ = true;
}

size_t DynamicCodec::scale_bytes(size_t count) const {
    return round_up(format_for(count).scale_bytes(count), cache_line);
}

size_t DynamicCodec::slot_bytes(size_t count) const {
    return scale_bytes(count) + format_for(count).code_bytes(count);
}

size_t DynamicCodec::result_bytes(size_t count) const {
    return request_.requantizes ? slot_bytes(count) : out_bytes(count);
}

void DynamicCodec::find_scales() {
    if (has_tensor_scale()) {
        std::vector<uint32_t> most;
        for (const QuantPart& part : parts_)
            most.push_back(kernel::largest_of_finite_groups(
                group_size_, request_.dtype, input_at(static_cast<size_t>(part.begin)), static_cast<size_t>(part.count),
                error_at(static_cast<size_t>(part.begin))));
        const uint32_t all = *std::max_element(most.begin(), most.end());
        tensors_.clear();
        for (const uint32_t part : most)
            tensors_.push_back(kernel::tensor_scale(request_.op == OpKind::quantized_all_reduce ? all : part));
    }
    if (!cuts_groups_) return;
    scales_.assign(parts_.size(), {});
    for (size_t p = 0; p < parts_.size(); ++p) {
        const auto begin = static_cast<size_t>(parts_[p].begin), end = begin + static_cast<size_t>(parts_[p].count);
        for (size_t first = begin; first < end; first += group_size_) {
            const size_t n = std::min(group_size_, end - first);
            const uint32_t most = kernel::largest_magnitude(request_.dtype, input_at(first), n, error_at(first));
            scales_[p].push_back(kernel::scale_of(request_.format, most));
        }
    }
}

void DynamicCodec::encode_piece(const QuantRange& range, char* slot, float* error_out) {
    const float scale = scales_[range.part][offset_in_part(range) / group_size_];
    std::memcpy(slot, &scale, sizeof scale);
    kernel::encode_group(request_.format, request_.dtype, input_at(range.first), range.count, scale,
                         slot + scale_bytes(range.count), error_at(range.first), error_out);
}

void DynamicCodec::encode(const QuantRange& range, char* slot) {
    if (cuts_groups_) return encode_piece(range, slot, error_at(range.first));
    kernel::QuantFormat format = format_for(range.count);
    if (has_tensor_scale()) format.tensor = tensors_[range.part];
    kernel::quantize(format, request_.dtype, input_at(range.first), range.count, slot + scale_bytes(range.count), slot,
                     error_at(range.first));
}

void DynamicCodec::defer_feedback() {
    if (error_ == nullptr) return;
    deferred_.assign(error_, error_ + total_count(request_));
    error_ = deferred_.data();
}

void DynamicCodec::commit_feedback() {
    std::copy(deferred_.begin(), deferred_.end(), request_.error);
}

template <class Run>
void DynamicCodec::each_sum(size_t count, const std::vector<const char*>& slots, float* into, Run run) {
    // Whole groups; within a cut group any even number of elements.
    const size_t step = cuts_groups_ ? summed_at_once : std::max(summed_at_once / group_size_, size_t{1}) * group_size_;
    if (into == nullptr) sums_.resize(std::min(step, count));
    const size_t codes_at = scale_bytes(count);
    for (size_t first = 0; first < count; first += step) {
        const size_t n = std::min(step, count - first);
        const kernel::QuantFormat format = format_at(first, n);
        const size_t code = cuts_groups_ ? packed_bytes(format.bits(), first) : format.code_bytes(first);
        for (size_t j = 0; j < slots.size(); ++j) {
            codes_[j] = slots[j] + codes_at + code;
            scales_at_[j] = slots[j];
        }
        float* sums = into == nullptr ? sums_.data() : into + first;
        kernel::dequantize_sum(format, codes_.data(), scales_at_.data(), slots.size(), n, request_.average, sums);
        run(first, n, sums);
    }
}

float* DynamicCodec::gather_error_at(const QuantRange& range) const {
    return request_.gather_error == nullptr ? nullptr : request_.gather_error + offset_in_part(range);
}

void DynamicCodec::measure(const QuantRange& range, const std::vector<const char*>& slots) {
    const size_t group = offset_in_part(range) / group_size_;
    if (magnitudes_.size() <= group) magnitudes_.resize(group + 1);
    const float* feedback = gather_error_at(range);
    each_sum(range.count, slots, nullptr, [&](size_t first, size_t n, const float* sums) {
        const float* lost = feedback == nullptr ? nullptr : feedback + first;
        magnitudes_[group] = std::max(magnitudes_[group], kernel::largest_magnitude(DType::float32, sums, n, lost));
    });
}

/// Computes the bounds of the sums at `first`; `again`: their codes, if they travel as codes.
void DynamicCodec::find_bounds(const kernel::QuantFormat& format, size_t first, size_t count, const float* sums,
                               const kernel::CodedSource* again) {
    if (!bounds_) return;
    sources_.clear();
    for (size_t j = 0; j < codes_.size(); ++j) sources_.push_back({codes_[j], scales_at_[j]});
    if (again != nullptr) sources_.push_back(*again);
    float bound = 0;
    float* const to = cuts_groups_ ? &bound : found_.data() + first / group_size_;
    bounds_->find(format, sources_.data(), count, again == nullptr ? sums : nullptr, to);
    if (cuts_groups_) found_[0] = std::max(found_[0], bound);
}

void DynamicCodec::copy_bounds(char* to) const {
    if (bounds_) std::memcpy(to, found_.data(), found_.size() * sizeof(float));
}

void DynamicCodec::keep_bounds(const QuantRange& range, const char* from) {
    if (!bounds_) return;
    const size_t first = request_.op == OpKind::quantized_reduce_scatter ? offset_in_part(range) : range.first;
    float* const to = request_.bounds + first / static_cast<size_t>(request_.group_size);
    if (!cuts_groups_) {
        std::memcpy(to, from, bound_bytes(range.count));
        return;
    }
    float bound;
    std::memcpy(&bound, from, sizeof bound);
    *to = first % group_size_ == 0 ? bound : std::max(*to, bound);  // the pieces of a group come in order
}

bool DynamicCodec::reduce(const QuantRange& range, const std::vector<const char*>& slots, char* result) {
    bool fits = true;
    found_.assign(bounds_ ? groups(range.count) : 0, 0);
    if (!request_.requantizes) {
        const bool direct =
            request_.out_dtype == DType::float32 && reinterpret_cast<uintptr_t>(result) % alignof(float) == 0;
        float* const into = direct ? reinterpret_cast<float*>(result) : nullptr;
        each_sum(range.count, slots, into, [&](size_t first, size_t n, const float* sums) {
            find_bounds(format_at(first, n), first, n, sums, nullptr);
            fits &= kernel::cast(request_.out_dtype, request_.overflow, sums, n, result + out_bytes(first));
        });
        return fits;
    }
    char* codes = result + scale_bytes(range.count);
    float* feedback = gather_error_at(range);
    const float tensor = has_tensor_scale() ? tensor_of_sum(slots) : 0;
    float scale = 0;
    if (cuts_groups_) {
        scale = kernel::scale_of(request_.format, magnitudes_[offset_in_part(range) / group_size_]);
        std::memcpy(result, &scale, sizeof scale);
    }
    each_sum(range.count, slots, nullptr, [&](size_t first, size_t n, const float* sums) {
        float* lost = feedback == nullptr ? nullptr : feedback + first;
        kernel::QuantFormat format = format_at(first, n);
        char* const to = codes + (cuts_groups_ ? packed_bytes(format.bits(), first) : format.code_bytes(first));
        if (cuts_groups_) {
            kernel::encode_group(request_.format, DType::float32, sums, n, scale, to, lost, lost);
        } else {
            format.tensor = tensor;
            kernel::quantize(format, DType::float32, sums, n, to, result, lost);
        }
        const kernel::CodedSource again{to, result};
        find_bounds(format, first, n, nullptr, &again);
    });
    return true;
}

/// Adds the ranks' scales: the result is large enough for the sum of their values, and all ranks can compute it.
float DynamicCodec::tensor_of_sum(const std::vector<const char*>& slots) const {
    float sum = 0;
    for (const char* slot : slots) {
        float tensor;
        std::memcpy(&tensor, slot, sizeof tensor);
        sum += tensor;
    }
    return kernel::limited_tensor_scale(request_.average ? sum / static_cast<float>(slots.size()) : sum);
}

bool DynamicCodec::decode(const QuantRange& range, const char* result, char* out) {
    if (!request_.requantizes) return QuantCodec::decode(range, result, out);
    return kernel::dequantize(format_for(range.count), request_.out_dtype, result + scale_bytes(range.count), result,
                              range.count, request_.overflow, out, streams);
}

void SharedScaleCodec::encode(const QuantRange& range, char* slot) {
    std::memcpy(slot, input_at(range.first), range.count);
}

bool SharedScaleCodec::reduce(const QuantRange& range, const std::vector<const char*>& slots, char* result) {
    sources_.clear();
    for (size_t j = 0; j < slots.size(); ++j) sources_.push_back(inputs.empty() ? slots[j] : inputs[j] + range.first);
    return kernel::sum_shared_scale(request_.out_dtype, sources_.data(), sources_.size(), range.count,
                                    scales_from(request_.scale, range.first), request_.offset, request_.overflow,
                                    result);
}

TwoScaleCodec::TwoScaleCodec(const QuantReduction& request) : QuantCodec(request) {
    for (size_t i = 0; i < request.scale.size(); ++i) ratios_.push_back(request.scale[i] / request.scale_2[i]);
}

void TwoScaleCodec::encode(const QuantRange& range, char* slot) {
    kernel::quantize_scaled(request_.dtype, input_at(range.first), range.count,
                            scales_from(request_.scale, range.first), slot);
}

bool TwoScaleCodec::reduce(const QuantRange& range, const std::vector<const char*>& slots, char* result) {
    sources_.assign(slots.begin(), slots.end());
    kernel::requantize_sum(sources_.data(), sources_.size(), range.count, scales_from(ratios_, range.first), result);
    return true;
}

bool TwoScaleCodec::decode(const QuantRange& range, const char* result, char* out) {
    const void* source = result;
    return kernel::sum_shared_scale(request_.out_dtype, &source, 1, range.count,
                                    scales_from(request_.scale_2, range.first), 0.0f, request_.overflow, out);
}

}  // namespace alltoallv
