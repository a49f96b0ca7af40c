"""Context extension: how frequencies change so that a model meets grids longer than those it was trained on.

Every method multiplies each frequency by a factor that follows from its axis alone, so a method is one formula
(`vision_rope.extension_formulas`) and one line in the table EXTENSIONS.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vision_rope import extension_formulas as formulas
from vision_rope.extension_formulas import GrowingAxis
from vision_rope.frequencies import Ladder
from vision_rope.suggestion import did_you_mean

FACTORS = ("separate", "max")


@dataclass(frozen=True)
class Method:
    """A row of EXTENSIONS.

    Attributes:
        summary: one line for lists of methods.
        formula: (GrowingAxis, **options) -> factors of the axis's frequencies; None changes nothing.
        asks: what the formula asks for: "nothing", "frequencies", or a "ladder", which learned frequencies lack.
        ladder_use: what it does with the ladder, for the message that refuses learned frequencies.
        coordinates: "index" where positions must grow with the grid for the method to mean something, "normalised"
            where they must not, "any".
        temperature: default of YaRN's temperature; None where the method has none.
        knobs: all options of the method with their defaults.
    """

    summary: str
    formula: Callable[..., Tensor] | None
    asks: Literal["nothing", "frequencies", "ladder"] = "nothing"
    ladder_use: str = ""
    coordinates: Literal["index", "normalised", "any"] = "index"
    temperature: float | None = None
    knobs: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        parameters = {} if self.formula is None else inspect.signature(self.formula).parameters
        knobs = {name: p.default for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
        if self.temperature is not None:
            knobs["temperature"] = self.temperature
        if self.coordinates == "index":
            knobs["factors"] = FACTORS[0]
        object.__setattr__(self, "knobs", knobs)


BASE = "it changes the base of a ladder"
LIMITS = "it sets its limits on the rungs of a ladder"

EXTENSIONS: dict[str, Method] = {
    "none": Method("positions grow with the grid, frequencies stay", None, coordinates="any"),
    "interpolate": Method("squeeze positions into the trained range", formulas.interpolate),
    "ntk": Method("larger base: slowest pair interpolated, fastest unchanged", formulas.ntk, "ladder", BASE),
    "dynamic-ntk": Method("as ntk, with a base that grows faster", formulas.dynamic_ntk, "ladder", BASE),
    "ntk-by-parts": Method(
        "slow pairs interpolated, those in between as ntk, fast ones unchanged",
        formulas.ntk_by_parts,
        "ladder",
        LIMITS,
        temperature=0.0,
    ),
    "yarn": Method(
        "slow pairs interpolated, fast ones unchanged, sharper softmax",
        formulas.yarn,
        "ladder",
        LIMITS,
        temperature=0.1,
    ),
    "llama3": Method("slow pairs interpolated by their own turns, learned ones too", formulas.llama3, "frequencies"),
    "base": Method(
        "one larger base for every larger grid, 50 times the own one where none is given",
        formulas.change_base,
        "ladder",
        BASE,
    ),
    "pitch": Method("keep the training distance between tokens", formulas.pitch, coordinates="normalised"),
}


@dataclass(frozen=True, eq=False)
class Extension:
    """What a method does to one rotary embedding between two grids.

    Attributes:
        method: name of the method.
        train_size, size: the two grids.
        factors: how many times longer each axis is; 1 where it does not grow.
        knobs: the options that were given.
        multiplier: factor of each frequency, (axes, pairs) float64 on the CPU; None where a formula is given.
        attention_scale: factor of the softmax scale.
        formula: computes the factors from learned frequencies, whose values change while they are trained.
    """

    method: str
    train_size: tuple[int, ...]
    size: tuple[int, ...]
    factors: tuple[float, ...]
    knobs: dict[str, Any]
    multiplier: Tensor | None
    attention_scale: float = 1.0
    formula: Callable[[GrowingAxis], Tensor] | None = None

    def apply(self, frequencies: Tensor) -> Tensor:
        """Extended frequencies.

        Shapes: (..., axes, pairs) -> the same, in dtype and on device of the input.
        """
        multiplier = self.multiplier
        if multiplier is None:
            multiplier = self._own_multiplier(frequencies)
        return frequencies * multiplier.to(device=frequencies.device, dtype=frequencies.dtype)

    def _own_multiplier(self, frequencies: Tensor) -> Tensor:
        """Factors that follow from the frequencies themselves, (..., axes, pairs)."""
        assert self.formula is not None
        parts = []
        for index, (trained, factor) in enumerate(zip(self.train_size, self.factors, strict=True)):
            axis = GrowingAxis(frequencies[..., index, :], None, trained, factor)
            parts.append(torch.ones_like(axis.frequencies) if factor == 1.0 else self.formula(axis))
        return torch.stack(parts, dim=-2)

    def describe(self) -> str:
        """Method, grids and options in a line, for `repr`."""
        grids = " -> ".join("x".join(str(length) for length in grid) for grid in (self.train_size, self.size))
        return ", ".join([f"{self.method} {grids}", *(f"{name}={value!r}" for name, value in self.knobs.items())])


def check_name(name: str) -> None:
    """Raise ValueError for a method that does not exist, naming the nearest."""
    if name not in EXTENSIONS:
        method, colon, options = str(name).partition(":")
        if colon:
            raise ValueError(
                f"method is {name!r}; options behind colons are for flags and configurations, in Python they are "
                f"keyword arguments: {method!r}, {options.replace(':', ', ') or 'option=value'}"
            )
        hint = did_you_mean(name, EXTENSIONS)
        raise ValueError(f"method is {name!r}; the context-extension methods are {', '.join(EXTENSIONS)}{hint}")


def check_knobs(name: str, knobs: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the method of that name does not have, with the nearest."""
    known = EXTENSIONS[name].knobs
    for knob in knobs:
        if knob not in known:
            raise ValueError(
                f"method {name!r} has no option {knob!r}; its options: {', '.join(known) or 'none'}"
                f"{did_you_mean(knob, known)}"
            )


