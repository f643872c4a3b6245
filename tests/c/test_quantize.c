/* 8-bit weights: the scalar code against exact arithmetic, the other implementations against the scalar code.
 * With the argument "bench": GB/s of source read, of each implementation on one thread and on all. */
#include "check.h"

#include <math.h>
#include <string.h>

#include "base/os.h"
#include "core/quantize.h"
#include "random_bits.h"

static const float LARGEST[] = {448.0f, 57344.0f, 127.0f};
static const char *const FORMATS[] = {"e4m3fn", "e5m2", "int8"};
static const size_t ELEMENT_BYTES[] = {4, 2, 2};

/* What a code means, by the definition of its format. */
static double value_of(uint8_t code, viking_quantize_format format)
{
    if (format == VIKING_QUANTIZE_INT8)
        return code < 128 ? code : code - 256.0;
    int mantissa_bits = format == VIKING_QUANTIZE_E4M3FN ? 3 : 2, bias = format == VIKING_QUANTIZE_E4M3FN ? 7 : 15;
    int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    double sign = code & 0x80 ? -1.0 : 1.0;
    if (format == VIKING_QUANTIZE_E4M3FN ? (code & 0x7f) == 0x7f : exponent == 31)
        return format == VIKING_QUANTIZE_E5M2 && mantissa == 0 ? sign * (double)INFINITY : (double)NAN;
    return exponent == 0 ? sign * ldexp(mantissa, 1 - bias - mantissa_bits)
                         : sign * ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

/* The nearest finite code by comparing distances in double, where all of it is exact; of two, the even one. */
static uint8_t nearest(double value, viking_quantize_format format)
{
    double magnitude = fabs(value);
    uint8_t best = 0, last = format == VIKING_QUANTIZE_E4M3FN ? 0x7e : format == VIKING_QUANTIZE_E5M2 ? 0x7b : 0x7f;
    for (uint8_t code = 1; code <= last; code++) {
        double here = fabs(value_of(code, format) - magnitude), before = fabs(value_of(best, format) - magnitude);
        if (here < before || (here == before && code % 2 == 0))
            best = code;
    }
    if (copysign(1.0, value) > 0)
        return best;
    return format == VIKING_QUANTIZE_INT8 ? (uint8_t)-best : (uint8_t)(best | 0x80);
}

/* A row whose scale is exactly 1 and which holds `value`: the row's largest code stands in front of it. */
static uint8_t encode_one(float value, viking_quantize_format format)
{
    const float row[] = {LARGEST[format], value};
    viking_quantize_matrix matrix = {row, VIKING_QUANTIZE_FP32, 1, 2};
    uint8_t codes[2];
    float scale;
    double error;
    CHECK_OK(viking_quantize_encode_by(VIKING_QUANTIZE_SCALAR, &matrix, format, 1, codes, &scale, &error));
    CHECK(scale == 1.0f || fabsf(value) > LARGEST[format]);
    return codes[1];
}

static void a_code_is_the_nearest_ties_to_even(void)
{
    for (int f = 0; f < 3; f++) {
        viking_quantize_format format = (viking_quantize_format)f;
        for (int code = 0; code < 0x7f; code++) { /* each code, the ties between two, and what is just beside both */
            float value = (float)value_of((uint8_t)code, format);
            float tie = (float)((value_of((uint8_t)code, format) + value_of((uint8_t)(code + 1), format)) / 2);
            const float around[] = {value, nextafterf(value, 0), nextafterf(value, 1e30f),
                                    tie,   nextafterf(tie, 0),   nextafterf(tie, 1e30f)};
            for (size_t i = 0; i < sizeof around / sizeof *around; i++)
                if (fabsf(around[i]) <= LARGEST[format]) {
                    CHECK(encode_one(around[i], format) == nearest((double)around[i], format));
                    CHECK(encode_one(-around[i], format) == nearest(-(double)around[i], format));
                }
        }
        for (int i = 0; i < 20000; i++) {
            float value = float_of((random_bits() & 0x80ffffffu) | (100u + random_bits() % 44u) << 23);
            if (fabsf(value) <= LARGEST[format])
                CHECK(encode_one(value, format) == nearest((double)value, format));
        }
    }
}

static void what_is_not_finite_is_saturated_kept_or_refused(void)
{
    const float row[] = {INFINITY, -INFINITY, 3.0f, -6.0f};
    viking_quantize_matrix matrix = {row, VIKING_QUANTIZE_FP32, 1, 4};
    const uint8_t expected[3][4] = {{0x7e, 0xfe, 0x76, 0xfe}, {0x7b, 0xfb, 0x77, 0xfb}, {127, 0x81, 64, 0x81}};
    uint8_t codes[4];
    float scale;
    double error;
    for (int f = 0; f < 3; f++) {
        CHECK_OK(viking_quantize_encode(&matrix, (viking_quantize_format)f, 1, codes, &scale, &error));
        CHECK(memcmp(codes, expected[f], 4) == 0);
        CHECK(scale == 6.0f / LARGEST[f]); /* of the finite ones */
        CHECK(error >= 0 && error < 0.01);
    }
    CHECK_OK(viking_quantize_encode(&matrix, VIKING_QUANTIZE_E5M2, 1, codes, NULL, &error));
    CHECK(codes[0] == 0x7b && codes[1] == 0xfb && codes[2] == 0x42 && codes[3] == 0xc6 && error == 0);

    const float nans[] = {1.0f, 2.0f, float_of(0x7fc00000u), float_of(0xff800001u)};
    viking_quantize_matrix two_rows = {nans, VIKING_QUANTIZE_FP32, 2, 2};
    float scales[2];
    size_t row_of_nan;
    for (int f = 0; f < 2; f++) {
        CHECK_OK(viking_quantize_encode(&two_rows, (viking_quantize_format)f, 1, codes, scales, &error));
        CHECK(codes[2] == 0x7f && codes[3] == 0xff && scales[1] == 1.0f);
    }
    CHECK(viking_quantize_encode(&two_rows, VIKING_QUANTIZE_INT8, 1, codes, scales, &error) == VIKING_ERROR_INVALID);
    CHECK(strstr(viking_status_detail(), "row 1") != NULL);
    CHECK_OK(viking_quantize_find_nan(&two_rows, 0, &row_of_nan));
    CHECK(row_of_nan == 1);
    CHECK_OK(viking_quantize_find_nan(&matrix, 0, &row_of_nan));
    CHECK(row_of_nan == 1); /* none: the number of rows */
}

static void rows_of_zeros_and_of_tiny_numbers_have_a_sound_scale(void)
{
    const float rows[] = {0.0f, -0.0f, 0x1p-149f, 0x1p-140f, 0x1p-120f, 0x1p-125f};
    viking_quantize_matrix matrix = {rows, VIKING_QUANTIZE_FP32, 3, 2};
    uint8_t codes[6];
    float scales[3];
    double error;
    for (int f = 0; f < 3; f++) {
        CHECK_OK(viking_quantize_encode(&matrix, (viking_quantize_format)f, 1, codes, scales, &error));
        CHECK(scales[0] == 1.0f && scales[1] == 0x1p-126f && scales[2] >= 0x1p-126f);
        CHECK(codes[0] == 0 && (codes[1] & 0x7f) == 0);
        CHECK(error >= 0 && error <= 2);
    }
    matrix.rows = 0;
    CHECK_OK(viking_quantize_encode(&matrix, VIKING_QUANTIZE_INT8, 0, NULL, scales, &error));
    CHECK(error == 0);
}

static void compare(const void *elements, viking_quantize_element kind, size_t rows, size_t columns)
{
    viking_quantize_matrix matrix = {elements, kind, rows, columns};
    uint8_t *expected = malloc(rows * columns + 1), *actual = malloc(rows * columns + 2);
    float *scales = malloc((rows + 1) * sizeof *scales), *others = malloc((rows + 1) * sizeof *others);
    CHECK(expected && actual && scales && others);
    for (int f = 0; f < 4; f++) { /* the last: e5m2 without scales */
        viking_quantize_format format = f == 3 ? VIKING_QUANTIZE_E5M2 : (viking_quantize_format)f;
        double error = -1, other = -1;
        viking_status status = viking_quantize_encode_by(VIKING_QUANTIZE_SCALAR, &matrix, format, 1, expected,
                                                         f == 3 ? NULL : scales, &error);
        for (unsigned threads = 0; threads <= 3; threads++) {
            memset(actual, 0xab, rows * columns + 2);
            CHECK(viking_quantize_encode(&matrix, format, threads, actual + 1, f == 3 ? NULL : others, &other) ==
                  status);
            if (status != VIKING_OK)
                continue;
            CHECK(memcmp(actual + 1, expected, rows * columns) == 0);
            CHECK(actual[0] == 0xab && actual[rows * columns + 1] == 0xab); /* nothing outside */
            CHECK(memcmp(&error, &other, sizeof error) == 0);
            CHECK(f == 3 || memcmp(scales, others, rows * sizeof *scales) == 0);
        }
    }
    free(expected);
    free(actual);
    free(scales);
    free(others);
}

static void every_implementation_and_thread_count_gives_the_same_bits(void)
{
    if (!viking_quantize_available(VIKING_QUANTIZE_AVX2))
        printf("   (this processor lacks AVX2: not compared)\n");
    const size_t count = (size_t)1 << 20;
    uint16_t *halves = malloc(count * sizeof *halves), *finite = malloc(count * sizeof *finite);
    uint32_t *words = malloc(count * sizeof *words);
    CHECK(halves && finite && words);
    for (size_t i = 0; i < count; i++) {
        halves[i] = (uint16_t)i;
        finite[i] = (uint16_t)((random_bits() & 0x83ffu) | (random_bits() % 31u) << 10);
        words[i] = random_bits();
    }
    const size_t columns[] = {1, 7, 8, 511, 512, 513, 3000, (size_t)1 << 17};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
        size_t rows = (i == 0 ? 70000 : count) / columns[i];
        compare(words, VIKING_QUANTIZE_FP32, rows, columns[i]);
        compare(halves, VIKING_QUANTIZE_BF16, rows, columns[i]);
        compare(halves, VIKING_QUANTIZE_FP16, rows, columns[i]);
        compare(finite, VIKING_QUANTIZE_FP16, rows, columns[i]); /* without NaN, so that int8 has its turn */
    }
    free(halves);
    free(finite);
    free(words);
}

