/* Quantising: which rows go to which thread, and what is added up. The arithmetic is in quantize_scalar.c and its
 * siblings.
 *
 * A row is read twice, for its largest magnitude and for its codes; the second time from the cache. Rows keep their sums
 * apart until all are done and are then added in order, so that the error does not depend on who did what. */
#include "quantize.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/parallel.h"
#include "half.h"
#include "quantize_kernels.h"

#if VIKING_QUANTIZE_X86
#include <cpuid.h>
#endif

#define GRAIN_ELEMENTS ((size_t)1 << 16)

static const float LARGEST[] = {448.0f, 57344.0f, VIKING_QUANTIZE_INT8_LARGEST}; /* by format */

#if VIKING_QUANTIZE_X86
static bool has_f16c(void)
{
    unsigned eax, ebx, ecx = 0, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

bool viking_quantize_available(viking_quantize_implementation implementation)
{
    switch (implementation) {
    case VIKING_QUANTIZE_AUTO:
    case VIKING_QUANTIZE_SCALAR:
        return true;
    case VIKING_QUANTIZE_AVX2:
#if VIKING_QUANTIZE_X86
        return __builtin_cpu_supports("avx2") && has_f16c();
#else
        return false;
#endif
    }
    return false;
}

static const viking_quantize_kernels *kernels_of(viking_quantize_implementation implementation)
{
#if VIKING_QUANTIZE_X86
    if (implementation != VIKING_QUANTIZE_SCALAR && viking_quantize_available(VIKING_QUANTIZE_AVX2))
        return &viking_quantize_avx2;
#else
    (void)implementation;
#endif
    return &viking_quantize_scalar;
}

static size_t bytes_of(viking_quantize_element kind)
{
    return kind == VIKING_QUANTIZE_FP32 ? 4 : 2;
}

static size_t grain_rows(size_t columns)
{
    return columns >= GRAIN_ELEMENTS || columns == 0 ? 1 : GRAIN_ELEMENTS / columns;
}

static viking_status check_sizes(viking_quantize_element kind, size_t rows, size_t columns)
{
    if (kind != VIKING_QUANTIZE_FP32 && kind != VIKING_QUANTIZE_FP16 && kind != VIKING_QUANTIZE_BF16)
        return viking_status_fail(VIKING_ERROR_INVALID, "unknown kind of element %d beside 8-bit weights", (int)kind);
    if (columns && rows > SIZE_MAX / 4 / columns)
        return viking_status_fail(VIKING_ERROR_INVALID, "%zu x %zu elements do not fit in memory", rows, columns);
    return VIKING_OK;
}

/* ---- encode ---- */

typedef struct row_result {
    double error;
    double norm;
    bool nan;
} row_result;

typedef struct encode_job {
    const viking_quantize_kernels *kernels;
    const viking_quantize_matrix *source;
    viking_quantize_format format;
    uint8_t *codes; /* NULL: only look for NaN */
    float *scales;
    row_result *results;
} encode_job;

typedef struct blocks {
    const encode_job *job;
    const unsigned char *row;
    size_t done;
    float block[VIKING_QUANTIZE_BLOCK];
} blocks;

/* The next elements of a row, as fp32; 0 at its end. */
static size_t next_block(blocks *at)
{
    const viking_quantize_matrix *source = at->job->source;
    size_t left = source->columns - at->done, count = left < VIKING_QUANTIZE_BLOCK ? left : VIKING_QUANTIZE_BLOCK;
    if (count)
        at->job->kernels->widen(at->block, at->row + at->done * bytes_of(source->kind), source->kind, count);
    at->done += count;
    return count;
}

static void encode_row(const encode_job *job, size_t row)
{
    const viking_quantize_kernels *kernels = job->kernels;
    size_t columns = job->source->columns, count;
    blocks at = {.job = job,
                 .row = (const unsigned char *)job->source->elements + row * columns * bytes_of(job->source->kind)};
    row_result *result = &job->results[row];
    float scale = 1.0f;
    if (job->scales || job->format == VIKING_QUANTIZE_INT8 || !job->codes) {
        uint32_t bits = 0;
        float amax;
        while ((count = next_block(&at)) != 0)
            bits = kernels->amax(at.block, count, bits, &result->nan);
        memcpy(&amax, &bits, sizeof amax);
        scale = amax / LARGEST[job->format];
        if (scale < FLT_MIN) /* a subnormal scale has few digits, and a processor may take it for zero */
            scale = amax > 0 ? FLT_MIN : 1.0f;
    }
    if (!job->codes || (job->format == VIKING_QUANTIZE_INT8 && result->nan))
        return;
    if (job->scales)
        job->scales[row] = scale;

    viking_quantize_sums sums = {{0}, {0}};
    uint8_t *codes = job->codes + row * columns;
    at.done = 0;
    while ((count = next_block(&at)) != 0) {
        if (job->format == VIKING_QUANTIZE_INT8)
            kernels->encode_int8(codes, at.block, count, scale, &sums);
        else
            kernels->encode_float8(
                codes, at.block, count,
                job->format == VIKING_QUANTIZE_E4M3FN ? &viking_quantize_e4m3fn : &viking_quantize_e5m2, scale, &sums);
        codes += count;
    }
    for (int lane = 0; lane < VIKING_QUANTIZE_LANES; lane++) {
        result->error += sums.error[lane];
        result->norm += sums.norm[lane];
    }
}

static void encode_range(void *context, size_t begin, size_t end)
{
    for (size_t row = begin; row < end; row++)
        encode_row(context, row);
}

/* Run the job over all rows and add up; *out_nan is the first row with a NaN that was looked for, else `rows`. */
static viking_status run(encode_job *job, unsigned threads, size_t *out_nan, double *out_relative_error)
{
    size_t rows = job->source->rows;
    job->results = calloc(rows ? rows : 1, sizeof *job->results);
    if (!job->results)
        return viking_status_fail(VIKING_ERROR_NO_HOST_MEMORY, "no memory for the sums of %zu rows", rows);
    viking_parallel_for(rows, grain_rows(job->source->columns), threads, encode_range, job);
    double error = 0, norm = 0;
    *out_nan = rows;
    for (size_t row = 0; row < rows; row++) {
        error += job->results[row].error;
        norm += job->results[row].norm;
        if (job->results[row].nan && *out_nan == rows)
            *out_nan = row;
    }
    free(job->results);
    *out_relative_error = norm > 0 ? sqrt(error / norm) : 0;
    return VIKING_OK;
}

viking_status viking_quantize_find_nan(const viking_quantize_matrix *source, unsigned threads, size_t *out_row)
{
    viking_status status = check_sizes(source->kind, source->rows, source->columns);
    if (status != VIKING_OK)
        return status;
    double unused;
    encode_job job = {.kernels = kernels_of(VIKING_QUANTIZE_AUTO), .source = source};
    return run(&job, threads, out_row, &unused);
}

viking_status viking_quantize_encode_by(viking_quantize_implementation implementation,
                                        const viking_quantize_matrix *source, viking_quantize_format format,
                                        unsigned threads, uint8_t *codes, float *scales, double *out_relative_error)
{
    if (!viking_quantize_available(implementation))
        return viking_status_fail(VIKING_ERROR_UNSUPPORTED,
                                  "this processor does not run implementation %d of quantising", (int)implementation);
    if (format != VIKING_QUANTIZE_E4M3FN && format != VIKING_QUANTIZE_E5M2 && format != VIKING_QUANTIZE_INT8)
        return viking_status_fail(VIKING_ERROR_INVALID, "unknown 8-bit format %d", (int)format);
    if (!scales && format != VIKING_QUANTIZE_E5M2)
        return viking_status_fail(VIKING_ERROR_INVALID, "this 8-bit format needs a scale for each row");
    viking_status status = check_sizes(source->kind, source->rows, source->columns);
    if (status != VIKING_OK)
        return status;
    encode_job job = {
        .kernels = kernels_of(implementation), .source = source, .format = format, .codes = codes, .scales = scales};
    size_t nan = source->rows; /* none */
    status = run(&job, threads, &nan, out_relative_error);
    if (status == VIKING_OK && format == VIKING_QUANTIZE_INT8 && nan < source->rows)
        return viking_status_fail(VIKING_ERROR_INVALID, "row %zu holds a NaN, which int8 has no code for", nan);
    return status;
}

viking_status viking_quantize_encode(const viking_quantize_matrix *source, viking_quantize_format format,
                                     unsigned threads, uint8_t *codes, float *scales, double *out_relative_error)
{
    return viking_quantize_encode_by(VIKING_QUANTIZE_AUTO, source, format, threads, codes, scales, out_relative_error);
}

/* ---- decode ---- */

typedef struct decode_job {
    const uint8_t *codes;
    const float *scales;
    float values[256];
    size_t columns;
    viking_quantize_element kind;
    void *destination;
} decode_job;

/* The fp32 of an 8-bit float, whose bits are those of fp16's upper byte (e5m2) or, without infinities, of e4m3fn. */
static float value_of(uint8_t code, viking_quantize_format format)
{
    uint32_t bits, sign = (uint32_t)(code & 0x80u), magnitude = code & 0x7fu;
    float value;
    if (format == VIKING_QUANTIZE_INT8)
        return (float)(code < 128 ? (int)code : (int)code - 256);
    if (format == VIKING_QUANTIZE_E5M2)
        bits = viking_half_widen_fp16((uint16_t)(code << 8));
    else if (magnitude == 0x7f)
        bits = sign << 24 | 0x7fc00000u;
    else { /* fp16 with the exponent's bias in another place: times 2^(15 - 7) */
        bits = viking_half_widen_fp16((uint16_t)(sign << 8 | magnitude << 7));
        memcpy(&value, &bits, sizeof value);
        return value * 256.0f;
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void decode_range(void *context, size_t begin, size_t end)
{
    const decode_job *job = context;
    for (size_t row = begin; row < end; row++) {
        const uint8_t *codes = job->codes + row * job->columns;
        float scale = job->scales ? job->scales[row] : 1.0f;
        float *wide = (float *)job->destination + row * job->columns;
        uint16_t *half = (uint16_t *)job->destination + row * job->columns;
        for (size_t i = 0; i < job->columns; i++) {
            float value = job->values[codes[i]] * scale;
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            if (job->kind == VIKING_QUANTIZE_FP32)
                wide[i] = value;
            else if (job->kind == VIKING_QUANTIZE_FP16)
                half[i] = viking_half_round_to_fp16(bits);
            else
                half[i] = value != value ? (uint16_t)0x7fc0 : viking_half_round_to_bf16(bits);
        }
    }
}

viking_status viking_quantize_decode(const uint8_t *codes, const float *scales, viking_quantize_format format,
                                     size_t rows, size_t columns, unsigned threads, viking_quantize_element kind,
                                     void *destination)
{
    if (format != VIKING_QUANTIZE_E4M3FN && format != VIKING_QUANTIZE_E5M2 && format != VIKING_QUANTIZE_INT8)
        return viking_status_fail(VIKING_ERROR_INVALID, "unknown 8-bit format %d", (int)format);
    viking_status status = check_sizes(kind, rows, columns);
    if (status != VIKING_OK)
        return status;
    decode_job job = {.codes = codes, .scales = scales, .columns = columns, .kind = kind, .destination = destination};
    for (int code = 0; code < 256; code++)
        job.values[code] = value_of((uint8_t)code, format);
    viking_parallel_for(rows, grain_rows(columns), threads, decode_range, &job);
    return VIKING_OK;
}
