// The three steps of a quantized reduction on one piece of the vector: encode, reduce, decode.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "op_kernel/cpu/bounds.h"
#include "op_kernel/cpu/quantize.h"
#include "runtime/base/sizes.h"
#include "runtime/core/quant_reduction.h"

namespace alltoallv {

/// Elements [first, first + count) of the vector, all in one part.
struct QuantRange {
    size_t part, first, count;
};

class QuantCodec {
  public:
    explicit QuantCodec(const QuantReduction& request) : request_(request) {}
    virtual ~QuantCodec() = default;
    QuantCodec(const QuantCodec&) = delete;
    QuantCodec& operator=(const QuantCodec&) = delete;

    /// Pieces begin at multiples of this number of elements.
    virtual size_t unit() const { return cache_line; }
    /// Length of groups that are cut because they are longer than a piece: no piece crosses a multiple of it. 0: none.
    virtual size_t span() const { return 0; }
    /// `cut` is called if not even one unit fits: it cuts groups. `keep_whole` is called if every part is one piece.
    virtual void cut() {}
    virtual void keep_whole() {}

    virtual size_t slot_bytes(size_t count) const = 0;    ///< of an encoded piece
    virtual size_t result_bytes(size_t count) const = 0;  ///< of a reduced piece that is gathered

    virtual void encode(const QuantRange& range, char* slot) = 0;
    /// `result` is a gathered piece, or memory for `count` output elements. Returns false if a value did not fit.
    virtual bool reduce(const QuantRange& range, const std::vector<const char*>& slots, char* result) = 0;
    /// Decodes a gathered piece to `out`. Returns false if a value did not fit. Here: copies the output's elements.
    virtual bool decode(const QuantRange& range, const char* result, char* out);

    /// --- bounds, if the request asks for them: of the groups of a piece, in the order of the groups ---
    virtual size_t bound_bytes(size_t) const { return 0; }
    virtual void copy_bounds(char*) const {}                     ///< of the piece that was reduced last
    virtual void keep_bounds(const QuantRange&, const char*) {}  ///< takes what an owner has copied
    void keep_bounds(const QuantRange& range);                   ///< of the piece that was reduced last

    /// True if a gathered piece consists of the output's elements.
    virtual bool gathers_elements() const { return false; }

    /// True if `reduce` can read the inputs of the peers, given in `inputs`, instead of slots.
    virtual bool reads_inputs() const { return false; }
    std::vector<const char*> inputs;
    bool streams = false;  ///< results that are the output's elements already bypass the caches

    /// --- scales of cut groups, and of all groups together, are computed before the pieces are encoded ---
    virtual void find_scales() {}
    virtual bool measures_sums() const { return false; }  ///< true: a sweep with the next two functions comes before
    virtual void encode_for_measure(const QuantRange&, char*) {}
    virtual void measure(const QuantRange&, const std::vector<const char*>&) {}

    /// --- error feedback is replaced only after all ranks have agreed ---
    virtual void defer_feedback() {}
    virtual void commit_feedback() {}

  protected:
    const char* input_at(size_t first) const {
        return static_cast<const char*>(request_.input) + first * size_of(request_.dtype);
    }
    size_t out_bytes(size_t count) const { return count * size_of(request_.out_dtype); }

    const QuantReduction& request_;
};

/// Scales per group. A group that is too long for a piece travels in several, by a scale that is computed before.
class DynamicCodec final : public QuantCodec {
  public:
    DynamicCodec(const QuantReduction& request, size_t ranks, const std::vector<QuantPart>& parts);

    size_t unit() const override { return cuts_groups_ ? cache_line : group_size_; }
    size_t span() const override { return cuts_groups_ ? group_size_ : 0; }
    void cut() override;
    void keep_whole() override { cuts_groups_ = false; }
    size_t slot_bytes(size_t count) const override;
    size_t result_bytes(size_t count) const override;
    void encode(const QuantRange& range, char* slot) override;
    bool reduce(const QuantRange& range, const std::vector<const char*>& slots, char* result) override;
    bool decode(const QuantRange& range, const char* result, char* out) override;
    size_t bound_bytes(size_t count) const override { return bounds_ ? groups(count) * sizeof(float) : 0; }
    void copy_bounds(char* to) const override;
    void keep_bounds(const QuantRange& range, const char* from) override;
    void find_scales() override;
    bool gathers_elements() const override { return !request_.requantizes; }
    bool measures_sums() const override { return cuts_groups_ && request_.requantizes; }
    void encode_for_measure(const QuantRange& range, char* slot) override { encode_piece(range, slot, nullptr); }
    void measure(const QuantRange& range, const std::vector<const char*>& slots) override;
    void defer_feedback() override;
    void commit_feedback() override;

