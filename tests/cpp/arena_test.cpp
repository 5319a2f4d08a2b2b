// Memory that peers can write to: handed out, merged, kept within budget, quarantined, and looked up.
#include "runtime/shm/arena.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <thread>

#include "check.h"
#include "runtime/base/huge_pages.h"

using namespace alltoallv;

namespace {

constexpr size_t megabyte = size_t{1} << 20;

using Budget = ArenaBudget;

/// The blocks of these tests come from the process's own arena: only that one takes blocks back.
Arena& arena() {
    return Arena::instance();
}

void empty_again() {
    const ArenaStats stats = arena().stats();
    CHECK_EQ(stats.segments, uint64_t{0});
    CHECK_EQ(stats.segment_bytes, uint64_t{0});
    CHECK_EQ(stats.used_bytes, uint64_t{0});
    CHECK_EQ(stats.quarantined_bytes, uint64_t{0});
}

TEST(hands_out) {
    {
        const Block none = arena().allocate(0), one = arena().allocate(1), more = arena().allocate(100000);
        for (const Block* block : {&none, &one, &more}) {
            CHECK(block->shared() && block->data() != nullptr);
            CHECK_EQ(reinterpret_cast<uint64_t>(block->data()) % cache_line, uint64_t{0});
            std::memset(block->data(), 1, block->bytes());
        }
        CHECK_EQ(more.bytes(), size_t{100000});
        CHECK(none.data() != one.data());
        Block moved = arena().allocate(10);
        char* data = moved.data();
        Block other(std::move(moved));
        CHECK(other.data() == data && moved.data() == nullptr);
        moved = std::move(other);
        CHECK(moved.data() == data);
    }
    empty_again();
}

/// Bytes of these addresses that the page tables map by huge pages.
size_t in_huge_pages(const char* data) {
    std::ifstream smaps("/proc/self/smaps");
    bool here = false;
    for (std::string line; std::getline(smaps, line);) {
        unsigned long begin = 0, end = 0;
        if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
            here = begin <= reinterpret_cast<uintptr_t>(data) && reinterpret_cast<uintptr_t>(data) < end;
        size_t kilobytes = 0;
        if (here && std::sscanf(line.c_str(), "ShmemPmdMapped: %zu kB", &kilobytes) == 1) return kilobytes << 10;
    }
    return 0;
}

/// Whether this kernel makes a huge page of shared memory that is asked for so (Linux 6.1), found out by asking.
bool gives_huge_pages() {
    constexpr size_t bytes = 4 * megabyte;
    constexpr int collapse = 25;  // MADV_COLLAPSE
    const UniqueFd fd(memfd_create("huge", MFD_CLOEXEC));
    if (!fd || ftruncate(fd.get(), bytes) != 0) return false;
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) return false;
    std::memset(data, 1, bytes);
    char* first = static_cast<char*>(data);
    while (reinterpret_cast<uintptr_t>(first) % (2 * megabyte) != 0) first += 4096;
    const bool given = madvise(first, 2 * megabyte, collapse) == 0;
    munmap(data, bytes);
    return given;
}

/// Segments lie in huge pages, here and where a peer maps them.
TEST(takes_huge_pages) {
    const Block block = arena().allocate(16 * megabyte);
    const Location at = arena().locate(block.data(), block.bytes());
    const size_t bytes = block.bytes();
    const Mapping seen_by_a_peer(arena().descriptor(at.segment()), bytes);
    seen_by_a_peer.populate(0, bytes);
    for (const char* data : {block.data(), seen_by_a_peer.data()}) {
        CHECK_EQ(reinterpret_cast<uintptr_t>(data) % (2 * megabyte), uintptr_t{0});
        if (gives_huge_pages())
            CHECK(in_huge_pages(data) > 0);
        else
            std::printf("arena_test: this kernel gives no huge pages of shared memory: not checked\n");
    }
}

/// Where ranks outnumber processors, a thread may not run for long: that is no work of the kernel.
TEST(waiting_for_a_processor_is_no_work) {
    const HugePages pages;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(pages.worthwhile());
}

