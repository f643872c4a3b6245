"""`python -m viking.bench`: how close a step comes to what the hardware can do, measured on your machine.

The transformer has the shape of FLUX.2-dev (hidden 6144, 48 heads, 8 double-stream and 48 single-stream blocks) with
random weights, a LoRA on every linear of its blocks, checkpointing per block, and 1024 image and 512 text tokens.
"""
