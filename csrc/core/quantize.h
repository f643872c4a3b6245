/* Weights in 8 bit: rows of fp32, fp16 or bf16 to float8_e4m3fn, float8_e5m2 or int8 and back.
 *
 * code = round(clamp(x / scale)), to nearest with ties to even; x' = code * scale in fp32, rounded once to the type that
 * the reader computes in. The scale of a row is its largest finite magnitude over the largest code (448, 57344, 127), so
 * that each row uses the whole range; a row of zeros has the scale 1. Without scales (e5m2, whose range is wide enough)
 * it is 1 throughout.
 *
 *           NaN              infinity
 *   e4m3fn  0x7f, sign kept  the largest finite code
 *   e5m2    0x7f, sign kept  the largest finite code, although the format has one: a product with it is NaN sooner or
 *                            later, and which weights were clipped is what relative_error tells
 *   int8    refused          the largest code; -128 is never made
 *
 * The codes are those of torch's `.to(dtype)` of the same quotient, clamped. All implementations and any number of
 * threads give the same bits, those of the error included; the scalar code is the oracle.
 */
#ifndef VIKING_CORE_QUANTIZE_H
#define VIKING_CORE_QUANTIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/status.h"

typedef enum viking_quantize_format {
    VIKING_QUANTIZE_E4M3FN,
    VIKING_QUANTIZE_E5M2,
    VIKING_QUANTIZE_INT8
} viking_quantize_format;

typedef enum viking_quantize_element {
    VIKING_QUANTIZE_FP32,
    VIKING_QUANTIZE_FP16,
    VIKING_QUANTIZE_BF16
} viking_quantize_element;

typedef enum viking_quantize_implementation {
    VIKING_QUANTIZE_AUTO, /* the fastest that this processor runs */
    VIKING_QUANTIZE_SCALAR,
    VIKING_QUANTIZE_AVX2 /* AVX2 and F16C */
} viking_quantize_implementation;

/* rows x columns elements in row-major order, on no alignment beyond the element's. */
typedef struct viking_quantize_matrix {
    const void *elements;
    viking_quantize_element kind;
    size_t rows;
    size_t columns;
} viking_quantize_matrix;

/* Whether this processor runs the implementation. */
bool viking_quantize_available(viking_quantize_implementation implementation);

/* The first row that holds a NaN; `rows` if none does. At most `threads` threads (0: as viking_parallel_for chooses). */
viking_status viking_quantize_find_nan(const viking_quantize_matrix *source, unsigned threads, size_t *out_row);

/* Quantise a matrix. `codes` takes rows * columns bytes, `scales` one fp32 a row (NULL: none, e5m2 only).
 * `out_relative_error`: the Frobenius norm of x - code * scale (in fp32, before it is rounded to a reader's type) over
 * that of x, of the finite elements; 0 where all are zero. INVALID for a NaN where the format is int8: the detail names
 * the first row; codes and scales are undefined then. Nothing may overlap. */
viking_status viking_quantize_encode(const viking_quantize_matrix *source, viking_quantize_format format,
                                     unsigned threads, uint8_t *codes, float *scales, double *out_relative_error);

/* The same by a given implementation; UNSUPPORTED where the processor lacks it. */
viking_status viking_quantize_encode_by(viking_quantize_implementation implementation,
                                        const viking_quantize_matrix *source, viking_quantize_format format,
                                        unsigned threads, uint8_t *codes, float *scales, double *out_relative_error);

/* The way back: `destination` takes rows * columns elements of `kind`. `scales` NULL: all 1. A NaN stays a NaN, of which
 * bits is not said. */
viking_status viking_quantize_decode(const uint8_t *codes, const float *scales, viking_quantize_format format,
                                     size_t rows, size_t columns, unsigned threads, viking_quantize_element kind,
                                     void *destination);

#endif
