// Formats times for error texts.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>

namespace alltoallv {

/// Returns "0.25 s", and from a second on "2.0 s".
inline std::string seconds_text(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, seconds < 1 ? "%.2f s" : "%.1f s", std::min(seconds, 1e9));
    return text;
}

}  // namespace alltoallv
