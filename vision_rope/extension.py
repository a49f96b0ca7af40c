"""Context extension: how frequencies change so that a model meets grids longer than those it was trained on.

Every method multiplies each frequency by a factor that depends on its axis and pair alone, so a method is a function
from a ladder and the two lengths of an axis to such factors, and one line in the table EXTENSIONS.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_rope.frequencies import Ladder
from vision_rope.suggestion import did_you_mean


@dataclass(frozen=True, eq=False)
class Extension:
    """What a method does to one rotary embedding between two grids.

    Attributes:
        multiplier: factor of each frequency, (axes, pairs) float64 on the CPU.
        attention_scale: factor of the softmax scale.
    """

    multiplier: Tensor
    attention_scale: float = 1.0


def interpolate(ladder: Ladder | None, trained: int, factor: float) -> Tensor:
    """Position interpolation: the longer axis is squeezed into the trained range.

    Source: Chen et al. (arXiv 2306.15595), equation 4.
    """
    return torch.tensor(1.0 / factor, dtype=torch.float64, device="cpu")


def ntk(ladder: Ladder, trained: int, factor: float) -> Tensor:
    """NTK-aware scaling: a larger base, so that the slowest pair is interpolated and the fastest is unchanged.

    base' = base * factor ** (d / (d - 2)) with d the dimension of the axis's own ladder.

    Source: bloc97, "NTK-aware scaled RoPE" (2023); an axis at a time as in FiT (arXiv 2402.12376), section 3.3.
    """
    if ladder.pairs < 2:
        raise ValueError("ntk needs a ladder of at least two pairs an axis; use interpolate or a larger head_dim")
    return factor ** -(ladder.exponents() * ladder.pairs / (ladder.pairs - 1))


def yarn(
    ladder: Ladder,
    trained: int,
    factor: float,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """YaRN: pairs that turn often within the trained length stay, those that turn seldom are interpolated.

    Args:
        beta_fast: pairs that turn more often than this within the trained length are left alone.
        beta_slow: pairs that turn less often than this are interpolated.
        truncate: round the two limits outwards to whole pairs, as the reference implementation does.

    The default constants are those for language; on an axis of 16 patches all but about two pairs are interpolated.

    Source: Peng et al. (arXiv 2309.00071), sections 3.2 and 3.3.
    """
    if beta_fast <= beta_slow:
        raise ValueError(f"beta_fast is {beta_fast} and beta_slow {beta_slow}; beta_fast must be the larger one")

    def rung_that_turns(times: float) -> float:
        return ladder.pairs * math.log(trained * ladder.scale / (2 * math.pi * times)) / math.log(ladder.base)

    low, high = rung_that_turns(beta_fast), rung_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * ladder.pairs - 1)
    if low == high:
        high += 0.001
    rungs = ladder.exponents() * ladder.pairs
    interpolated = ((rungs - low) / (high - low)).clamp(0, 1)
    return interpolated / factor + (1 - interpolated)


def pitch(ladder: Ladder | None, trained: int, factor: float) -> Tensor:
    """Keep the training distance between neighbouring tokens, where coordinates are normalised to the grid."""
    return torch.tensor(factor, dtype=torch.float64, device="cpu")


def yarn_attention_scale(factors: Sequence[float]) -> float:
    """YaRN's temperature 0.1 ln(s) + 1, squared, from the geometric mean s of the axes' factors (equation 22)."""
    return (0.1 * sum(math.log(factor) for factor in factors) / len(factors) + 1.0) ** 2


@dataclass(frozen=True)
class Method:
    """A row of EXTENSIONS.

    Attributes:
        summary: one line for lists of methods.
        multiplier: (ladder, trained length, factor, **knobs) -> factors of the ladder's slots; None changes nothing.
        needs_ladder: the formula asks for a base, which learned frequencies do not have.
        coordinates: "unbounded" where positions must grow with the grid for the method to mean something,
            "bounded" where they must not, "any".
        attention_scale: factors of the axes -> factor of the softmax scale.
    """

    summary: str
    multiplier: Callable[..., Tensor] | None
    needs_ladder: bool = False
    coordinates: str = "any"
    attention_scale: Callable[[Sequence[float]], float] | None = None

    def knobs(self) -> list[str]:
        """Names of the method's own options."""
        parameters = {} if self.multiplier is None else inspect.signature(self.multiplier).parameters
        return [name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]