/// Freed neighbours become one again, in any order of freeing.
TEST(merges) {
    const Budget budget(arena(), 8 * megabyte);
    std::mt19937 random(1);
    for (int round = 0; round < 20; ++round) {
        std::vector<Block> blocks;
        for (int i = 0; i < 8; ++i) {
            blocks.push_back(arena().allocate(megabyte));
            CHECK(blocks.back().shared());
        }
        CHECK(!arena().allocate(megabyte).shared());
        std::shuffle(blocks.begin(), blocks.end(), random);
        while (!blocks.empty()) blocks.pop_back();
        const Block all = arena().allocate(8 * megabyte);
        CHECK(all.shared());
    }
}

TEST(keeps_private_blocks) {
    const Budget budget(arena(), megabyte);
    const char* place = nullptr;
    for (const size_t size : {40, 40, 30}) {  // the last one is smaller, and takes the same pages
        const Block block = arena().allocate(size * megabyte);
        CHECK(!block.shared());
        if (place != nullptr) CHECK(block.data() == place);
        place = block.data();
        std::memset(block.data(), 1, block.bytes());
    }
    const Block kept = arena().allocate(40 * megabyte), other = arena().allocate(40 * megabyte);
    CHECK(kept.data() == place && other.data() != place);
}

TEST(finds) {
    const Budget budget(arena(), 100 * megabyte);
    const Block a = arena().allocate(20 * megabyte), b = arena().allocate(30 * megabyte);
    for (const Block* block : {&a, &b}) {
        const Location at = arena().locate(block->data() + 5, 100);
        CHECK(at.segment() != 0);
        CHECK(arena().address(at.segment(), at.offset(), 100) == block->data() + 5);
        const int fd = arena().descriptor(at.segment());
        CHECK(fd >= 0);
        struct stat status{};
        CHECK(fstat(fd, &status) == 0);
        const auto bytes = static_cast<size_t>(status.st_size);
        CHECK(ftruncate(fd, 0) != 0);  // no peer can shrink it under another's feet
        const Mapping seen_by_a_peer(fd, bytes);
        block->data()[5] = 42;
        CHECK_EQ(static_cast<int>(seen_by_a_peer.data()[at.offset()]), 42);
        const char* const base = arena().address(at.segment(), 0, bytes);
        CHECK(arena().locate(base + bytes - 1, 2).segment() == 0);  // runs over the end
        CHECK(arena().locate(base + bytes - 2, 2).segment() == at.segment());
        CHECK(arena().address(at.segment(), 0, bytes + 1) == nullptr);
        CHECK(arena().address(at.segment(), bytes + 1, 0) == nullptr);
        CHECK(arena().address(at.segment(), ~uint64_t{0}, 2) == nullptr);
    }
    CHECK(arena().locate(a.data(), 1).segment() != arena().locate(b.data(), 1).segment());
    const char own_byte = 0;
    const Location here = arena().locate(&own_byte, 1);
    CHECK(here.segment() == 0 && here.offset() == reinterpret_cast<uint64_t>(&own_byte));
    CHECK(arena().address(999, 0, 0) == nullptr && arena().address(0, 0, 0) == nullptr);
    CHECK_EQ(arena().descriptor(999), -1);
}

