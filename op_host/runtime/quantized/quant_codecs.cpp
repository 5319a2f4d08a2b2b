#include "runtime/quantized/quant_codecs.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "op_kernel/cpu/copy.h"
#include "op_kernel/cpu/reduce.h"
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
    : QuantCodec(request),
      parts_(parts),
      vectors_(request.leaves == 0 ? 1 : static_cast<size_t>(request.leaves) / ranks),
      error_(request.error),
      codes_(ranks * vectors_),
      scales_at_(ranks * vectors_) {
    int64_t longest = 1;
    for (const QuantPart& part : parts) longest = std::max(longest, part.count);
    const bool fixed = info(request.format).group_size != 0;
    group_size_ = static_cast<size_t>(fixed ? request.group_size : std::min(request.group_size, longest));
    cuts_groups_ = group_size_ > longest_group;
    if (request.tells_bound)
        bounds_.emplace(request.format, codes_.size(), request.average, request.requantizes, request.out_dtype,
                        request.overflow);
}

kernel::QuantFormat DynamicCodec::format_for(size_t count) const {
    return {request_.format, cuts_groups_ ? std::max<size_t>(count, 1) : group_size_};
}

void DynamicCodec::cut() {
    if (info(request_.format).shaped())
        throw invalid_param(1112, "group_size is ", group_size_, ", which is too long for ", codes_.size(),
                            " terms in format ", info(request_.format).name);
    cuts_groups_ = true;
}

size_t DynamicCodec::scale_bytes(size_t count) const {
    return round_up(format_for(count).scale_bytes(count), cache_line);
}

size_t DynamicCodec::slot_bytes(size_t count) const {
    return (vectors_ - 1) * round_up(vector_bytes(count), cache_line) + vector_bytes(count);
}

size_t DynamicCodec::result_bytes(size_t count) const {
    return request_.requantizes ? vector_bytes(count) : out_bytes(count);
}

void DynamicCodec::find_scales() {
    tensors_.clear();
    for (size_t v = 0; has_tensor_scale() && v < vectors_; ++v) {
        std::vector<uint32_t> most;
        for (const QuantPart& part : parts_)
            most.push_back(kernel::largest_of_finite_groups(
                group_size_, request_.dtype, vector_at(v, static_cast<size_t>(part.begin)),
                static_cast<size_t>(part.count), error_at(static_cast<size_t>(part.begin))));
        const uint32_t all = *std::max_element(most.begin(), most.end());
        for (const uint32_t part : most)
            tensors_.push_back(kernel::tensor_scale(request_.op == OpKind::quantized_all_reduce ? all : part));
    }
    if (!cuts_groups_) return;
    scales_.assign(vectors_ * parts_.size(), {});
    for (size_t i = 0; i < scales_.size(); ++i) {
        const QuantPart& part = parts_[i % parts_.size()];
        const auto begin = static_cast<size_t>(part.begin), end = begin + static_cast<size_t>(part.count);
        for (size_t first = begin; first < end; first += group_size_) {
            const size_t n = std::min(group_size_, end - first);
            const char* const input = vector_at(i / parts_.size(), first);
            const uint32_t most = kernel::largest_magnitude(request_.dtype, input, n, error_at(first));
            scales_[i].push_back(kernel::scale_of(request_.format, most));
        }
    }
}

void DynamicCodec::encode_piece(const QuantRange& range, char* slot, float* error_out) {
    for (size_t v = 0; v < vectors_; ++v, slot += round_up(vector_bytes(range.count), cache_line)) {
        const float scale = scales_[v * parts_.size() + range.part][offset_in_part(range) / group_size_];
        std::memcpy(slot, &scale, sizeof scale);
        kernel::encode_group(request_.format, request_.dtype, vector_at(v, range.first), range.count, scale,
                             slot + scale_bytes(range.count), error_at(range.first), error_out);
    }
}

void DynamicCodec::encode(const QuantRange& range, char* slot) {
    if (cuts_groups_) return encode_piece(range, slot, error_at(range.first));
    kernel::QuantFormat format = format_for(range.count);
    for (size_t v = 0; v < vectors_; ++v, slot += round_up(vector_bytes(range.count), cache_line)) {
        if (has_tensor_scale()) format.tensor = tensors_[v * parts_.size() + range.part];
        kernel::quantize(format, request_.dtype, vector_at(v, range.first), range.count,
                         slot + scale_bytes(range.count), slot, error_at(range.first));
    }
}

void DynamicCodec::defer_feedback() {
    if (error_ == nullptr) return;
    deferred_.assign(error_, error_ + total_count(request_));
    error_ = deferred_.data();
}

void DynamicCodec::commit_feedback() {
    std::copy(deferred_.begin(), deferred_.end(), request_.error);
}

void DynamicCodec::find_terms(size_t count, const std::vector<const char*>& slots) {
    const size_t codes_at = scale_bytes(count), stride = round_up(vector_bytes(count), cache_line);
    for (size_t j = 0; j < codes_.size(); ++j) {
        const char* const term = slots[j / vectors_] + j % vectors_ * stride;
        codes_[j] = term + codes_at;
        scales_at_[j] = term;
    }
}