def reason_against(name: str, *, has_ladder: bool, bounded: bool) -> str | None:
    """Why a method means nothing for embeddings of a kind; None where it does mean something.

    Args:
        has_ladder: frequencies are rungs of ladders, not learned.
        bounded: coordinates are normalised to the grid, not indices.
    """
    method = EXTENSIONS[name]
    if method.coordinates == "index" and bounded:
        return "its coordinates are normalised to the grid, so a larger grid stays within the trained range already"
    if method.coordinates == "normalised" and not bounded:
        return "its positions are indices, which keep the training distance already"
    if method.asks == "ladder" and not has_ladder:
        return f"{method.ladder_use}, and learned frequencies have none"
    return None


def check_method(name: str, knobs: dict[str, Any], *, has_ladder: bool, bounded: bool, subject: str) -> Method:
    """The row of EXTENSIONS of that name, or ValueError with the reason why it means nothing for `subject`."""
    check_name(name)
    check_knobs(name, knobs)
    reason = reason_against(name, has_ladder=has_ladder, bounded=bounded)
    if reason is not None:
        defined = [
            other for other in EXTENSIONS if reason_against(other, has_ladder=has_ladder, bounded=bounded) is None
        ]
        raise ValueError(
            f"{name} means nothing for {subject}: {reason}; use {', '.join(defined[:-1])} or {defined[-1]}"
        )
    return EXTENSIONS[name]


def check_grid(name: str, grid: Any, axes: int, subject: str) -> tuple[int, ...]:
    """The grid as a tuple, or ValueError where it has not one positive whole length for each axis."""
    if not isinstance(grid, Sequence) or isinstance(grid, str):
        raise ValueError(
            f"{name} is {grid!r}; it must be a grid of tokens with one length for each axis of {subject}, for instance "
            f"{(16,) * axes}"
        )
    if len(grid) != axes:
        raise ValueError(
            f"{name} {tuple(grid)} has {_count(len(grid))} and {subject} has {_count(axes)}; give one length for each"
        )
    if torch.jit.is_tracing():
        return tuple(grid)  # lengths are tensors there, which a comparison would turn into constants
    for length in grid:
        # A length is symbolic while a model is exported with dynamic height and width.
        whole = isinstance(length, int | torch.SymInt) or hasattr(length, "__index__")
        if isinstance(length, bool) or not whole or length < 1:
            raise ValueError(f"{name} is {tuple(grid)}; it must be a grid of positive lengths, in whole tokens")
    return tuple(grid)


def compute_extension(
    name: str,
    *,
    ladders: Sequence[Ladder] | None,
    pairs: int,
    train_size: Sequence[int],
    size: Sequence[int],
    normalize: str | None = None,
    knobs: dict[str, Any],
) -> Extension | None:
    """What a method of EXTENSIONS does between two grids; None where it changes nothing.

    The factor of an axis is max(1, new / trained): a smaller grid changes nothing. With factors="max" all axes get the
    largest one.

    Args:
        ladders: the ladder of each axis; None where frequencies are learned.
        pairs: pairs of a head.
        normalize: how coordinates are normalised, see `Coordinates`: "min" and "max" divide all axes by one length.
        knobs: options of the method.

    Shapes: train_size and size (n), (h, w) or (t, h, w) in tokens.
    Raises: ValueError where an option has a wrong value, whether or not the grid grows.
    """
    method = EXTENSIONS[name]
    if method.formula is None:
        return None
    given = dict(knobs)
    choice = given.pop("factors", FACTORS[0])
    temperature = given.pop("temperature", method.temperature)
    factors = [
        max(1.0, new / trained)
        for trained, new in zip(_divisors(train_size, normalize), _divisors(size, normalize), strict=True)
    ]
    if choice not in FACTORS:
        raise ValueError(f"factors is {choice!r}; choose 'separate' (an axis its own) or 'max' (the largest for all)")
    if choice == "max":
        factors = [max(factors)] * len(factors)

    multiplier = torch.ones(len(factors), pairs, dtype=torch.float64, device="cpu")
    for index, (trained, factor) in enumerate(zip(train_size, factors, strict=True)):
        ladder = None if ladders is None else ladders[index]
        # The place of learned frequencies, whose values come with each call.
        frequencies = multiplier[index] if ladder is None else ladder.values()
        # Also where the axis does not grow, so that wrong options are refused at any size.
        scaled = method.formula(GrowingAxis(frequencies, ladder, trained, factor), **given)
        if factor != 1.0:
            multiplier[index, slice(None) if ladder is None else list(ladder.slots)] = scaled
    scale = 1.0 if method.temperature is None else formulas.attention_scale(factors, temperature)
    if all(factor == 1.0 for factor in factors):
        return None
    grids = tuple(train_size), tuple(size)
    if ladders is None and method.asks == "frequencies":
        formula = functools.partial(method.formula, **given)
        return Extension(name, *grids, tuple(factors), knobs, None, scale, formula)
    return Extension(name, *grids, tuple(factors), knobs, multiplier, scale)


def _divisors(size: Sequence[int], normalize: str | None) -> list[int]:
    """What coordinates are divided by: each axis by its own length, or all by the shortest or longest one."""
    if normalize == "min":
        return [min(size)] * len(size)
    if normalize == "max":
        return [max(size)] * len(size)
    return list(size)


def _count(axes: int) -> str:
    return f"{axes} axis" if axes == 1 else f"{axes} axes"
