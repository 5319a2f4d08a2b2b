// Makes one clone of a kernel per instruction set, which is chosen at run time.
//
// A kernel is an always_inline function without target attribute; `clones` wraps it in one plain function per
// instruction set, into which the compiler inlines and vectorizes it. No ifunc is involved, so clones work under
// sanitizers, with every libc and with both gcc and clang, and a test can call each of them. ALLTOALLV_NO_CLONES leaves
// only the base function. Compile kernels with -O3 -ffp-contract=off: a fused multiply-add would change results between
// clones.
#pragma once

#include <cstddef>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define ALLTOALLV_INLINE inline __attribute__((always_inline))

/// Elements of equal index may overlap; elements of different index must not.
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"  // sanitized loops are not vectorized
#define ALLTOALLV_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define ALLTOALLV_INDEPENDENT _Pragma("GCC ivdep")
#endif

#if defined(__x86_64__) && !defined(ALLTOALLV_NO_CLONES)
#define ALLTOALLV_HAS_CLONES 1
#define ALLTOALLV_TARGET_V3 __attribute__((target("avx2,bmi,bmi2,f16c,fma")))
#define ALLTOALLV_TARGET_V4 \
    __attribute__((target("avx2,bmi,bmi2,f16c,fma,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")))
#define ALLTOALLV_TARGET_VBMI \
    __attribute__((target("avx2,bmi,bmi2,f16c,fma,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vbmi")))
#else
#define ALLTOALLV_HAS_CLONES 0
#define ALLTOALLV_TARGET_V3
#define ALLTOALLV_TARGET_V4
#endif

/// For what clones call outside of their vector loops: one copy for all of them.
#if ALLTOALLV_HAS_CLONES
#define ALLTOALLV_SHARED __attribute__((noinline))
#else
#define ALLTOALLV_SHARED ALLTOALLV_INLINE
#endif

namespace alltoallv::kernel {

/// x86-64, x86-64-v3 (AVX2), x86-64-v4 (AVX-512), v4 that permutes bytes; on other processors the compiler's target.
enum class Isa : unsigned char { base, v3, v4, vbmi };

/// One function per instruction set.
template <class Function>
struct ByIsa {
    Function functions[4];

    constexpr Function operator[](Isa isa) const { return functions[static_cast<size_t>(isa)]; }
};

/// Returns the best instruction set of this processor.
inline Isa best_isa() {
#if ALLTOALLV_HAS_CLONES
    static const Isa best = [] {
        __builtin_cpu_init();
        unsigned a = 0, b = 0, c = 0, d = 0;  // __builtin_cpu_supports of older compilers does not know F16C
        const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
        const bool v3 = f16c && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx2") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
        const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
        const bool vbmi = v4 && __builtin_cpu_supports("avx512vbmi");
        return vbmi ? Isa::vbmi : v4 ? Isa::v4 : v3 ? Isa::v3 : Isa::base;
    }();
    return best;
#else
    return Isa::base;
#endif
}

/// Whether two kernels are the same. With sanitizers GCC compares addresses of functions at run time only.
template <auto kernel, auto other>
inline constexpr bool is_same = false;
template <auto kernel>
inline constexpr bool is_same<kernel, kernel> = true;

template <auto base_kernel, auto v3_kernel, auto v4_kernel, auto vbmi_kernel>
struct ClonesOf;
template <class... Args, void (*base_kernel)(Args...), void (*v3_kernel)(Args...), void (*v4_kernel)(Args...),
          auto vbmi_kernel>
struct ClonesOf<base_kernel, v3_kernel, v4_kernel, vbmi_kernel> {
    static void base(Args... args) { base_kernel(args...); }
#if ALLTOALLV_HAS_CLONES
    ALLTOALLV_TARGET_V3 static void v3(Args... args) { v3_kernel(args...); }
    ALLTOALLV_TARGET_V4 static void v4(Args... args) { v4_kernel(args...); }
    ALLTOALLV_TARGET_VBMI static void vbmi(Args... args) { vbmi_kernel(args...); }
    static constexpr ByIsa<decltype(&base)> by_isa{{ base, v3, v4, is_same<v4_kernel, vbmi_kernel> ? v4 : vbmi }};
#else
    static constexpr ByIsa<decltype(&base)> by_isa{{base, base, base, base}};
#endif
};

/// Kernels that know their instruction set.
template <auto base_kernel, auto v3_kernel, auto v4_kernel, auto vbmi_kernel = v4_kernel>
inline constexpr auto& clones_by_isa = ClonesOf<base_kernel, v3_kernel, v4_kernel, vbmi_kernel>::by_isa;

/// One kernel's clones.
template <auto kernel>
inline constexpr auto& clones = clones_by_isa<kernel, kernel, kernel>;

}  // namespace alltoallv::kernel
