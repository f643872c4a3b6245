/* Quantising, one element at a time: the oracle.
 *
 * Normal codes are rounded as bf16 is, by integer arithmetic on the bits: add just under half a unit of the last place
 * that stays, plus one if that place is odd, and cut. For subnormal ones the processor's own addition rounds: to a
 * number whose last place is their step. */
#include <string.h>

#include "half.h"
#include "quantize_kernels.h"

const viking_quantize_float8 viking_quantize_e4m3fn = {20, 120u << 3, 0x43e00000u, 0x3c800000u, 0x1p14f};
const viking_quantize_float8 viking_quantize_e5m2 = {21, 112u << 2, 0x47600000u, 0x38800000u, 0x1p7f};

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void widen(float *out, const void *source, viking_quantize_element kind, size_t count)
{
    const unsigned char *bytes = source;
    if (kind == VIKING_QUANTIZE_FP32) {
        memcpy(out, source, 4 * count);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, bytes + 2 * i, sizeof half);
        out[i] = float_of(kind == VIKING_QUANTIZE_FP16 ? viking_half_widen_fp16(half) : (uint32_t)half << 16);
    }
}

static uint32_t amax(const float *block, size_t count, uint32_t largest, bool *nan)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t magnitude = bits_of(block[i]) & 0x7fffffffu;
        if (magnitude > 0x7f800000u)
            *nan = true;
        else if (magnitude < 0x7f800000u && magnitude > largest)
            largest = magnitude;
    }
    return largest;
}

static void add_error(viking_quantize_sums *sums, size_t lane, float x, float back)
{
    if ((bits_of(x) & 0x7fffffffu) >= 0x7f800000u)
        return;
    double error = (double)x - (double)back;
    sums->error[lane] += error * error;
    sums->norm[lane] += (double)x * (double)x;
}

static void encode_float8(uint8_t *codes, const float *block, size_t count, const viking_quantize_float8 *format,
                          float scale, viking_quantize_sums *sums)
{
    uint32_t shift = format->shift, below_half = (1u << (shift - 1)) - 1u;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(block[i] / scale), magnitude = bits & 0x7fffffffu;
        uint32_t sign = bits & 0x80000000u, code, value;
        if (magnitude > 0x7f800000u) {
            codes[i] = (uint8_t)(sign >> 24 | 0x7fu);
            continue;
        }
        if (magnitude > format->largest)
            magnitude = format->largest;
        if (magnitude < format->smallest_normal) {
            float on_grid = float_of(magnitude) + format->grid;
            code = bits_of(on_grid) - bits_of(format->grid);
            value = bits_of(on_grid - format->grid);
        } else {
            uint32_t kept = (magnitude + below_half + (magnitude >> shift & 1u)) >> shift;
            code = kept - format->rebias;
            value = kept << shift;
        }
        codes[i] = (uint8_t)(sign >> 24 | code);
        add_error(sums, i % VIKING_QUANTIZE_LANES, block[i], float_of(sign | value) * scale);
    }
}

static void encode_int8(uint8_t *codes, const float *block, size_t count, float scale, viking_quantize_sums *sums)
{
    for (size_t i = 0; i < count; i++) {
        float y = block[i] / scale;
        y = y > VIKING_QUANTIZE_INT8_LARGEST ? VIKING_QUANTIZE_INT8_LARGEST : y;
        y = y < -VIKING_QUANTIZE_INT8_LARGEST ? -VIKING_QUANTIZE_INT8_LARGEST : y;
        float whole = y + VIKING_QUANTIZE_WHOLE;
        codes[i] = (uint8_t)bits_of(whole);
        add_error(sums, i % VIKING_QUANTIZE_LANES, block[i], (whole - VIKING_QUANTIZE_WHOLE) * scale);
    }
}

const viking_quantize_kernels viking_quantize_scalar = {widen, amax, encode_float8, encode_int8};
