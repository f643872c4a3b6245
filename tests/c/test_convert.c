/* Conversion to bf16: the scalar code against exact arithmetic, every other implementation against the scalar code.
 * With the argument "bench": GB/s (bytes read and written) of each implementation on one thread and on all. */
#include "check.h"

#include <math.h>
#include <string.h>

#include "base/os.h"
#include "core/convert.h"
#include "random_bits.h"

static const viking_convert_implementation VECTOR[] = {VIKING_CONVERT_AVX2, VIKING_CONVERT_AVX512, VIKING_CONVERT_AUTO};
enum { VECTOR_COUNT = sizeof VECTOR / sizeof *VECTOR };

static uint16_t scalar_fp32(uint32_t bits)
{
    uint16_t result = 0;
    CHECK_OK(viking_convert_to_bf16_by(VIKING_CONVERT_SCALAR, &result, &bits, VIKING_CONVERT_FP32, 1, 1));
    return result;
}

/* The nearest bf16 of a finite value by comparing distances in double, where all of it is exact; 2^128 stands for
 * infinity, which is where the next bf16 would be. */
static uint16_t nearest(double value)
{
    double magnitude = fabs(value);
    uint32_t below = 0, above = 0x7f80;
    while (above - below > 1) { /* the bit patterns of non-negative bf16 are in the order of their values */
        uint32_t middle = (below + above) / 2;
        if ((double)float_of(middle << 16) <= magnitude)
            below = middle;
        else
            above = middle;
    }
    double from_below = magnitude - (double)float_of(below << 16);
    double to_above = (above == 0x7f80 ? 0x1p128 : (double)float_of(above << 16)) - magnitude;
    uint32_t result = from_below < to_above || (from_below == to_above && below % 2 == 0) ? below : above;
    return (uint16_t)(result | (copysign(1.0, value) < 0 ? 0x8000u : 0u));
}

static void scalar_fp32_is_the_nearest_ties_to_even(void)
{
    const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    for (uint32_t high = 0; high < 0x10000; high++)
        for (size_t i = 0; i < sizeof low / sizeof *low; i++) {
            uint32_t bits = high << 16 | low[i];
            if ((bits & 0x7f800000u) != 0x7f800000u)
                CHECK(scalar_fp32(bits) == nearest((double)float_of(bits)));
        }
    for (int i = 0; i < 1000000; i++) {
        uint32_t bits = random_bits();
        if ((bits & 0x7f800000u) != 0x7f800000u)
            CHECK(scalar_fp32(bits) == nearest((double)float_of(bits)));
    }
}

static void scalar_fp32_keeps_infinities_zeros_and_nan(void)
{
    CHECK(scalar_fp32(0x7f800000u) == 0x7f80);
    CHECK(scalar_fp32(0xff800000u) == 0xff80);
    CHECK(scalar_fp32(0x00000000u) == 0x0000);
    CHECK(scalar_fp32(0x80000000u) == 0x8000);
    CHECK(scalar_fp32(0x7f7fffffu) == 0x7f80); /* the largest fp32 rounds up to infinity */
    const uint32_t nans[] = {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffc00000u, 0xffffffffu};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++)
        CHECK(scalar_fp32(nans[i]) == 0xffff);
}

static void scalar_fp16_is_the_nearest_for_every_pattern(void)
{
    for (uint32_t half = 0; half < 0x10000; half++) {
        uint16_t source = (uint16_t)half, result = 0;
        CHECK_OK(viking_convert_to_bf16_by(VIKING_CONVERT_SCALAR, &result, &source, VIKING_CONVERT_FP16, 1, 1));
        int exponent = (int)(half >> 10 & 0x1f);
        double mantissa = (double)(half & 0x3ff) / 1024;
        double sign = half & 0x8000 ? -1.0 : 1.0;
        if (exponent == 0x1f)
            CHECK(result == ((half & 0x3ff) ? 0x7fc0 : (half & 0x8000) | 0x7f80));
        else
            CHECK(result == nearest(sign * (exponent ? ldexp(1 + mantissa, exponent - 15) : ldexp(mantissa, -14))));
    }
}

