"""The command line of `python -m viking.doctor`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from viking.doctor.survey import Section, survey
from viking.units import format_bytes


def _bytes(section: Section, key: str) -> str:
    value: Any = section.get(key)
    return "unknown" if value is None else format_bytes(value)


def _torch(section: Section) -> list[str]:
    if section.get("version") is None:
        return []
    build = f"CUDA {section['cuda']}" if section["cuda"] else f"ROCm {section['hip']}" if section["hip"] else "CPU only"
    access = "exchange API" if section["exchange_api"] else "no exchange API (2.10 and later have it), pointers instead"
    return [f"{section['version']} ({build}), {access}", section["path"]]


def _cuda(section: Section) -> list[str]:
    lines = []
    if section.get("library"):
        lines.append(f"runtime {section['runtime']} from {section['library']}")
        serves = section["driver_serves"]
        lines.append(f"driver {section['driver'] or ''} serves CUDA {serves}" if serves else "no driver")
    lines += [
        f"{index}: {each['name']} (sm_{each['capability'].replace('.', '')}), "
        f"{format_bytes(each['free_bytes'])} of {format_bytes(each['total_bytes'])} free"
        for index, each in enumerate(section.get("devices", ()))
    ]
    return lines


def _memory(section: Section) -> list[str]:
    lines = [
        f"{_bytes(section, 'available_bytes')} of {_bytes(section, 'total_bytes')} available, "
        f"{_bytes(section, 'swap_bytes')} swap"
    ]
    if section.get("cgroup_limit_bytes") is not None:
        lines.append(f"limited to {_bytes(section, 'cgroup_limit_bytes')} by a control group (a container)")
    if section.get("memlock_bytes") is not None:
        lines.append(f"memlock {_bytes(section, 'memlock_bytes')} (CUDA's pinning does not count against it)")
    return lines


def _patches(section: Section) -> list[str]:
    if section.get("root") is None:
        return []
    version = f" (version {section['version']})" if section.get("version") else ""
    lines = [f"{'patched' if section['patched'] else 'not patched'}: {section['root']}{version}"]
    for name, state in section["patches"].items():
        detail = section["details"].get(name)
        lines.append(f"{name}: {state}" + (f": {detail}" if detail else ""))
    return lines


def as_text(found: dict[str, Section]) -> str:
    """The survey as a person wants it."""

    def get(name: str, *keys: str) -> list[str]:
        return [str(found[name][key]) for key in keys if found[name].get(key) is not None]

    blocks: list[tuple[str, str, list[str]]] = [
        ("Viking", "viking", [" ".join(get("viking", "version")), *get("viking", "engine")]),
        ("Python", "python", [" on ".join(get("python", "version", "system")), *get("python", "executable")]),
        ("torch", "torch", _torch(found["torch"])),
        ("CUDA", "cuda", _cuda(found["cuda"])),
        ("processor", "processor", [*get("processor", "name")]),
        ("memory", "memory", _memory(found["memory"])),
        ("ai-toolkit", "ai_toolkit", _patches(found["ai_toolkit"])),
        ("torch patches", "torch_patches", _patches(found["torch_patches"])),
    ]
    if "convert" in found["processor"]:
        usable = found["processor"].get("usable")
        blocks[4][2].append(f"{usable} usable, converts by {found['processor']['convert']}")
    if found["python"].get("wsl"):
        blocks[5][2].append("WSL: the driver lets little memory be pinned; what does not fit is staged")
    lines = []
    for title, name, texts in blocks:
        problem = found[name].get("problem")
        texts = [text for text in texts if text] + ([f"! {problem}"] if problem else [])
        for index, text in enumerate(texts):
            lines.append(f"{title if index == 0 else '':14} {text}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 whatever it finds."""
    parser = argparse.ArgumentParser(
        prog="python -m viking.doctor", description="What Viking finds on this machine, and what is missing."
    )
    parser.add_argument("--root", metavar="DIR", help="an ai-toolkit checkout (default: the current directory)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    found = survey(options.root)
    text = json.dumps(found, indent=2) if options.json else as_text(found)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding))
    return 0
