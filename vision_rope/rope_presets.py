"""The presets: each published method is a choice of frequencies and positions, one function and one line in PRESETS."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vision_rope.frequencies import Ladder, check_head_dim, mixed_frequencies
from vision_rope.positions import Coordinates, Normalize
from vision_rope.rope import Rope
from vision_rope.rotation import Pairing
from vision_rope.suggestion import did_you_mean


def _axial_ladders(
    head_dim: int, base: float, *, columns_first: bool, scale: float = 1.0, rungs: int | None = None
) -> tuple[Ladder, Ladder]:
    """Ladders of (h, w): one axis turns the first half of the pairs, the other axis the second half.

    A ladder of an axis has head_dim / 4 rungs, unless told otherwise.
    """
    check_head_dim(head_dim, axes=2)
    quarter = head_dim // 4
    first, second = tuple(range(quarter)), tuple(range(quarter, 2 * quarter))
    rows, columns = (second, first) if columns_first else (first, second)
    return (
        Ladder(base=base, pairs=rungs or quarter, slots=rows, scale=scale),
        Ladder(base=base, pairs=rungs or quarter, slots=columns, scale=scale),
    )


def _roformer(
    head_dim: int, num_heads: int, depth: int, *, base: float = 10000.0, pairing: Pairing = "interleaved"
) -> Rope:
    """One axis (text): theta_i = base ** (-2i / head_dim).

    Pairs: all turn with the index.
    Compatible with: RoFormer and rotary-embedding-torch; with pairing="half", base 5e5 with Llama 3.
    Source: Su et al., RoFormer (arXiv 2104.09864), equation 15.
    """
    check_head_dim(head_dim, axes=1)
    pairs = head_dim // 2
    line = Ladder(base=base, pairs=pairs, slots=tuple(range(pairs)))
    return Rope(head_dim=head_dim, axes=1, pairing=pairing, ladders=[line], depth=depth, name="roformer")


def _rope_vit_axial(
    head_dim: int, num_heads: int, depth: int, *, base: float = 100.0, pairing: Pairing = "interleaved"
) -> Rope:
    """Two axes: half of a head's pairs turn with the column, half with the row; base 100.

    Pairs: the first half with the column, the second with the row.
    Compatible with: naver-ai/rope-vit's axial models, timm's vit_*_patch16_rope_224.
    Source: Heo et al. (arXiv 2403.13298), section 3.2.
    """
    ladders = _axial_ladders(head_dim, base, columns_first=True)
    return Rope(head_dim=head_dim, axes=2, pairing=pairing, ladders=ladders, depth=depth, name="rope-vit-axial")


def _rope_vit_mixed(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 10.0,
    pairing: Pairing = "interleaved",
    generator: torch.Generator | None = None,
) -> Rope:
    """Two axes, learned: every pair turns with both, at its own speed in each layer and head.

    Pairs: all with row and column.
    Compatible with: naver-ai/rope-vit's mixed models, timm's vit_*_patch16_rope_mixed_224.
    Source: Heo et al. (arXiv 2403.13298), section 3.2.
    """
    check_head_dim(head_dim, axes=2)

    draw = functools.partial(mixed_frequencies, head_dim, num_heads, depth, base=base)
    rope = Rope(
        head_dim=head_dim,
        axes=2,
        pairing=pairing,
        initial_frequencies=draw,
        depth=depth,
        name="rope-vit-mixed",
    )
    if generator is not None:
        rope.reset_parameters(generator)
    return rope


def _sam2(
    head_dim: int, num_heads: int, depth: int, *, base: float = 10000.0, pairing: Pairing = "interleaved"
) -> Rope:
    """Two axes as rope-vit-axial, base 10000.

    Pairs: the first half with the column, the second with the row.
    Compatible with: SAM 2's memory attention (Meta's and Ultralytics').
    Source: Ravi et al., SAM 2 (arXiv 2408.00714), appendix D.1.
    """
    ladders = _axial_ladders(head_dim, base, columns_first=True)
    return Rope(head_dim=head_dim, axes=2, pairing=pairing, ladders=ladders, depth=depth, name="sam2")


def _eva02(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 10000.0,
    reference: Sequence[int] = (16, 16),
    pairing: Pairing = "interleaved",
) -> Rope:
    """Two axes, indices stretched to a reference grid of 16 x 16 tokens, so that every size spans the same range.

    Pairs: the first half with the row, the second with the column.
    Compatible with: EVA-02, timm's eva02_*.
    Source: Fang et al., EVA-02 (arXiv 2303.11331).
    """
    ladders = _axial_ladders(head_dim, base, columns_first=False)
    coordinates = Coordinates(reference=tuple(reference))
    return Rope(
        head_dim=head_dim,
        axes=2,
        pairing=pairing,
        ladders=ladders,
        depth=depth,
        coordinates=coordinates,
        name="eva02",
    )


def _dinov3(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float | None = None,
    min_period: float | None = None,
    max_period: float | None = None,
    normalize: Normalize = "separate",
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    pairing: Pairing = "half",
) -> Rope:
    """Two axes, cell centres in [-1, 1], periods base ** (i / pairs); positions can be augmented in training.

    The periods of an axis are given by base (100 when nothing is given), or run from min_period to max_period.

    Pairs: the first half with the row, the second with the column.
    Compatible with: DINOv3 (its training has rescale=2), timm's vit_*_patch16_dinov3.
    Source: Simeoni et al., DINOv3 (arXiv 2508.10104), section on positional embedding.
    """
    check_head_dim(head_dim, axes=2)
    if min_period is None and max_period is None:
        ladders = _axial_ladders(head_dim, 100.0 if base is None else base, columns_first=False, scale=2 * math.pi)
    elif base is not None or min_period is None or max_period is None:
        raise ValueError(
            f"base is {base}, min_period {min_period}, max_period {max_period}; give either base or both periods"
        )
    elif not 0 < min_period < max_period or head_dim < 8:
        raise ValueError(
            f"min_period is {min_period} and max_period {max_period} with head_dim {head_dim}; periods must be "
            "positive, the first the smaller one, and head_dim at least 8"
        )
    else:
        ladders = _axial_ladders(
            head_dim,
            max_period / min_period,
            columns_first=False,
            scale=2 * math.pi / min_period,
            rungs=head_dim // 4 - 1,
        )
    coordinates = Coordinates(normalize=normalize, shift=shift, jitter=jitter, rescale=rescale)
    return Rope(
        head_dim=head_dim,
        axes=2,
        pairing=pairing,
        ladders=ladders,
        depth=depth,
        coordinates=coordinates,
        name="dinov3",
    )


@dataclass(frozen=True)
class Preset:
    """A row of PRESETS: one line about the method, and the function that builds it."""

    summary: str
    build: Callable[..., Rope]

    def options(self) -> list[str]:
        """Names of the preset's own options."""
        parameters = inspect.signature(self.build).parameters.values()
        return [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


PRESETS: dict[str, Preset] = {
    "roformer": Preset("1D, one ladder (text)", _roformer),
    "rope-vit-axial": Preset("2D axial, base 100, for image grids", _rope_vit_axial),
    "rope-vit-mixed": Preset("2D, learned, every pair turns with both axes", _rope_vit_mixed),
    "sam2": Preset("2D axial, base 10000 (SAM 2's memory attention)", _sam2),
    "eva02": Preset("2D axial, indices rescaled to a 16 x 16 grid", _eva02),
    "dinov3": Preset("2D axial, cell centres in [-1, 1], augmentation in training", _dinov3),
}


def preset(name: str, head_dim: int = 64, num_heads: int = 1, depth: int = 1, **options: Any) -> Rope:
    """Build a rotary position embedding by its name.

    Args:
        name: a name of `presets()`.
        head_dim: channels of a head.
        num_heads: heads of a layer; learned frequencies have their own for each.
        depth: layers; learned frequencies have their own for each.
        options: options of the preset, for instance base=100.0 or pairing="half".

    Raises: ValueError for an unknown name or option, naming the nearest, or a head_dim that does not divide into pairs.
    """
    if name not in PRESETS:
        raise ValueError(f"preset is {name!r}; the presets are {', '.join(PRESETS)}{did_you_mean(name, PRESETS)}")
    for what, count in (("num_heads", num_heads), ("depth", depth)):
        if count < 1:
            raise ValueError(f"{what} is {count}; it must be a positive integer")
    known = PRESETS[name].options()
    for option in options:
        if option not in known:
            raise ValueError(
                f"preset {name!r} has no option {option!r}; its options are {', '.join(known)}"
                f"{did_you_mean(option, known)}"
            )
    return PRESETS[name].build(head_dim, num_heads, depth, **options)


def presets() -> dict[str, str]:
    """Names of all presets, each with one line about it."""
    return {name: row.summary for name, row in PRESETS.items()}
