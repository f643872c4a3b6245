// The device kernels of viking/quant/dequantize.cu, compiled for the host: a launch is a loop over blocks and threads.
#include <cstdint>
#include <cstring>

#include "core/half.h"

#define __device__
#define __global__

struct Dimension {
    unsigned x;
};

static Dimension blockIdx, blockDim, threadIdx;

static float host_float_of(unsigned bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static unsigned host_bits_of(float value)
{
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static unsigned host_round_to_fp16(float value)
{
    return viking_half_round_to_fp16(host_bits_of(value));
}

#include "dequantize.cu"

extern "C" void launch(void (*kernel)(const unsigned char *, const float *, void *, unsigned, unsigned),
                       unsigned blocks, unsigned threads, const unsigned char *codes, const float *scales, void *out,
                       unsigned count, unsigned columns)
{
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            kernel(codes, scales, out, count, columns);
}
