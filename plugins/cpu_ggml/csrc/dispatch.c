// The kernels of the best instruction set that this machine has.
#include "hx.h"
#ifdef HX_HAVE_NEON_DOTPROD
#include <sys/auxv.h>
#endif

#define DECLARE(isa) \
    extern const hx_kernel hx_##isa##_pack_q8, hx_##isa##_pack_f32, hx_##isa##_linear, \
        hx_##isa##_norm, hx_##isa##_gate, hx_##isa##_angles, hx_##isa##_store, hx_##isa##_attend, \
        hx_##isa##_choose, hx_##isa##_group, hx_##isa##_regroup, hx_##isa##_experts, \
        hx_##isa##_combine;
#define TABLE(isa, panel) \
    {#isa, panel, &hx_##isa##_pack_q8, &hx_##isa##_pack_f32, &hx_##isa##_linear, &hx_##isa##_norm, \
     &hx_##isa##_gate, &hx_##isa##_angles, &hx_##isa##_store, &hx_##isa##_attend, &hx_sample_rows, \
     &hx_select_rows, &hx_##isa##_choose, &hx_##isa##_group, &hx_##isa##_regroup, \
     &hx_##isa##_experts, &hx_##isa##_combine}

extern const hx_kernel hx_sample_rows, hx_select_rows;
DECLARE(scalar)
#ifdef HX_HAVE_AVX2
DECLARE(avx2)
#endif
#ifdef HX_HAVE_AVX512
DECLARE(avx512)
#endif
#ifdef HX_HAVE_NEON
DECLARE(neon)
#endif
#ifdef HX_HAVE_NEON_DOTPROD
DECLARE(neon_dotprod)
#endif

static const hx_table TABLES[] = {
#ifdef HX_HAVE_AVX512
    TABLE(avx512, 12),
#endif
#ifdef HX_HAVE_AVX2
    TABLE(avx2, 6),
#endif
#ifdef HX_HAVE_NEON_DOTPROD
    TABLE(neon_dotprod, 8),
#endif
#ifdef HX_HAVE_NEON
    TABLE(neon, 4),
#endif
    TABLE(scalar, 4),
};

static int runs_here(const char *isa) {
#ifdef HX_HAVE_AVX2
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
        && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    if (!strcmp(isa, "avx2")) return avx2;
    if (!strcmp(isa, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
            && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
#endif
#ifdef HX_HAVE_NEON_DOTPROD
    if (!strcmp(isa, "neon_dotprod")) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
    return 1;
}

// `isa` "auto": the best; else that one. Null: not built or this CPU lacks it.
__attribute__((visibility("default"))) const hx_table *hx_kernels(const char *isa) {
    for (unsigned i = 0; i < sizeof TABLES / sizeof *TABLES; i++)
        if ((!strcmp(isa, "auto") || !strcmp(isa, TABLES[i].isa)) && runs_here(TABLES[i].isa))
            return &TABLES[i];
    return 0;
}

// Sizes of the parameter structs, for the binding to compare with its own.
__attribute__((visibility("default"))) int64_t hx_struct_size(const char *name) {
#define SIZE(type) if (!strcmp(name, #type)) return sizeof(type)
    SIZE(hx_step); SIZE(hx_pack_x); SIZE(hx_part); SIZE(hx_linear); SIZE(hx_norm); SIZE(hx_gate);
    SIZE(hx_angles); SIZE(hx_pool); SIZE(hx_store); SIZE(hx_attend); SIZE(hx_sample); SIZE(hx_rows);
    SIZE(hx_choose); SIZE(hx_group); SIZE(hx_regroup); SIZE(hx_experts); SIZE(hx_combine);
    SIZE(hx_op); SIZE(hx_program); SIZE(hx_table);
    return -1;
}
