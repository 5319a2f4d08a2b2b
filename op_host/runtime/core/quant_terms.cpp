#include "runtime/core/quant_terms.h"

#include <array>
#include <cstdio>
#include <cstring>
#include <span>
#include <string_view>

#include "runtime/core/peer_names.h"

namespace alltoallv {
namespace {

constexpr std::string_view mode_names[] = {"dynamic scales", "a shared scale", "two shared scales"};
constexpr std::string_view feedback_names[] = {
    "no error feedback", "error feedback", "error feedback of the gather only", "error feedback of both quantizations"};

/// Returns "unknown" for values beyond the names, which a broken peer may announce.
template <size_t N>
std::string name_in(const std::string_view (&names)[N], auto index) {
    const auto i = static_cast<size_t>(index);
    return std::string(i < N ? names[i] : "unknown");
}

/// Any difference in one 32-bit word changes the digest: every step is a bijection of the previous state.
uint64_t digest_of(const void* data, size_t bytes) {
    uint64_t h = bytes;
    for (size_t i = 0; i + 4 <= bytes; i += 4) {
        uint32_t word;
        std::memcpy(&word, static_cast<const char*>(data) + i, 4);
        h = (h ^ word) * 0x9e3779b97f4a7c15u;
        h ^= h >> 32;
    }
    return h;
}

std::string text_of(float value) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.9g", static_cast<double>(value));
    return text.data();
}

std::string hex(uint64_t value) {
    std::array<char, 24> text{};
    std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
    return text.data();
}

std::string scale_text(const char* name, uint64_t count, float first, uint64_t digest) {
    if (count == 1) return std::string(name) + " " + text_of(first);
    return std::string(name) + " [" + text_of(first) + ", ...] of " + std::to_string(count) + " values (digest " +
           hex(digest) + ")";
}

std::string both(int rank_a, const std::string& of_a, int rank_b, const std::string& of_b) {
    return "rank " + std::to_string(rank_a) + " has " + of_a + ", rank " + std::to_string(rank_b) + " has " + of_b;
}

bool differ(float a, float b) {
    return std::memcmp(&a, &b, sizeof a) != 0;
}

}  // namespace

QuantTerms terms_of(const QuantReduction& r) {
    QuantTerms terms;
    std::memset(&terms, 0, sizeof terms);  // also the padding, since it is part of the digest
    terms.mode = r.mode;
    terms.out_dtype = r.out_dtype;
    terms.overflow = r.overflow;
    if (r.mode == QuantMode::dynamic) {
        terms.format = r.format;
        terms.requantizes = r.requantizes;
        terms.feeds_back = static_cast<uint8_t>(r.feeds_back | r.gather_feeds_back << 1);
        terms.tells_bound = r.tells_bound;
        terms.group_size = r.group_size;
        terms.leaves = static_cast<uint16_t>(r.leaves);
        return terms;
    }
    terms.scales = r.scale.size();
    terms.scale = r.scale.empty() ? 0 : r.scale.front();
    terms.scale_digest = digest_of(r.scale.data(), r.scale.size_bytes());
    terms.scale_2 = r.scale_2.empty() ? 0 : r.scale_2.front();
    terms.scale_2_digest = digest_of(r.scale_2.data(), r.scale_2.size_bytes());
    terms.offset = r.offset;
    return terms;
}

int64_t digest(const QuantTerms& terms) {
    return static_cast<int64_t>(digest_of(&terms, sizeof terms));
}

std::string difference(const QuantTerms& a, int rank_a, const QuantTerms& b, int rank_b) {
    const auto both = [&](const std::string& of_a, const std::string& of_b) {
        return alltoallv::both(rank_a, of_a, rank_b, of_b);
    };
    if (a.mode != b.mode) return both(name_in(mode_names, a.mode), name_in(mode_names, b.mode));
    if (a.out_dtype != b.out_dtype)
        return both("an output of " + peer_name(a.out_dtype), "one of " + peer_name(b.out_dtype));
    if (a.format != b.format) return both("format " + peer_name(a.format), "format " + peer_name(b.format));
    if (a.leaves != b.leaves) {
        const auto text_of = [](uint16_t leaves) {
            return "leaves " + (leaves == 0 ? "None" : std::to_string(leaves));
        };
        return both(text_of(a.leaves), text_of(b.leaves));
    }
    if (a.group_size != b.group_size)
        return both("group_size " + std::to_string(a.group_size), "group_size " + std::to_string(b.group_size));
    if (a.requantizes != b.requantizes)
        return both(a.requantizes ? "gather quantized" : "gather full", b.requantizes ? "quantized" : "full");
    if (a.overflow != b.overflow)
        return both("overflow " + name_in(overflow_names, a.overflow), name_in(overflow_names, b.overflow));
    if (a.feeds_back != b.feeds_back)
        return both(name_in(feedback_names, a.feeds_back), name_in(feedback_names, b.feeds_back));
    if (a.tells_bound != b.tells_bound)
        return both(a.tells_bound ? "a bound" : "no bound", b.tells_bound ? "a bound" : "no bound");
    if (a.scales != b.scales || a.scale_digest != b.scale_digest)
        return both(scale_text("scale", a.scales, a.scale, a.scale_digest),
                    scale_text("scale", b.scales, b.scale, b.scale_digest));
    if (a.scale_2_digest != b.scale_2_digest)
        return both(scale_text("scale_2", a.scales, a.scale_2, a.scale_2_digest),
                    scale_text("scale_2", b.scales, b.scale_2, b.scale_2_digest));
    if (differ(a.offset, b.offset)) return both("offset " + text_of(a.offset), "offset " + text_of(b.offset));
    return {};
}

std::string difference(const RowTerms& a, int rank_a, const RowTerms& b, int rank_b) {
    const auto codes = [&](const RowTerms& terms) {
        return peer_name(static_cast<CodeFormat>(terms.format)) + " codes in groups of " +
               std::to_string(terms.group_size);
    };
    const auto name = [](uint64_t dtype) { return peer_name(static_cast<DType>(dtype)); };
    if (a.format != b.format || a.group_size != b.group_size) return both(rank_a, codes(a), rank_b, codes(b));
    if (a.dtype != b.dtype) return both(rank_a, "an input of " + name(a.dtype), rank_b, "one of " + name(b.dtype));
    if (a.out_dtype != b.out_dtype)
        return both(rank_a, "an output of " + name(a.out_dtype), rank_b, "one of " + name(b.out_dtype));
    if (a.overflow != b.overflow)
        return both(rank_a, "overflow " + name_in(overflow_names, uint64_t{a.overflow}), rank_b,
                    name_in(overflow_names, uint64_t{b.overflow}));
    const auto gradient = [](const RowTerms& terms) { return terms.quantizes_gradient != 0 ? "True" : "False"; };
    return both(rank_a, std::string("quantize_gradient ") + gradient(a), rank_b, gradient(b));
}

}  // namespace alltoallv
