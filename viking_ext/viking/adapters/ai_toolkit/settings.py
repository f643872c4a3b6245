"""What the user has set: environment variables first, then the job's config.

The toolkit's NetworkConfig drops keys that it does not know, and does not say which ones were given and which are
defaults. A patched one keeps what matters here in `viking`, a dict of the alpha keys and of those that begin with
`viking_`.
"""

from __future__ import annotations

import os
from typing import Any

OFF = ("off", "0", "no", "never", "false")
MODES = ("auto", "always", "never")
ALPHA_FORMATS = ("file", "baked")


def active() -> bool:
    """Whether Viking takes part at all."""
    return os.environ.get("VIKING", "").strip().lower() not in OFF


def given(network_config: Any) -> dict[str, Any] | None:
    """The alpha and viking keys that stand in the config; None where an unpatched NetworkConfig did not keep them."""
    kept = getattr(network_config, "viking", None)
    return kept if isinstance(kept, dict) else None


def _setting(network_config: Any, key: str, default: Any) -> Any:
    return (given(network_config) or {}).get(key, default)


def bf16_mode(network_config: Any) -> tuple[str, str]:
    """(mode, where it comes from) of VIKING_BF16 or `network.viking_bf16`; raises ValueError for another word."""
    environment = os.environ.get("VIKING_BF16", "").strip().lower()
    value, source = (
        (environment, "VIKING_BF16") if environment else (_setting(network_config, "viking_bf16", "auto"), "")
    )
    if not source and value != "auto":
        source = "network.viking_bf16"
    if isinstance(value, bool):
        value = "always" if value else "never"
    if value not in MODES:
        raise ValueError(f"{source} is {value!r}: it takes {', '.join(MODES)}")
    return value, source


def rank_stabilized(network_config: Any) -> bool:
    """`network.viking_rank_stabilized`: scale by alpha / sqrt(rank)."""
    return bool(_setting(network_config, "viking_rank_stabilized", False))


def alpha_format(network_config: Any) -> str:
    """`network.viking_alpha`: how the strength gets into a file, "file" (as `.alpha`) or "baked" (into lora_B)."""
    value: str = _setting(network_config, "viking_alpha", "file")
    if value not in ALPHA_FORMATS:
        raise ValueError(f"network.viking_alpha is {value!r}: it takes {', '.join(ALPHA_FORMATS)}")
    return value
