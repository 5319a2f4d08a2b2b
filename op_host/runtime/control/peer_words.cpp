#include "runtime/control/peer_words.h"

#include <cstring>

namespace alltoallv {
namespace {

/// Returns the bytes of the character that begins at `at`; 0 if none does.
size_t character(const std::string& text, size_t at) {
    const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const unsigned first = byte(at);
    if (first < 0x80) return 1;
    const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    unsigned code = first & (0xffu >> (length + 1));
    for (size_t i = 1; i < length; ++i) {
        if ((byte(at + i) & 0xc0) != 0x80) return 0;
        code = code << 6 | (byte(at + i) & 0x3f);
    }
    constexpr unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    return first < 0xf8 && first >= 0xc0 && code >= least[length] && code <= 0x10ffff && !surrogate ? length : 0;
}

}  // namespace

std::string peer_text(const char* text, size_t capacity) {
    std::string copy(text, capacity);
    copy.resize(strnlen(copy.data(), capacity));
    for (size_t at = 0; at < copy.size();) {
        const size_t length = character(copy, at);
        if (length == 0) copy[at] = '?';
        at += length == 0 ? 1 : length;
    }
    return copy;
}

}  // namespace alltoallv
