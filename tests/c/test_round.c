/* Stochastic rounding: the scalar code against its definition and its statistics, AVX2 against the scalar code.
 * With the argument "bench": elements per second of each implementation on one thread and on all. */
#include "check.h"

#include <math.h>
#include <string.h>

#include "base/os.h"
#include "core/round.h"

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint16_t one(uint32_t bits, viking_round_key key)
{
    float value = float_of(bits);
    uint16_t result = 0;
    CHECK_OK(viking_round_to_bf16_by(VIKING_ROUND_SCALAR, &result, &value, 1, key, 1));
    return result;
}

static void what_bf16_holds_stays(void)
{
    for (uint32_t high = 0; high < 0x10000; high++) {
        if ((high & 0x7fff) > 0x7f80)
            continue; /* NaN */
        for (uint32_t k = 0; k < 8; k++)
            CHECK(one(high << 16, (viking_round_key){k * 0x9e3779b9u, k}) == high);
    }
}

static void nan_stays_nan_and_the_largest_may_overflow(void)
{
    const uint32_t nans[] = {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffc00000u, 0xffffffffu};
    bool finite = false, infinite = false;
    for (uint32_t k = 0; k < 64; k++) {
        viking_round_key key = {k, 77 * k};
        for (size_t i = 0; i < sizeof nans / sizeof *nans; i++)
            CHECK(one(nans[i], key) == 0x7fc0);
        uint16_t largest = one(0x7f7f8000u, key); /* half way between the largest finite bf16 and infinity */
        CHECK(largest == 0x7f7f || largest == 0x7f80);
        *(largest == 0x7f80 ? &infinite : &finite) = true;
    }
    CHECK(finite && infinite);
}

/* Up with the probability that is the distance: over n draws, within 5 standard deviations. */
static void the_mean_is_the_value(void)
{
    enum { COUNT = 1 << 18 };
    float *source = malloc(COUNT * sizeof *source);
    uint16_t *rounded = malloc(COUNT * sizeof *rounded);
    CHECK(source && rounded);
    const uint32_t low[] = {1, 0x100, 0x4000, 0x8000, 0xc000, 0xffff};
    for (size_t l = 0; l < sizeof low / sizeof *low; l++)
        for (uint32_t sign = 0; sign < 2; sign++) {
            for (size_t i = 0; i < COUNT; i++)
                source[i] = float_of(sign << 31 | 0x3f800000u | low[l]);
            CHECK_OK(viking_round_to_bf16(rounded, source, COUNT, (viking_round_key){low[l], sign}, 0));
            size_t up = 0;
            for (size_t i = 0; i < COUNT; i++) {
                uint32_t over = rounded[i] - (sign << 15 | 0x3f80u);
                CHECK(over <= 1);
                up += over;
            }
            double p = (double)low[l] / 65536;
            CHECK(fabs((double)up - p * COUNT) <= 5 * sqrt(COUNT * p * (1 - p)) + 1);
        }
    free(source);
    free(rounded);
}

/* Bits of neighbours, of two weights and of two steps are as if tossed: a chi-square over their top 4 bits each. */
static void draws_are_independent(void)
{
    enum { DRAWS = 1 << 20 };
    const struct {
        viking_round_key left, right;
        uint32_t shift;
    } pairs[] = {
        {{5, 9}, {5, 9}, 1}, {{5, 9}, {5, 9}, 4096}, {{5, 9}, {5, 10}, 0}, {{5, 9}, {6, 9}, 0}, {{0, 0}, {1, 1}, 0}};
    for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++) {
        uint32_t cells[256] = {0};
        for (uint32_t i = 0; i < DRAWS; i++)
            cells[viking_round_bits(pairs[p].left, i) >> 12 << 4 |
                  viking_round_bits(pairs[p].right, i + pairs[p].shift) >> 12]++;
        double chi = 0, expected = DRAWS / 256.0;
        for (size_t c = 0; c < 256; c++)
            chi += ((double)cells[c] - expected) * ((double)cells[c] - expected) / expected;
        CHECK(chi > 255 - 5 * 22.6 && chi < 255 + 5 * 22.6); /* 255 degrees of freedom: deviation sqrt(510) */
    }
}

static void every_implementation_equals_the_scalar_one(void)
{
    enum { COUNT = 200003 };
    float *source = malloc((COUNT + 1) * sizeof *source);
    uint16_t *expected = malloc(COUNT * sizeof *expected), *actual = malloc((COUNT + 2) * sizeof *actual);
    CHECK(source && expected && actual);
    uint32_t bits = 1;
    for (size_t i = 0; i <= COUNT; i++) {
        bits = bits * 1664525u + 1013904223u;
        source[i] = float_of(bits);
    }
    const viking_round_implementation others[] = {VIKING_ROUND_AVX2, VIKING_ROUND_AUTO};
    const size_t counts[] = {0, 1, 15, 16, 17, 33, 65536, 65537, COUNT};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        viking_round_key key = {0xfffffff0u, 0xdeadbeefu};
        CHECK_OK(viking_round_to_bf16_by(VIKING_ROUND_SCALAR, expected, source + 1, counts[c], key, 1));
        for (size_t o = 0; o < 2; o++) {
            if (!viking_round_available(others[o]))
                continue;
            for (unsigned threads = 0; threads <= 3; threads++) {
                memset(actual, 0xab, (COUNT + 2) * sizeof *actual);
                CHECK_OK(viking_round_to_bf16_by(others[o], actual + 1, source + 1, counts[c], key, threads));
                CHECK(memcmp(actual + 1, expected, 2 * counts[c]) == 0);
                CHECK(actual[0] == 0xabab && actual[counts[c] + 1] == 0xabab); /* nothing outside */
            }
        }
    }
    free(source);
    free(expected);
    free(actual);
}

static void an_overlap_is_refused(void)
{
    float both[8] = {0};
    CHECK(viking_round_to_bf16((uint16_t *)(void *)both, both, 8, (viking_round_key){0, 0}, 1) == VIKING_ERROR_INVALID);
}

static void bench(void)
{
    const size_t count = (size_t)1 << 25;
    float *source = calloc(count, sizeof *source);
    uint16_t *destination = calloc(count, sizeof *destination);
    CHECK(source && destination);
    const struct {
        viking_round_implementation implementation;
        const char *name;
    } kinds[] = {{VIKING_ROUND_SCALAR, "scalar"}, {VIKING_ROUND_AVX2, "AVX2"}};
    for (size_t k = 0; k < 2; k++)
        for (unsigned threads = 0; viking_round_available(kinds[k].implementation) && threads <= 1; threads++) {
            uint64_t best = UINT64_MAX;
            for (int round = 0; round < 7; round++) {
                uint64_t begin = viking_os_clock_ns();
                CHECK_OK(viking_round_to_bf16_by(kinds[k].implementation, destination, source, count,
                                                 (viking_round_key){1, 2}, threads));
                uint64_t taken = viking_os_clock_ns() - begin;
                best = taken < best ? taken : best;
            }
            printf("%-8s %-12s %7.0f million elements per second\n", kinds[k].name,
                   threads ? "one thread" : "all threads", (double)count / (double)best * 1e3);
        }
    free(source);
    free(destination);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        bench();
        return 0;
    }
    RUN(what_bf16_holds_stays);
    RUN(nan_stays_nan_and_the_largest_may_overflow);
    RUN(the_mean_is_the_value);
    RUN(draws_are_independent);
    RUN(every_implementation_equals_the_scalar_one);
    RUN(an_overlap_is_refused);
    return 0;
}