/// While a late writer may come back, nothing that overlaps its target is handed out; afterwards it is.
TEST(quarantines) {
    const Budget budget(arena(), 8 * megabyte);
    std::atomic<bool> clear = false;
    std::optional<Block> block(arena().allocate(2 * megabyte));
    char* data = block->data();
    const Location place = arena().locate(data, 1);
    const Mapping peers(arena().descriptor(place.segment()), place.offset() + 2 * megabyte);
    std::memset(data, 1, 2 * megabyte);
    arena().quarantine(data + 100, 1000, [&] { return clear.load(); });
    std::memset(peers.data() + place.offset(), 2, 2 * megabyte);
    CHECK(data[0] == 1 && data[100] == 1 && data[4095] == 1 && data[4096] == 2);  // whole pages, and no more
    CHECK_EQ(arena().locate(data, 1).segment(), 0u);
    CHECK(arena().locate(data + 4096, 1).segment() != 0);
    CHECK_EQ(arena().stats().cut_bytes, uint64_t{4096});
    block.reset();
    CHECK_EQ(arena().stats().quarantined_bytes, 2 * megabyte);
    std::vector<Block> others;
    for (int i = 0; i < 10; ++i) {
        others.push_back(arena().allocate(megabyte));
        const char* other = others.back().data();
        CHECK(other + megabyte <= data || data + 2 * megabyte <= other);
    }
    CHECK(!others.back().shared());
    clear = true;
    CHECK(arena().allocate(2 * megabyte).data() == data);
    CHECK_EQ(arena().stats().quarantined_bytes, uint64_t{0});
    CHECK_EQ(arena().stats().cut_bytes, uint64_t{0});
    peers.data()[place.offset()] = 3;
    CHECK(data[0] == 3 && arena().locate(data, 1).bits == place.bits);

    int asked = 0;  // one that is clear at once leaves nothing behind
    arena().quarantine(data, 1000, [&] { return ++asked > 0; });
    CHECK(arena().allocate(2 * megabyte).data() == data);
    CHECK_EQ(asked, 1);
}

/// A block whose pages cannot be shared again when it becomes clear comes back later.
TEST(mends_later) {
    const Budget budget(arena(), 8 * megabyte);
    bool clear = false;
    std::optional<Block> block(arena().allocate(2 * megabyte));
    const char* data = block->data();
    const int segment = arena().descriptor(arena().locate(data, 1).segment()), kept = dup(segment);
    arena().quarantine(data, 1000, [&] { return clear; });
    block.reset();
    clear = true;
    close(segment);  // stands for any failure to map the pages
    CHECK_EQ(arena().stats().quarantined_bytes, 2 * megabyte);
    CHECK_EQ(dup2(kept, segment), segment);
    CHECK_EQ(arena().stats().quarantined_bytes, uint64_t{0});
    CHECK(arena().allocate(2 * megabyte).data() == data);
    close(kept);
}

/// Blocks of several threads never overlap, whatever they do.
TEST(stress) {
    const Budget budget(arena(), 40 * megabyte);
    const int rounds = UNDER_SANITIZER ? 300 : 3000;
    std::vector<std::thread> users;
    std::atomic<int> good = 0;
    for (int user = 0; user < 4; ++user) {
        users.emplace_back([&, user] {
            good += testing::passes("user", [&] {
                std::mt19937 random(static_cast<unsigned>(user));
                std::vector<std::pair<Block, char>> held;
                const auto check = [](const std::pair<Block, char>& item) {
                    for (size_t i = 0; i < item.first.bytes(); i += 4093) CHECK(item.first.data()[i] == item.second);
                };
                for (int round = 0; round < rounds; ++round) {
                    if (held.size() > 12 || (!held.empty() && random() % 3 == 0)) {
                        const size_t which = random() % held.size();
                        check(held[which]);
                        held.erase(held.begin() + static_cast<ptrdiff_t>(which));
                        continue;
                    }
                    const size_t bytes = size_t{1} << (random() % 21);
                    const auto mark = static_cast<char>(user * 64 + round % 64);
                    held.emplace_back(arena().allocate(bytes + random() % 100), mark);
                    const Block& block = held.back().first;
                    for (size_t i = 0; i < block.bytes(); i += 4093) block.data()[i] = mark;
                    CHECK((arena().locate(block.data(), block.bytes()).segment() != 0) == block.shared());
                }
                for (const auto& item : held) check(item);
            });
        });
    }
    for (std::thread& user : users) user.join();
    CHECK_EQ(good.load(), 4);
    CHECK_EQ(arena().stats().used_bytes, uint64_t{0});
}

}  // namespace