static void compare(const void *source, viking_convert_source kind, size_t count)
{
    uint16_t *expected = malloc(2 * count + 2), *actual = malloc(2 * count + 4);
    CHECK(expected && actual);
    CHECK_OK(viking_convert_to_bf16_by(VIKING_CONVERT_SCALAR, expected, source, kind, count, 1));
    for (int v = 0; v < VECTOR_COUNT; v++) {
        if (!viking_convert_available(VECTOR[v]))
            continue;
        for (unsigned threads = 0; threads <= 3; threads++) {
            memset(actual, 0xab, 2 * count + 4);
            CHECK_OK(viking_convert_to_bf16_by(VECTOR[v], actual + 1, source, kind, count, threads));
            CHECK(memcmp(actual + 1, expected, 2 * count) == 0);
            CHECK(actual[0] == 0xabab && actual[count + 1] == 0xabab); /* nothing outside */
        }
    }
    free(expected);
    free(actual);
}

static void every_implementation_equals_the_scalar_one(void)
{
    const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    const size_t edges = 6u << 16, random = 3u << 16;
    uint32_t *words = malloc((edges + random) * sizeof *words);
    CHECK(words);
    for (size_t i = 0; i < edges; i++)
        words[i] = (uint32_t)(i / 6) << 16 | low[i % 6];
    for (size_t i = edges; i < edges + random; i++)
        words[i] = random_bits();
    compare(words, VIKING_CONVERT_FP32, edges + random);

    uint16_t *halves = malloc(((size_t)4 << 16) * sizeof *halves);
    CHECK(halves);
    for (size_t i = 0; i < (size_t)4 << 16; i++)
        halves[i] = (uint16_t)i;
    compare(halves, VIKING_CONVERT_FP16, (size_t)4 << 16);
    free(words);
    free(halves);
}

static void every_length_and_alignment_is_right(void)
{
    unsigned char bytes[4 * 100 + 8];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)random_bits();
    for (size_t offset = 0; offset < 8; offset++)
        for (size_t count = 0; count <= 100; count++) {
            /* A block of exactly this size, so that a sanitizer sees a read beyond its end. */
            unsigned char *exact = malloc(offset + 4 * count + 1);
            CHECK(exact);
            memcpy(exact, bytes, offset + 4 * count);
            compare(exact + offset, VIKING_CONVERT_FP32, count);
            compare(exact + offset, VIKING_CONVERT_FP16, count);
            free(exact);
        }
}

static void in_place_gives_the_same_bits(void)
{
    const size_t count = 300001;
    uint32_t *words = malloc(count * sizeof *words);
    uint16_t *expected = malloc(count * sizeof *expected);
    CHECK(words && expected);
    const viking_convert_implementation all[] = {VIKING_CONVERT_SCALAR, VIKING_CONVERT_AVX2, VIKING_CONVERT_AVX512};
    for (size_t i = 0; i < 3; i++)
        for (int kind = VIKING_CONVERT_FP32; kind <= VIKING_CONVERT_FP16; kind++) {
            if (!viking_convert_available(all[i]))
                continue;
            for (size_t at = 0; at < count; at++)
                words[at] = random_bits();
            CHECK_OK(viking_convert_to_bf16_by(VIKING_CONVERT_SCALAR, expected, words, (viking_convert_source)kind,
                                               count, 1));
            CHECK_OK(viking_convert_to_bf16_by(all[i], (uint16_t *)(void *)words, words, (viking_convert_source)kind,
                                               count, 4));
            CHECK(memcmp(words, expected, count * sizeof *expected) == 0);
        }
    free(words);
    free(expected);
}

