"""`python -m viking.bench`: how close a step comes to what the hardware can do, measured on your machine.

The models have the shapes of ones that people train (FLUX.1, FLUX.2, SDXL, Wan 14B), with random weights, a LoRA on
every linear of their blocks, and checkpointing per block. Link bandwidth and the compute time of each sweep are
measured in the same run as all the rest, so the ratio to T1, which no executor can beat, does not depend on the day.
With --link, T1 is that of the slower link. In 8 bit, resident and streamed weights alike are dequantised at every use.

    python -m viking.bench flux2 --vram 24GiB --verify                     one model, one cap
    python -m viking.bench flux2 --depth 1/4 --weights-budget 8GiB 4GiB    the weights' budget alone
    python -m viking.bench flux2 --vram 16GiB --engine viking --engine ai-toolkit:PATH --engine musubi:PATH@0.6,2
    python -m viking.bench flux2 --vram 24GiB --weights float8_e4m3fn      frozen weights in 8 bit
    python -m viking.bench flux2 --vram 24GiB --link 25GB/s                copies paced to a slower card's link
    python -m viking.bench all --quick                                     a table of all models, a few blocks of each
    python -m viking.bench overhead                                        host time of 200 small linears
"""
