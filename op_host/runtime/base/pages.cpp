#include "runtime/base/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#include "runtime/base/sizes.h"
#include "runtime/base/unique_fd.h"

namespace alltoallv {
namespace {

constexpr size_t most = size_t{2} << 20;

size_t find() {
    const auto reported = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const UniqueFd file(memfd_create("alltoallv-pages", MFD_CLOEXEC));
    if (!file || ftruncate(file.get(), 2 * most) != 0) return reported;
    void* const place = mmap(nullptr, 3 * most, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return reported;
    char* const base = static_cast<char*>(place) + (most - reinterpret_cast<uintptr_t>(place) % most);
    size_t unit = reported;
    while (unit < most && mmap(base + unit, unit, PROT_NONE, MAP_SHARED | MAP_FIXED, file.get(),
                               static_cast<off_t>(unit)) == MAP_FAILED)
        unit *= 2;
    munmap(place, 3 * most);
    return unit < most ? unit : reported;
}

}  // namespace

size_t page_size() {
    static const size_t size = find();
    return size;
}

}  // namespace alltoallv