static void every_length_and_alignment_is_right(void)
{
    for (size_t columns = 1; columns <= 40; columns++)
        for (size_t offset = 0; offset < 8; offset += 2) {
            /* A block of exactly this size, so that a sanitizer sees a read beyond its end. */
            unsigned char *exact = malloc(offset + 3 * 4 * columns);
            CHECK(exact);
            for (size_t i = 0; i < offset + 3 * 4 * columns; i++)
                exact[i] = (unsigned char)(random_bits() % 0x7fu);
            for (int kind = 0; kind < 3; kind++)
                if (offset % ELEMENT_BYTES[kind] == 0)
                    compare(exact + offset, (viking_quantize_element)kind, 3, columns);
            free(exact);
        }
}

static void the_way_back_is_the_code_times_the_scale_rounded_once(void)
{
    uint8_t codes[256];
    const float scales[] = {1.0f, 0.0123f, 3.7f, 0x1.8p-9f};
    float wide[256];
    uint16_t half[256], brain[256];
    for (int code = 0; code < 256; code++)
        codes[code] = (uint8_t)code;
    for (int f = 0; f < 3; f++)
        for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
            viking_quantize_format format = (viking_quantize_format)f;
            const float *scale = s == 0 ? NULL : &scales[s];
            CHECK_OK(viking_quantize_decode(codes, scale, format, 1, 256, 1, VIKING_QUANTIZE_FP32, wide));
            CHECK_OK(viking_quantize_decode(codes, scale, format, 1, 256, 1, VIKING_QUANTIZE_FP16, half));
            CHECK_OK(viking_quantize_decode(codes, scale, format, 1, 256, 1, VIKING_QUANTIZE_BF16, brain));
            for (int code = 0; code < 256; code++) {
                float expected = (float)value_of((uint8_t)code, format) * scales[s];
                if (isnan(expected)) {
                    CHECK(isnan(wide[code]) && (half[code] & 0x7fff) > 0x7c00 && (brain[code] & 0x7fff) > 0x7f80);
                    continue;
                }
                CHECK(memcmp(&wide[code], &expected, 4) == 0);
                CHECK(isinf(expected) ||
                      fabsf(float_of((uint32_t)brain[code] << 16) - expected) <= fabsf(expected) * 0x1p-8f);
            }
        }
}