void DynamicCodec::add_in_tree(const kernel::QuantFormat& format, size_t term, size_t terms, size_t n, float* to,
                               size_t depth) {
    if (terms == 1) return kernel::dequantize_sum(format, &codes_[term], &scales_at_[term], 1, n, false, to);
    const size_t left = std::bit_floor(terms - 1);
    if (nodes_.size() <= depth) nodes_.resize(depth + 1);
    nodes_[depth].resize(std::max(nodes_[depth].size(), n));
    add_in_tree(format, term, left, n, to, depth + 1);
    add_in_tree(format, term + left, terms - left, n, nodes_[depth].data(), depth + 1);
    const void* const both[] = {to, nodes_[depth].data()};
    kernel::reduce(DType::float32, ReduceOp::sum, to, both, 2, n);
}

template <class Run>
void DynamicCodec::each_sum(size_t count, const std::vector<const char*>& slots, float* into, Run run) {
    // Whole groups; within a cut group any even number of elements.
    const size_t step = cuts_groups_ ? summed_at_once : std::max(summed_at_once / group_size_, size_t{1}) * group_size_;
    if (into == nullptr) sums_.resize(std::min(step, count));
    kernel::QuantFormat format = format_for(count);
    const size_t code_step = cuts_groups_ ? packed_bytes(format.bits(), step) : format.code_bytes(step);
    const size_t groups = cuts_groups_ ? 0 : step / group_size_, terms = codes_.size();
    find_terms(count, slots);
    for (size_t first = 0, code = 0; first < count; first += step, code += code_step) {
        const size_t n = std::min(step, count - first);
        if (cuts_groups_) format.group_size = n;
        float* sums = into == nullptr ? sums_.data() : into + first;
        if (request_.leaves == 0) {
            kernel::dequantize_sum(format, codes_.data(), scales_at_.data(), terms, n, request_.average, sums);
        } else {
            add_in_tree(format, 0, terms, n, sums, 0);
            for (size_t k = 0; request_.average && k < n; ++k) sums[k] /= static_cast<float>(terms);
        }
        run(Sums{format, first, n, code, sums});
        for (const void*& codes : codes_) codes = static_cast<const char*>(codes) + code_step;
        format.first_group += groups;
    }
}

float* DynamicCodec::gather_error_at(const QuantRange& range) const {
    return request_.gather_error == nullptr ? nullptr : request_.gather_error + offset_in_part(range);
}

void DynamicCodec::measure(const QuantRange& range, const std::vector<const char*>& slots) {
    const size_t group = offset_in_part(range) / group_size_;
    if (magnitudes_.size() <= group) magnitudes_.resize(group + 1);
    const float* feedback = gather_error_at(range);
    each_sum(range.count, slots, nullptr, [&](const Sums& sums) {
        const float* lost = feedback == nullptr ? nullptr : feedback + sums.first;
        const uint32_t most = kernel::largest_magnitude(DType::float32, sums.values, sums.count, lost);
        magnitudes_[group] = std::max(magnitudes_[group], most);
    });
}

void DynamicCodec::find_bounds(const Sums& sums, const kernel::CodedSource* again) {
    if (!bounds_) return;
    sources_.clear();
    for (size_t j = 0; j < codes_.size(); ++j) sources_.push_back({codes_[j], scales_at_[j]});
    if (again != nullptr) sources_.push_back(*again);
    float bound = 0;
    float* const to = cuts_groups_ ? &bound : found_.data() + sums.format.first_group;
    bounds_->find(sums.format, sources_.data(), sums.count, again == nullptr ? sums.values : nullptr, to);
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
        each_sum(range.count, slots, into, [&](const Sums& sums) {
            find_bounds(sums, nullptr);
            char* const to = result + out_bytes(sums.first);
            fits &= kernel::cast(request_.out_dtype, request_.overflow, sums.values, sums.count, to);
        });
        return fits;
    }
    char* codes = result + scale_bytes(range.count);
    float* feedback = gather_error_at(range);
    find_terms(range.count, slots);
    const float tensor = has_tensor_scale() ? tensor_of_sum() : 0;
    float scale = 0;
    if (cuts_groups_) {
        scale = kernel::scale_of(request_.format, magnitudes_[offset_in_part(range) / group_size_]);
        std::memcpy(result, &scale, sizeof scale);
    }
    each_sum(range.count, slots, nullptr, [&](const Sums& sums) {
        float* lost = feedback == nullptr ? nullptr : feedback + sums.first;
        char* const to = codes + sums.code;
        if (cuts_groups_) {
            kernel::encode_group(request_.format, DType::float32, sums.values, sums.count, scale, to, lost, lost);
        } else {
            kernel::QuantFormat format = sums.format;
            format.tensor = tensor;
            kernel::quantize(format, DType::float32, sums.values, sums.count, to, result, lost);
        }
        const kernel::CodedSource again{to, result};
        find_bounds(sums, &again);
    });
    return true;
}

/// Adds the terms' scales: the result is large enough for the sum of their values, and all ranks can compute it.
float DynamicCodec::tensor_of_sum() const {
    float sum = 0;
    for (const void* scales : scales_at_) {
        float tensor;
        std::memcpy(&tensor, scales, sizeof tensor);
        sum += tensor;
    }
    return kernel::limited_tensor_scale(request_.average ? sum / static_cast<float>(scales_at_.size()) : sum);
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
