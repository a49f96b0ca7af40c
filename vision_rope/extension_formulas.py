"""The formulas of context extension: by what each frequency of an axis is multiplied when the axis grows.

A formula is a function of one axis, with its options as keyword arguments; `vision_rope.extension.EXTENSIONS` names
them. Formulas check their own options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_rope.frequencies import Ladder

# Xiong et al. (arXiv 2309.16039) go from 10,000 to 500,000 for contexts of up to 8 times the trained length.
ADJUSTED_BASE = 50.0


@dataclass(frozen=True, eq=False)
class GrowingAxis:
    """One axis of a rotary embedding between two grids.

    Attributes:
        frequencies: of the pairs that turn with the axis, (..., pairs), in radians a unit of position.
        ladder: the ladder they are rungs of; None where they are learned.
        trained: length of the axis in training.
        factor: how many times longer the axis is now, at least 1.
    """

    frequencies: Tensor
    ladder: Ladder | None
    trained: int
    factor: float


def interpolate(axis: GrowingAxis) -> Tensor:
    """Position interpolation: the longer axis is squeezed into the trained range.

    Source: Chen et al. (arXiv 2306.15595), equation 4. transformers calls it linear, rotary-embedding-torch
        interpolate_factor, timm ref_feat_shape.
    """
    return torch.tensor(1.0 / axis.factor, dtype=torch.float64, device="cpu")


def ntk(axis: GrowingAxis) -> Tensor:
    """NTK-aware scaling: a larger base, so that the slowest pair is interpolated and the fastest is unchanged.

    base' = base * factor ** (d / (d - 2)) with d the dimension of the axis's own ladder.

    Source: bloc97, "NTK-aware scaled RoPE" (2023); an axis at a time as in FiT (arXiv 2402.12376), section 3.3.
    """
    return _ntk_multiplier(axis, axis.factor)


def dynamic_ntk(axis: GrowingAxis, *, factor: float = 2.0) -> Tensor:
    """Dynamic NTK: as ntk, with factor * new / trained - (factor - 1) in the place of new / trained.

    Args:
        factor: 1 is ntk; a larger one slows the pairs down further, the slowest beyond interpolation.

    Source: emozilla, "Dynamically scaled RoPE" (2023), as transformers has it (rope_type "dynamic").
    """
    check_number("factor", factor, "how much faster than the grid the base grows, for instance 2; 1 is ntk")
    return _ntk_multiplier(axis, factor * axis.factor - (factor - 1.0))


def change_base(axis: GrowingAxis, *, base: float | None = None) -> Tensor:
    """Adjusted base frequency: one larger base for every length above the trained one, however much longer.

    Args:
        base: the new base; 50 times the axis's own when not given.

    Source: Xiong et al. (arXiv 2309.16039), section 2: 10,000 becomes 500,000.
    """
    ladder = _ladder(axis)
    if base is None:
        base = ADJUSTED_BASE * ladder.base
    check_number("base", base, f"the new base, above the embedding's own of {ladder.base:g}")
    if base <= ladder.base:
        raise ValueError(
            f"base is {base:g} and the embedding's own base {ladder.base:g}; the new one must be larger, so that pairs "
            f"turn less, for instance {ADJUSTED_BASE * ladder.base:g}"
        )
    return (base / ladder.base) ** -ladder.exponents()


def ntk_by_parts(
    axis: GrowingAxis,
    *,
    linear_fast: float = 1.25,
    linear_slow: float = 0.75,
    beta_fast: float = 16.0,
    beta_slow: float = 2.0,
    truncate: bool = True,
) -> Tensor:
    """NTK by parts: slow pairs are interpolated, those in between follow ntk, fast ones stay.

    The default constants are FiT's for images. YaRN's paper gives this name to yarn without its temperature.

    Args:
        linear_fast: pairs that turn more often than this within the trained length follow ntk.
        linear_slow: pairs that turn less often than this are interpolated.
        beta_fast: pairs that turn more often than this are left alone.
        beta_slow: pairs that turn less often than this follow the two rules above.
        truncate: round all limits outwards to whole pairs, as the reference implementations do.

    Source: FiT (arXiv 2402.12376), section 3.3 and its code; bloc97, "NTK-by-parts" (2023).
    """
    _check_limits("linear_fast", linear_fast, "linear_slow", linear_slow, "1.25 and 0.75")
    _check_limits("beta_fast", beta_fast, "beta_slow", beta_slow, "16 and 2 for images, 32 and 1 for language")
    _check_flag("truncate", truncate)
    slow = _ramp(axis, linear_fast, linear_slow, truncate)
    slowed = slow / axis.factor + (1 - slow) * _ntk_multiplier(axis, axis.factor)
    changed = _ramp(axis, beta_fast, beta_slow, truncate)
    return changed * slowed + (1 - changed)


def yarn(
    axis: GrowingAxis,
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
    FiT's 16 and 2 suit images better.

    Source: Peng et al. (arXiv 2309.00071), sections 3.2 and 3.3; limits placed on the ladder as in its code.
    """
    _check_limits("beta_fast", beta_fast, "beta_slow", beta_slow, "32 and 1 for language, 16 and 2 for images")
    _check_flag("truncate", truncate)
    interpolated = _ramp(axis, beta_fast, beta_slow, truncate)
    return interpolated / axis.factor + (1 - interpolated)