static void the_error_is_that_of_the_matrix(void)
{
    float row[4] = {1.0f, 100.0f, 448.0f, 17.0f}; /* 100 -> 96 or 104, 17 -> 16 or 18: ties, to even */
    viking_quantize_matrix matrix = {row, VIKING_QUANTIZE_FP32, 1, 4};
    uint8_t codes[4];
    float scale, back[4];
    double error, apart = 0, norm = 0;
    CHECK_OK(viking_quantize_encode(&matrix, VIKING_QUANTIZE_E4M3FN, 1, codes, &scale, &error));
    CHECK_OK(viking_quantize_decode(codes, &scale, VIKING_QUANTIZE_E4M3FN, 1, 4, 1, VIKING_QUANTIZE_FP32, back));
    for (int i = 0; i < 4; i++) {
        apart += pow((double)row[i] - (double)back[i], 2);
        norm += pow((double)row[i], 2);
    }
    CHECK(back[1] == 96.0f && back[3] == 16.0f);
    CHECK(fabs(error - sqrt(apart / norm)) < 1e-12);
}

static void what_cannot_be_done_is_refused(void)
{
    uint16_t cells[8] = {0};
    uint8_t codes[8];
    float scales[8];
    double error;
    size_t row;
    viking_quantize_matrix matrix = {cells, VIKING_QUANTIZE_BF16, 2, 4};
    CHECK(viking_quantize_encode(&matrix, VIKING_QUANTIZE_INT8, 1, codes, NULL, &error) == VIKING_ERROR_INVALID);
    CHECK(viking_quantize_encode(&matrix, VIKING_QUANTIZE_E4M3FN, 1, codes, NULL, &error) == VIKING_ERROR_INVALID);
    CHECK(viking_quantize_encode(&matrix, (viking_quantize_format)7, 1, codes, scales, &error) == VIKING_ERROR_INVALID);
    CHECK(viking_quantize_encode_by((viking_quantize_implementation)9, &matrix, VIKING_QUANTIZE_INT8, 1, codes, scales,
                                    &error) == VIKING_ERROR_UNSUPPORTED);
    CHECK(viking_quantize_decode(codes, scales, (viking_quantize_format)7, 2, 4, 1, VIKING_QUANTIZE_BF16, cells) ==
          VIKING_ERROR_INVALID);
    matrix.rows = SIZE_MAX / 8;
    CHECK(viking_quantize_encode(&matrix, VIKING_QUANTIZE_INT8, 1, codes, scales, &error) == VIKING_ERROR_INVALID);
    matrix.kind = (viking_quantize_element)7;
    CHECK(viking_quantize_find_nan(&matrix, 1, &row) == VIKING_ERROR_INVALID);
}

