"""python -m viking.adapters.ai_toolkit.bake LORA.safetensors OUT.safetensors

For programs that refuse or ignore `.alpha` beside lora_A and lora_B (diffusers' FLUX.2 loader does the former): writes
the same LoRA with the strength multiplied into lora_B. Exact where alpha / rank is a power of two, else rounded once in
the file's dtype. The metadata is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from viking.adapters.ai_toolkit.alpha import bake


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: written; 1: the file cannot be read or written; 2: usage."""
    paths = list(sys.argv[1:] if arguments is None else arguments)
    if len(paths) != 2 or paths[0].startswith("-"):
        print((__doc__ or "").strip(), file=sys.stderr)
        return 2
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        print("bake reads safetensors files: pip install safetensors", file=sys.stderr)
        return 1
    try:
        with safe_open(paths[0], framework="pt") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
        count = sum(key.endswith(".alpha") for key in tensors)
        save_file({key: tensor.contiguous() for key, tensor in bake(tensors).items()}, paths[1], metadata)
    except Exception as error:
        print(f"bake: {error}", file=sys.stderr)
        return 1
    print(f"{paths[1]}: {count} strengths baked into lora_B")
    return 0


if __name__ == "__main__":
    sys.exit(main())
