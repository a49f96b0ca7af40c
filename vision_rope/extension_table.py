"""Which method of context extension means something for which preset, and why not where it does not."""

from __future__ import annotations

from dataclasses import dataclass

from vision_rope.extension import EXTENSIONS, reason_against
from vision_rope.rope_presets import PRESETS, preset

COMMAND = "vision-rope presets --extend"


@dataclass(frozen=True)
class Pair:
    """A preset and a method; `reason` says why the method means nothing for the preset, None where it does."""

    preset: str
    method: str
    reason: str | None


def extension_table() -> list[Pair]:
    """Every preset with every method of extension, in the order of the tables PRESETS and EXTENSIONS.

    Presets are those with their default options.
    """
    pairs: list[Pair] = []
    for name in PRESETS:
        rope = preset(name)
        kind = {"has_ladder": rope.ladders is not None, "bounded": rope.coordinates.bounded}
        pairs.extend(Pair(name, method, reason_against(method, **kind)) for method in EXTENSIONS)
    return pairs


def format_extension_table() -> str:
    """The methods with their options, and what is defined for which preset, as Markdown."""
    pairs = extension_table()
    reasons = list(dict.fromkeys(pair.reason for pair in pairs if pair.reason is not None))
    lines = [
        "# Context extension: methods and presets",
        "",
        f"Printed by `{COMMAND}`.",
        "",
        "An axis is extended by s = max(1, new / trained), with factors='max' all axes by the largest s. Every method",
        "leaves a grid alone that is longer on no axis than in training.",
        "",
        "| method | what it does | options and their defaults |",
        "|---|---|---|",
    ]
    for name, method in EXTENSIONS.items():
        knobs = ", ".join(f"{knob}={value!r}" for knob, value in method.knobs.items())
        lines.append(f"| {name} | {method.summary} | {knobs or 'none'} |")
    lines += [
        "",
        "Presets with their default options; a number is that of the reason below the table.",
        "",
        f"| preset | {' | '.join(EXTENSIONS)} |",
        "|---" * (len(EXTENSIONS) + 1) + "|",
    ]
    for name in PRESETS:
        cells = [
            "yes" if pair.reason is None else str(reasons.index(pair.reason) + 1)
            for pair in pairs
            if pair.preset == name
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(reasons, start=1)]
    lines += [
        "",
        "Encodings without rotation (none, sinusoidal, learned and biases on attention scores) have no frequencies to",
        "extend.",
    ]
    return "\n".join(lines) + "\n"