static void bench(void)
{
    const size_t rows = 8192, columns = 4096;
    void *source = NULL, *codes = NULL;
    float *scales = malloc(rows * sizeof *scales);
    CHECK(scales);
    CHECK_OK(viking_os_map(2 * rows * columns, &source));
    CHECK_OK(viking_os_map(rows * columns, &codes));
    for (size_t i = 0; i < rows * columns; i++)
        ((uint16_t *)source)[i] = (uint16_t)(0x3c00u | (random_bits() & 0x83ffu));
    memset(codes, 1, rows * columns);
    viking_quantize_matrix matrix = {source, VIKING_QUANTIZE_BF16, rows, columns};
    for (int f = 0; f < 3; f++)
        for (int by = VIKING_QUANTIZE_SCALAR; by <= VIKING_QUANTIZE_AVX2; by++)
            for (unsigned threads = 0; threads <= 1; threads++) {
                if (!viking_quantize_available((viking_quantize_implementation)by))
                    continue;
                uint64_t best = UINT64_MAX;
                double error = 0;
                for (int round = 0; round < 3; round++) {
                    uint64_t begin = viking_os_clock_ns();
                    CHECK_OK(viking_quantize_encode_by((viking_quantize_implementation)by, &matrix,
                                                       (viking_quantize_format)f, threads, codes, scales, &error));
                    uint64_t took = viking_os_clock_ns() - begin;
                    best = took < best ? took : best;
                }
                printf("bf16 to %-6s %s %s: %.2f GB/s\n", FORMATS[f],
                       by == VIKING_QUANTIZE_SCALAR ? "scalar" : "avx2  ", threads ? "1 thread  " : "all threads",
                       2.0 * (double)(rows * columns) / (double)best);
            }
    viking_os_unmap(source, 2 * rows * columns);
    viking_os_unmap(codes, rows * columns);
    free(scales);
}

int main(int argument_count, char **arguments)
{
    if (argument_count > 1 && strcmp(arguments[1], "bench") == 0) {
        bench();
        return 0;
    }
    RUN(a_code_is_the_nearest_ties_to_even);
    RUN(what_is_not_finite_is_saturated_kept_or_refused);
    RUN(rows_of_zeros_and_of_tiny_numbers_have_a_sound_scale);
    RUN(every_implementation_and_thread_count_gives_the_same_bits);
    RUN(every_length_and_alignment_is_right);
    RUN(the_way_back_is_the_code_times_the_scale_rounded_once);
    RUN(the_error_is_that_of_the_matrix);
    RUN(what_cannot_be_done_is_refused);
    return 0;
}