  private:
    /// Some sums of a piece, whole groups or a part of one, which `codes_` and `scales_at_` have the terms of.
    struct Sums {
        kernel::QuantFormat format;
        size_t first, count;  // elements of the piece
        size_t code;          // of the piece's codes, in bytes, if they become codes again
        const float* values;
    };

    kernel::QuantFormat format_for(size_t count) const;
    bool has_tensor_scale() const { return info(request_.format).scale == ScaleKind::e4m3; }
    size_t groups(size_t count) const { return cuts_groups_ ? 1 : format_for(count).groups(count); }
    /// Bytes of one vector's codes and scales in a slot, which holds all vectors of a rank.
    size_t vector_bytes(size_t count) const { return scale_bytes(count) + format_for(count).code_bytes(count); }
    /// Points `codes_` and `scales_at_` to the sums' terms, in their order.
    void find_terms(size_t count, const std::vector<const char*>& slots);
    void add_in_tree(const kernel::QuantFormat& format, size_t term, size_t terms, size_t n, float* to, size_t depth);
    /// `again`: the sums' codes, if they travel as codes.
    void find_bounds(const Sums& sums, const kernel::CodedSource* again);
    float tensor_of_sum() const;
    size_t scale_bytes(size_t count) const;
    void encode_piece(const QuantRange& range, char* slot, float* error_out);
    size_t offset_in_part(const QuantRange& range) const {
        return range.first - static_cast<size_t>(parts_[range.part].begin);
    }
    const char* vector_at(size_t vector, size_t first) const {
        return input_at(vector * static_cast<size_t>(total_count(request_)) + first);
    }
    float* error_at(size_t first) const { return error_ == nullptr ? nullptr : error_ + first; }
    float* gather_error_at(const QuantRange& range) const;
    /// Calls `run` for the Sums of a piece, which are written to `into`, or to memory that stays in the caches.
    template <class Run>
    void each_sum(size_t count, const std::vector<const char*>& slots, float* into, Run run);

    const std::vector<QuantPart>& parts_;
    size_t vectors_;     // of every rank
    size_t group_size_;  // at most the longest part
    bool cuts_groups_;
    float* error_;
    std::vector<float> deferred_;
    std::vector<std::vector<float>> scales_;  // of the input's groups, per vector and part, if they are cut
    std::vector<uint32_t> magnitudes_;        // of the sums of the groups of this rank's part, likewise
    std::vector<const void*> codes_;
    std::vector<const void*> scales_at_;
    std::vector<float> tensors_;  // of the vectors' parts
    std::optional<kernel::Bounds> bounds_;
    std::vector<float> found_;  // bounds of the groups of the piece that was reduced last
    std::vector<kernel::CodedSource> sources_;
    std::vector<float> sums_;
    std::vector<std::vector<float>> nodes_;  // of the tree of leaves, by depth
};

/// int8 with a shared scale: the gathered sum has the output's type.
class SharedScaleCodec final : public QuantCodec {
  public:
    using QuantCodec::QuantCodec;

    bool reads_inputs() const override { return true; }
    bool gathers_elements() const override { return true; }
    size_t slot_bytes(size_t count) const override { return count; }
    size_t result_bytes(size_t count) const override { return out_bytes(count); }
    void encode(const QuantRange& range, char* slot) override;
    bool reduce(const QuantRange& range, const std::vector<const char*>& slots, char* result) override;

  private:
    std::vector<const void*> sources_;
};

/// Codes by a first shared scale; their sum is gathered as codes by a second one.
class TwoScaleCodec final : public QuantCodec {
  public:
    explicit TwoScaleCodec(const QuantReduction& request);

    size_t slot_bytes(size_t count) const override { return count; }
    size_t result_bytes(size_t count) const override { return count; }
    void encode(const QuantRange& range, char* slot) override;
    bool reduce(const QuantRange& range, const std::vector<const char*>& slots, char* result) override;
    bool decode(const QuantRange& range, const char* result, char* out) override;

  private:
    std::vector<float> ratios_;
    std::vector<const void*> sources_;
};

}  // namespace alltoallv
