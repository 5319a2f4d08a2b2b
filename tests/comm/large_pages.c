// LD_PRELOAD: a kernel with pages of 64 KiB, as far as mappings at fixed addresses see it. With ROUNDS they end at whole
// pages, and private ones get their contents at once, so that what lies behind them is taken along.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>

enum { page = 65536, small_page = 4096 };

void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    static void* (*real)(void*, size_t, int, int, int, off_t);
    if (!real) real = dlsym(RTLD_NEXT, "mmap");
    const int fixed = (flags & MAP_FIXED) && fd >= 0;
    if (fixed && ((uintptr_t)address % page || offset % page)) {
        errno = EINVAL;
        return MAP_FAILED;
    }
#ifdef ROUNDS
    if (fixed) bytes = (bytes + page - 1) / page * page;
    char* memory = real(address, bytes, protection, flags, fd, offset);
    if (fixed && (flags & MAP_PRIVATE) && memory != MAP_FAILED)
        for (size_t at = 0; at < bytes; at += small_page) ((volatile char*)memory)[at] = ((volatile char*)memory)[at];
    return memory;
#else
    return real(address, bytes, protection, flags, fd, offset);
#endif
}

void* mmap64(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
    return mmap(address, bytes, protection, flags, fd, offset);
}
