// 8-bit codes to fp32, fp16 or bf16: out[i] = round(float(code[i]) * scale[row of i]), for compilation at run time.
//
// A thread takes eight codes at a time: one load of 8 bytes and, into 16-bit types, one store of 16, so that what a warp
// reads and writes is contiguous either way; it takes two such chunks, a block apart, whose loads are on their way
// together.
// Codes lie on 8 bytes, the output on 16, and there are at most 2^31 of them. No header is included, and what is not
// known beyond CUDA is kept apart, so that the tests can compile this file for the host as well.

struct alignas(8) Codes {
    unsigned word[2];
};

struct alignas(16) Packed {
    unsigned word[4];
};

__device__ inline float float_of(unsigned bits)
{
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    return host_float_of(bits);
#endif
}

// ---- what a code stands for ----
// An 8-bit float, shifted into the place of an fp32, is that number but for the exponent's bias, which a product mends:
// exactly, and for subnormal codes too.

struct E4m3fn {
    static __device__ inline float value(unsigned code)
    {
        unsigned magnitude = code & 0x7fu;
        float value = float_of((code & 0x80u) << 24 | magnitude << 20) * float_of(0x7b800000u); // 2^120
        return magnitude == 0x7fu ? float_of(0x7fc00000u) : value;
    }
};

struct E5m2 {
    static __device__ inline float value(unsigned code)
    {
        unsigned magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
        float value = float_of(sign | magnitude << 21) * float_of(0x77800000u); // 2^112
        return magnitude < 0x7cu ? value : float_of(sign | 0x7f800000u | (magnitude & 3u) << 21);
    }
};

struct Int8 {
    static __device__ inline float value(unsigned code) { return (float)(signed char)code; }
};

// ---- rounding, to nearest with ties to even ----

struct Bf16 {
    unsigned short bits;

    static __device__ inline unsigned round_pair(float low, float high)
    {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
        unsigned pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return round(low) | round(high) << 16;
#endif
    }

    static __device__ inline unsigned round(float value)
    {
#ifdef __CUDA_ARCH__
        unsigned bits = __float_as_uint(value);
#else
        unsigned bits = host_bits_of(value);
#endif
        return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    }
};

struct Fp16 {
    unsigned short bits;

    static __device__ inline unsigned round_pair(float low, float high) { return round(low) | round(high) << 16; }

    static __device__ inline unsigned round(float value)
    {
#ifdef __CUDA_ARCH__
        unsigned short half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
        return half;
#else
        return host_round_to_fp16(value);
#endif
    }
};

template <typename Out> __device__ inline void store_one(Out *out, float value)
{
    out->bits = (unsigned short)Out::round(value);
}

__device__ inline void store_one(float *out, float value)
{
    *out = value;
}

template <typename Out> __device__ inline void store_eight(Out *out, const float *values)
{
    Packed packed;
    for (int pair = 0; pair < 4; pair++)
        packed.word[pair] = Out::round_pair(values[2 * pair], values[2 * pair + 1]);
    *reinterpret_cast<Packed *>(out) = packed;
}

__device__ inline void store_eight(float *out, const float *values)
{
    struct alignas(16) Four {
        float value[4];
    };
    for (int half = 0; half < 2; half++) {
        Four four;
        for (int i = 0; i < 4; i++)
            four.value[i] = values[4 * half + i];
        reinterpret_cast<Four *>(out)[half] = four;
    }
}

// ---- the kernels ----

// The end of a row, or of everything: up to eight elements, one by one.
template <typename Format, typename Out>
__device__ inline void dequantize_end(const unsigned char *codes, const float *scales, Out *out, unsigned first,
                                      unsigned count, unsigned columns, unsigned row, unsigned column)
{
    for (unsigned i = first; i < first + 8 && i < count; i++) {
        if (column == columns) {
            column = 0;
            row++;
        }
        store_one(out + i, Format::value(codes[i]) * (scales ? scales[row] : 1.0f));
        column++;
    }
}

template <typename Format, typename Out>
__device__ inline void dequantize(const unsigned char *codes, const float *scales, Out *out, unsigned count,
                                  unsigned columns)
{
    unsigned first[2], row[2], column[2];
    float scale[2];
    Codes packed[2];
    bool whole[2];
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        first[turn] = 8 * ((2 * blockIdx.x + turn) * blockDim.x + threadIdx.x);
        row[turn] = first[turn] / columns;
        column[turn] = first[turn] - row[turn] * columns;
        whole[turn] = first[turn] < count && column[turn] + 8 <= columns;
        if (whole[turn]) {
            packed[turn] = *reinterpret_cast<const Codes *>(codes + first[turn]);
            scale[turn] = scales ? scales[row[turn]] : 1.0f;
        }
    }
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
        if (!whole[turn]) {
            dequantize_end<Format>(codes, scales, out, first[turn], count, columns, row[turn], column[turn]);
            continue;
        }
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            values[i] = Format::value(packed[turn].word[i / 4] >> 8 * (i % 4) & 0xffu) * scale[turn];
        store_eight(out + first[turn], values);
    }
}

// A block is for 16 * blockDim.x elements.
#define DEQUANTIZE(name, Format, Out)                                                                                  \
    extern "C" __global__ void name(const unsigned char *codes, const float *scales, Out *out, unsigned count,         \
                                    unsigned columns)                                                                  \
    {                                                                                                                  \
        dequantize<Format>(codes, scales, out, count, columns);                                                        \
    }

DEQUANTIZE(viking_e4m3fn_to_float32, E4m3fn, float)
DEQUANTIZE(viking_e4m3fn_to_float16, E4m3fn, Fp16)
DEQUANTIZE(viking_e4m3fn_to_bfloat16, E4m3fn, Bf16)
DEQUANTIZE(viking_e5m2_to_float32, E5m2, float)
DEQUANTIZE(viking_e5m2_to_float16, E5m2, Fp16)
DEQUANTIZE(viking_e5m2_to_bfloat16, E5m2, Bf16)
DEQUANTIZE(viking_int8_to_float32, Int8, float)
DEQUANTIZE(viking_int8_to_float16, Int8, Fp16)
DEQUANTIZE(viking_int8_to_bfloat16, Int8, Bf16)
