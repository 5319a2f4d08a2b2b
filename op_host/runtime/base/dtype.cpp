#include "runtime/base/dtype.h"

#include <cstdio>
#include <map>
#include <mutex>
#include <string>

namespace alltoallv {

const DTypeInfo& moving_info(DType dtype) {
    struct Named {
        std::string name;
        DTypeInfo info;
    };
    static std::mutex mutex;
    static auto& names_by_dtype = *new std::map<DType, Named>;  // threads may still ask while the process ends
    const std::lock_guard lock(mutex);
    const auto [at, fresh] = names_by_dtype.try_emplace(dtype);
    Named& named = at->second;
    if (fresh) {
        const auto bytes = size_of(dtype);
        char text[32];
        std::snprintf(text, sizeof text, "%zu bytes #%04x", bytes, static_cast<uint32_t>(dtype) & 0xffff);
        named.name = text;
        named.info = {named.name, bytes, Arithmetic::none, 3, false, 7, static_cast<int>(bytes), false, false};
    }
    return named.info;
}

std::optional<DType> moving_dtype(std::string_view name) {
    unsigned bytes = 0, digest = 0;
    const std::string text(name);
    if (std::sscanf(text.c_str(), "%5u bytes #%4x", &bytes, &digest) != 2 || bytes == 0 || bytes > 0xffff)
        return std::nullopt;
    return static_cast<DType>(bytes << 16 | digest);
}

}  // namespace alltoallv
