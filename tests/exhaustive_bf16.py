"""All 2^32 fp32 patterns through force_to_bf16, compared with torch bit for bit: `python tests/exhaustive_bf16.py`.

Takes one to two minutes, so the test suite has the edges and a sample instead. Exits with 1 at the first difference.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from viking import _engine

BLOCK = 1 << 24


def main() -> int:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        print("torch runs its scalar code here, which writes other NaN bits than its vector code: nothing to compare")
        return 1
    for high in range(1 << 8):
        patterns = (torch.arange(BLOCK, dtype=torch.int64) + high * BLOCK).to(torch.int32)
        source = patterns.view(torch.float32)
        holder = nn.ParameterList([nn.Parameter(source)])
        _engine.force_to_bf16(holder)
        ours, theirs = holder[0].detach().view(torch.int16), source.to(torch.bfloat16).view(torch.int16)
        if not torch.equal(ours, theirs):
            first = int((ours != theirs).nonzero()[0])
            print(
                f"{patterns[first].item() & 0xFFFFFFFF:#010x}: {ours[first].item() & 0xFFFF:#06x}, "
                f"torch says {theirs[first].item() & 0xFFFF:#06x}"
            )
            return 1
        print(f"\r{(high + 1) * BLOCK:,} of {1 << 32:,} patterns equal", end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
