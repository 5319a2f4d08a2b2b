// Plans of kernels that communicate: places in windows never overlap, and depend on no call.
#include "runtime/window/plan.h"
#include "check.h"
#include "errors.h"
#include "quant_all_reduce/plan.h"

using namespace alltoallv;
using namespace alltoallv_kernels;
using namespace testing;

namespace {

constexpr uint64_t mib = 1 << 20;

TEST(halves_and_lanes_do_not_overlap) {
    for (const uint64_t window : {2 * mib, 3 * mib + 77, 400 * mib}) {
        for (const uint32_t ranks : {1u, 2u, 8u, 64u}) {
            for (const uint32_t cores : {1u, 3u, 40u, 48u, 50u}) {
                const WindowTiling plan = plan_window(window, ranks, cores);
                CHECK_EQ(plan.lanes, std::min(cores, most_lanes));
                CHECK_EQ(plan.lane_bytes % cell_bytes, 0u);
                CHECK(data_place + 2 * plan.lanes * plan.lane_bytes <= window);
                // Nothing worth mentioning is left unused.
                CHECK(data_place + 2 * plan.lanes * (plan.lane_bytes + 512) > window);
            }
        }
    }
}

TEST(windows_that_are_too_small_say_what_to_set) {
    std::string message;
    try {
        plan_window(600 << 10, 64, 48);
    } catch (const std::exception& error) {
        message = error.what();
    }
    check_contains(message, "have 614400 bytes, too few for 64 ranks: set HCCL_BUFFSIZE to at least 1");
    CHECK(plan_window(2 * mib, 64, 48).lane_bytes >= 64 * cell_bytes);
    for (const uint32_t ranks : {0u, 65u}) {
        bool refused = false;
        try {
            plan_window(400 * mib, ranks, 40);
        } catch (const std::exception&) {
            refused = true;
        }
        CHECK(refused);
    }
}

TEST(rounds_move_everything_once) {
    for (const uint64_t window : {2 * mib, 5 * mib}) {
        for (const uint32_t ranks : {1u, 4u, 7u}) {
            const WindowTiling plan = plan_window(window, ranks, 5);
            const uint64_t slot = plan.lane_bytes / ranks / cell_bytes * cell_bytes;
            for (const uint64_t rows : {0ull, 1ull, 1000ull, 300000ull}) {
                const uint64_t bytes = rows * 36, rounds = rounds_of(plan, rows, 36);
                CHECK(rounds >= 1);
                CHECK(rounds * plan.lanes * slot >= bytes);
                if (rounds > 1) CHECK((rounds - 1) * plan.lanes * slot < bytes + plan.lanes * cell_bytes);
            }
        }
    }
}

TEST(a_wait_is_bounded_as_hccl_bounds_collectives) {
    CHECK_EQ(unsetenv("HCCL_EXEC_TIMEOUT"), 0);
    CHECK_EQ(plan_window(2 * mib, 2, 1).wait_us, 1836000000u);
    for (const auto& [text, us] : {std::pair("7", 7000000u), {"0", 1000000u}, {"1e9", 4000000000u}}) {
        CHECK_EQ(setenv("HCCL_EXEC_TIMEOUT", text, 1), 0);
        CHECK_EQ(plan_window(2 * mib, 2, 1).wait_us, us);
    }
    CHECK_EQ(unsetenv("HCCL_EXEC_TIMEOUT"), 0);
}

TEST(no_core_is_without_a_group) {
    CHECK_EQ(cores_for_groups(0, 128, 40), 1u);
    CHECK_EQ(cores_for_groups(1, 128, 40), 1u);
    CHECK_EQ(cores_for_groups(129, 128, 40), 2u);
    CHECK_EQ(cores_for_groups(1 << 20, 128, 40), 40u);
    CHECK_EQ(cores_for_groups(~0ull, 1, 48), 48u);
    CHECK_EQ(plan_quantize(129, 128, 0, 8, 40).cores, 2u);
    CHECK_EQ(plan_shared_scale_sum(3, 65, 1, 0, 0, true, 40).cores, 3u);
    CHECK_EQ(code_bytes_of(1001, 7, 8), 1001u);
    CHECK_EQ(code_bytes_of(15, 7, 4), 4u + 4 + 1);
}

}  // namespace