EXTENSIONS: dict[str, Method] = {
    "none": Method("positions grow with the grid, frequencies stay", None),
    "interpolate": Method("squeeze positions into the trained range", interpolate, coordinates="unbounded"),
    "ntk": Method("larger base, slowest pair interpolated", ntk, needs_ladder=True, coordinates="unbounded"),
    "yarn": Method(
        "interpolate slow pairs only, with a temperature",
        yarn,
        needs_ladder=True,
        coordinates="unbounded",
        attention_scale=yarn_attention_scale,
    ),
    "pitch": Method("keep the training distance between tokens", pitch, coordinates="bounded"),
}


def check_name(name: str) -> None:
    """Raise ValueError for a method that does not exist, naming the nearest."""
    if name not in EXTENSIONS:
        hint = did_you_mean(name, EXTENSIONS)
        raise ValueError(f"method is {name!r}; the context-extension methods are {', '.join(EXTENSIONS)}{hint}")


def check_method(name: str, knobs: dict[str, Any], *, has_ladder: bool, bounded: bool, subject: str) -> Method:
    """The row of EXTENSIONS of that name, or ValueError with the reason why it means nothing for `subject`."""
    check_name(name)
    method = EXTENSIONS[name]
    for knob in knobs:
        if knob not in method.knobs():
            known = ", ".join(method.knobs()) or "none"
            raise ValueError(f"method {name!r} has no option {knob!r}; its options: {known}")
    if method.coordinates == "unbounded" and bounded:
        raise ValueError(
            f"{name} means nothing for {subject}: its coordinates are normalised to the grid, so a larger grid stays "
            "within the trained range already; use none or pitch"
        )
    if method.coordinates == "bounded" and not bounded:
        raise ValueError(
            f"{name} means nothing for {subject}: its positions are indices, which keep the training distance already; "
            "use none, interpolate, ntk or yarn"
        )
    if method.needs_ladder and not has_ladder:
        raise ValueError(
            f"{name} means nothing for {subject}: it changes the base of a ladder, and learned frequencies have none; "
            "use none or interpolate"
        )
    return method


def extension_factors(train_size: Sequence[int], size: Sequence[int]) -> list[float]:
    """max(1, new / trained) an axis: a smaller grid changes nothing.

    Raises: ValueError where the sizes disagree in their number of axes or a length is not positive.
    """
    if len(train_size) != len(size):
        raise ValueError(
            f"train_size {tuple(train_size)} has {len(train_size)} axes and size {tuple(size)} has {len(size)}; "
            "they must agree"
        )
    if min(*train_size, *size) < 1:
        raise ValueError(f"train_size {tuple(train_size)} and size {tuple(size)} must be grids of positive lengths")
    return [max(1.0, new / trained) for trained, new in zip(train_size, size, strict=True)]


def compute_extension(
    method: Method,
    ladders: Sequence[Ladder] | None,
    pairs: int,
    train_size: Sequence[int],
    size: Sequence[int],
    **knobs: Any,
) -> Extension | None:
    """What a method of EXTENSIONS does between two grids; None where it changes nothing.

    Shapes: train_size and size (n), (h, w) or (t, h, w) in tokens.
    """
    factors = extension_factors(train_size, size)
    if method.multiplier is None or all(factor == 1.0 for factor in factors):
        return None
    multiplier = torch.ones(len(factors), pairs, dtype=torch.float64, device="cpu")
    for axis, (trained, factor) in enumerate(zip(train_size, factors, strict=True)):
        if factor == 1.0:
            continue
        ladder = None if ladders is None else ladders[axis]
        slots = slice(None) if ladder is None else list(ladder.slots)
        multiplier[axis, slots] = method.multiplier(ladder, trained, factor, **knobs)
    scale = 1.0 if method.attention_scale is None else method.attention_scale(factors)
    return Extension(multiplier, scale)
