"""What this processor and this build can do."""

cdef extern from *:
    """
    #if defined(_OPENMP)
    #include <omp.h>
    static int kv_max_threads(void) { return omp_get_max_threads(); }
    static int kv_openmp(void) { return 1; }
    #else
    static int kv_max_threads(void) { return 1; }
    static int kv_openmp(void) { return 0; }
    #endif

    #if defined(__x86_64__) && defined(__GNUC__)
    #include <cpuid.h>
    #if defined(__linux__)
    #include <sys/syscall.h>
    #include <unistd.h>
    #endif
    static int kv_avx2(void) {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
            && __builtin_cpu_supports("bmi2");
    }
    /* Leaf 7, subleaf 1, bit 4 of eax: not every compiler's __builtin_cpu_supports knows it. */
    static int kv_avxvnni(void) {
        unsigned eax = 0, ebx, ecx, edx;
        return kv_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
    }
    static int kv_avx512(void) {
        return kv_avx2() && __builtin_cpu_supports("avx512f")
            && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq")
            && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")
            && __builtin_cpu_supports("avx512vbmi");
    }
    /* Leaf 7, bits 24 (tiles) and 25 (int8) of edx. Linux saves tiles only for a process that has
       asked for it: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
    static int kv_amx(void) {
    #if defined(__linux__)
        unsigned eax, ebx, ecx, edx = 0;
        return kv_avx512() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)
            && (edx >> 24 & 3) == 3 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    #else
        return 0;
    #endif
    }
    #else
    static int kv_avx2(void) { return 0; }
    static int kv_avxvnni(void) { return 0; }
    static int kv_avx512(void) { return 0; }
    static int kv_amx(void) { return 0; }
    #endif
    """
    int kv_max_threads()
    bint kv_openmp()
    bint kv_avx2()
    bint kv_avxvnni()
    bint kv_avx512()
    bint kv_amx()


def supports(str level):
    """Whether the processor and the system let this process use the instructions of a SIMD level.

    For "amx" the system is asked for it, once for the process: its signal stacks must then have
    room for the tiles.
    """
    if level == "amx":
        return kv_amx()
    if level == "avx512":
        return kv_avx512()
    if level == "avxvnni":
        return kv_avxvnni()
    if level == "avx2":
        return kv_avx2()
    return level == "baseline"


def has_openmp():
    """Whether the fast path was compiled with OpenMP."""
    return kv_openmp()


def max_threads():
    """Threads that OpenMP would start; 1 without OpenMP."""
    return kv_max_threads()