def llama3(axis: GrowingAxis, *, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0) -> Tensor:
    """Llama 3.1's scaling: as yarn, with limits on each frequency's own turns and a ramp that is linear in them.

    It asks for frequencies alone, not for a ladder, so learned ones follow it too, each by its own turns along each
    axis (no published model does that).

    Args:
        low_freq_factor: pairs that turn less often than this within the trained length are interpolated.
        high_freq_factor: pairs that turn more often than this are left alone.

    Source: Llama 3.1, as transformers has it (rope_type "llama3"); with 1 and 32 it is equations 17 and 18 of YaRN's
        paper (arXiv 2309.00071).
    """
    _check_limits("high_freq_factor", high_freq_factor, "low_freq_factor", low_freq_factor, "4 and 1")
    turns = axis.frequencies.abs() * (axis.trained / (2 * math.pi))
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return (1 - kept) / axis.factor + kept


def pitch(axis: GrowingAxis) -> Tensor:
    """Keep the training distance between neighbouring tokens, where coordinates are normalised to the grid."""
    return torch.tensor(axis.factor, dtype=torch.float64, device="cpu")


def attention_scale(factors: list[float], temperature: float) -> float:
    """YaRN's temperature: (temperature * ln s + 1) squared, s the geometric mean of the axes' factors.

    The papers multiply cos and sin by the root of this number; on the softmax scale it does the same, and cos and sin
    stay a rotation.

    Source: Peng et al. (arXiv 2309.00071), equation 22, with 0.1 for language.
    """
    check_number("temperature", temperature, "0.1 in YaRN, 0 switches it off", zero=True)
    return (temperature * sum(math.log(factor) for factor in factors) / len(factors) + 1.0) ** 2


def check_number(name: str, value: Any, meaning: str, *, zero: bool = False) -> None:
    """Raise ValueError unless an option is a finite number above zero, or zero where that means something."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not zero):
        rule = "zero or a positive number" if zero else "a positive number"
        raise ValueError(f"{name} is {value!r}; it must be {rule}: {meaning}")


def _check_limits(upper_name: str, upper: Any, lower_name: str, lower: Any, example: str) -> None:
    meaning = "turns within the trained length"
    check_number(upper_name, upper, meaning)
    check_number(lower_name, lower, meaning)
    if upper <= lower:
        raise ValueError(
            f"{upper_name} is {upper} and {lower_name} {lower}; {upper_name} must be the larger one, for instance "
            f"{example}"
        )


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be True or False")


def _ladder(axis: GrowingAxis) -> Ladder:
    assert axis.ladder is not None, "a method that needs a ladder is refused before, see check_method"
    return axis.ladder


def _ntk_multiplier(axis: GrowingAxis, times: float) -> Tensor:
    """Frequencies under base * times ** (d / (d - 2)), over those under base."""
    ladder = _ladder(axis)
    if ladder.pairs < 2:
        raise ValueError(
            f"a ladder of {ladder.pairs} pair has no slowest pair apart from the fastest; NTK scaling needs at least "
            "two pairs an axis: use interpolate or a larger head_dim"
        )
    return times ** -(ladder.exponents() * ladder.pairs / (ladder.pairs - 1))


def _ramp(axis: GrowingAxis, fast: float, slow: float, truncate: bool) -> Tensor:
    """0 for rungs that turn more than `fast` times within the trained length, 1 for less than `slow`, between them
    linear in the rung."""
    ladder = _ladder(axis)
    if ladder.base <= 1:
        raise ValueError(
            f"the embedding's base is {ladder.base:g}, so its pairs do not turn slower and slower, and limits on turns "
            "mean nothing; use interpolate, or an embedding whose base is above 1"
        )

    def rung_that_turns(times: float) -> float:
        return ladder.pairs * math.log(axis.trained * ladder.scale / (2 * math.pi * times)) / math.log(ladder.base)

    rungs = ladder.exponents() * ladder.pairs
    low, high = rung_that_turns(fast), rung_that_turns(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    # The peers' bounds, in which the last rung is not pairs - 1 but d - 1.
    last = 2 * ladder.pairs - 1
    # Where every rung turns seldom (or often), the peers' bounds cross and they leave all alone (or none).
    if high < 0:
        return torch.ones_like(rungs)
    if low > last:
        return torch.zeros_like(rungs)
    low, high = max(low, 0), min(high, last)
    if low == high:
        high += 0.001
    return ((rungs - low) / (high - low)).clamp(0, 1)