static void what_cannot_be_done_is_refused(void)
{
    uint16_t cells[64] = {0};
    CHECK(viking_convert_to_bf16(cells + 1, cells, VIKING_CONVERT_FP16, 32, 1) == VIKING_ERROR_INVALID);
    CHECK(viking_convert_to_bf16(cells, cells + 31, VIKING_CONVERT_FP16, 32, 1) == VIKING_ERROR_INVALID);
    CHECK_OK(viking_convert_to_bf16(cells, cells + 32, VIKING_CONVERT_FP16, 32, 1));
    CHECK(viking_convert_to_bf16(cells, cells + 32, (viking_convert_source)7, 1, 1) == VIKING_ERROR_INVALID);
    CHECK(viking_convert_to_bf16(cells, cells + 32, VIKING_CONVERT_FP32, SIZE_MAX / 2, 1) == VIKING_ERROR_INVALID);
    CHECK(!viking_convert_available((viking_convert_implementation)9));
    CHECK(viking_convert_to_bf16_by((viking_convert_implementation)9, cells, cells + 32, VIKING_CONVERT_FP16, 1, 1) ==
          VIKING_ERROR_UNSUPPORTED);
    CHECK_OK(viking_convert_to_bf16(NULL, NULL, VIKING_CONVERT_FP32, 0, 0));
}

static void bench(void)
{
    const char *const names[] = {"auto", "scalar", "avx2", "avx512"};
    const size_t count = (size_t)64 << 20;
    void *source = NULL, *destination = NULL;
    CHECK_OK(viking_os_map(4 * count, &source));
    CHECK_OK(viking_os_map(2 * count, &destination));
    for (size_t i = 0; i < count; i++)
        ((uint32_t *)source)[i] = random_bits();
    memset(destination, 1, 2 * count);
    for (int kind = VIKING_CONVERT_FP32; kind <= VIKING_CONVERT_FP16; kind++)
        for (int by = VIKING_CONVERT_SCALAR; by <= VIKING_CONVERT_AVX512; by++)
            for (unsigned threads = 0; threads <= 1; threads++) {
                if (!viking_convert_available((viking_convert_implementation)by))
                    continue;
                uint64_t best = UINT64_MAX;
                for (int round = 0; round < 5; round++) {
                    uint64_t begin = viking_os_clock_ns();
                    CHECK_OK(viking_convert_to_bf16_by((viking_convert_implementation)by, destination, source,
                                                       (viking_convert_source)kind, count, threads));
                    uint64_t took = viking_os_clock_ns() - begin;
                    best = took < best ? took : best;
                }
                double bytes = (double)count * (kind == VIKING_CONVERT_FP32 ? 6 : 4);
                printf("%s %-6s %s: %.1f GB/s\n", kind == VIKING_CONVERT_FP32 ? "fp32" : "fp16", names[by],
                       threads ? "1 thread  " : "all threads", bytes / (double)best);
            }
    viking_os_unmap(source, 4 * count);
    viking_os_unmap(destination, 2 * count);
}

int main(int argument_count, char **arguments)
{
    if (argument_count > 1 && strcmp(arguments[1], "bench") == 0) {
        bench();
        return 0;
    }
    for (int v = 0; v < VECTOR_COUNT - 1; v++)
        if (!viking_convert_available(VECTOR[v]))
            printf("   (this processor lacks %s: not compared)\n",
                   VECTOR[v] == VIKING_CONVERT_AVX2 ? "AVX2" : "AVX-512");
    RUN(scalar_fp32_is_the_nearest_ties_to_even);
    RUN(scalar_fp32_keeps_infinities_zeros_and_nan);
    RUN(scalar_fp16_is_the_nearest_for_every_pattern);
    RUN(every_implementation_equals_the_scalar_one);
    RUN(every_length_and_alignment_is_right);
    RUN(in_place_gives_the_same_bits);
    RUN(what_cannot_be_done_is_refused);
    return 0;
}
