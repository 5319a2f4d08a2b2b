// How much the processors can cache: data that outgrow it are better written past the caches.
#pragma once

#include <cstddef>

#include "base/processors.h"

namespace alltoallv {

/// Bytes of the last-level caches of these processors together, each counted once; 32 MiB where the host does not say.
size_t last_level_cache_bytes(const CpuSet& cpus);

}  // namespace alltoallv
