"""The presets: each published method is a choice of frequencies and positions, one function and one line in PRESETS."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vision_rope.coordinates import Coordinates
from vision_rope.frequencies import Ladder, axial_ladders, check_head_dim, ladders_between, mixed_frequencies
from vision_rope.positions import Normalize
from vision_rope.rope import Rope
from vision_rope.rope_presets_video import (
    build_axial_3d,
    build_mixed_3d,
    build_qwen2_vl,
    build_qwen3_vl,
    build_v_jepa2,
    build_videorope,
)
from vision_rope.rotation import PAIRINGS, Pairing
from vision_rope.suggestion import did_you_mean


def _roformer(
    head_dim: int, num_heads: int, depth: int, *, base: float = 10000.0, pairing: Pairing = "interleaved"
) -> Rope:
    """One axis (text): theta_i = base ** (-2i / head_dim).

    Pairs: all turn with the index.
    Compatible with: RoFormer and rotary-embedding-torch.
    Source: Su et al., RoFormer (arXiv 2104.09864), equation 15.
    """
    return _build_line("roformer", head_dim, depth, base, pairing)


def _llama(head_dim: int, num_heads: int, depth: int, *, base: float = 500000.0, pairing: Pairing = "half") -> Rope:
    """One axis (text) as roformer, base 500000, halves.

    Pairs: all turn with the index.
    Compatible with: Llama 3 as transformers lays it out; base=10000 for Llama 1 and 2, pairing="interleaved" for Meta's
        own checkpoints. Llama 3.1's scaling is an extension, not part of this.
    Source: Touvron et al., Llama (arXiv 2302.13971), section 2.2; base of Llama 3 (arXiv 2407.21783).
    """
    return _build_line("llama", head_dim, depth, base, pairing)


def _build_line(name: str, head_dim: int, depth: int, base: float, pairing: Pairing) -> Rope:
    check_head_dim(head_dim, axes=1)
    pairs = head_dim // 2
    line = Ladder(base=base, pairs=pairs, slots=tuple(range(pairs)))
    return Rope(head_dim=head_dim, axes=1, pairing=pairing, ladders=[line], depth=depth, name=name)


def _build_axial(
    name: str,
    head_dim: int,
    depth: int,
    base: float,
    pairing: Pairing,
    *,
    columns_first: bool,
    coordinates: Coordinates | None = None,
) -> Rope:
    ladders = axial_ladders(head_dim, base, columns_first=columns_first)
    return Rope(
        head_dim=head_dim, axes=2, pairing=pairing, ladders=ladders, depth=depth, coordinates=coordinates, name=name
    )


def _rope_vit_axial(
    head_dim: int, num_heads: int, depth: int, *, base: float = 100.0, pairing: Pairing = "interleaved"
) -> Rope:
    """Two axes: half of a head's pairs turn with the column, half with the row; base 100.

    Pairs: the first half with the column, the second with the row.
    Compatible with: naver-ai/rope-vit's axial models, timm's vit_*_patch16_rope_224.
    Source: Heo et al. (arXiv 2403.13298), section 3.2.
    """
    return _build_axial("rope-vit-axial", head_dim, depth, base, pairing, columns_first=True)


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
    return _build_axial("sam2", head_dim, depth, base, pairing, columns_first=True)


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
    coordinates = Coordinates(reference=_check_reference(reference))
    return _build_axial("eva02", head_dim, depth, base, pairing, columns_first=False, coordinates=coordinates)


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
        ladders = axial_ladders(head_dim, 100.0 if base is None else base, columns_first=False, scale=2 * math.pi)
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
        ladders = ladders_between(head_dim, min_period, max_period, columns_first=False)
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


def _perception_encoder(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 10000.0,
    offset: float = 1.0,
    reference: Sequence[int] | None = None,
    pairing: Pairing = "interleaved",
) -> Rope:
    """Two axes, indices that begin at 1, since the class token in front has 0.

    Args:
        offset: added to every index; 0 for models without a class token (PE-G).
        reference: stretch (index + offset) to this grid, as timm does with the grid of pretraining; None leaves it.

    Pairs: the first half with the column, the second with the row.
    Compatible with: facebookresearch/perception_models; with reference, timm's vit_pe_*.
    Source: Bolya et al., Perception Encoder (arXiv 2504.13181), architecture of its vision encoder.
    """
    coordinates = Coordinates(reference=None if reference is None else _check_reference(reference), offset=offset)
    return _build_axial(
        "perception-encoder", head_dim, depth, base, pairing, columns_first=True, coordinates=coordinates
    )


def _pixtral(head_dim: int, num_heads: int, depth: int, *, base: float = 10000.0, pairing: Pairing = "half") -> Rope:
    """Two axes that share one ladder of head_dim / 2 rungs: rows have its even rungs, columns the odd ones.

    Rows turn by base ** (-4i / head_dim), columns by base ** (-(4i + 2) / head_dim).

    Pairs: the first half with the row, the second with the column.
    Compatible with: Pixtral's vision tower as transformers lays it out.
    Source: Agrawal et al., Pixtral 12B (arXiv 2410.07073), "RoPE-2D".
    """
    check_head_dim(head_dim, axes=2)
    quarter = head_dim // 4
    ladders = [
        Ladder(
            base=base,
            pairs=2 * quarter,
            slots=tuple(range(axis * quarter, (axis + 1) * quarter)),
            rungs=tuple(float(2 * i + axis) for i in range(quarter)),
        )
        for axis in (0, 1)
    ]
    return Rope(head_dim=head_dim, axes=2, pairing=pairing, ladders=ladders, depth=depth, name="pixtral")


def _llama4_vision(
    head_dim: int,
    num_heads: int,
    depth: int,
    *,
    base: float = 10000.0,
    offset: float = 1.0,
    pairing: Pairing = "interleaved",
) -> Rope:
    """Two axes, indices that begin at 1; the class token stands at the end, with position 0.

    Pairs: the first half with the column, the second with the row.
    Compatible with: Llama 4's vision tower; its tokens need with_prefix(positions, 1, where="end").
    Source: transformers' Llama4VisionRotaryEmbedding; there is no paper.
    """
    coordinates = Coordinates(offset=offset)
    return _build_axial("llama4-vision", head_dim, depth, base, pairing, columns_first=True, coordinates=coordinates)


def _gemma4_vision(
    head_dim: int, num_heads: int, depth: int, *, base: float = 100.0, pairing: Pairing = "half-per-axis"
) -> Rope:
    """Two axes, base 100; each axis has its own half of the channels, and halves of that half are paired.

    Pairs: the first half with the column, the second with the row.
    Compatible with: Gemma 4's vision tower, timm's Gemma 4 ViTs.
    Source: timm's and transformers' Gemma 4; there is no paper.
    """
    return _build_axial("gemma4-vision", head_dim, depth, base, pairing, columns_first=True)


def _qwen2_vl_vision(
    head_dim: int, num_heads: int, depth: int, *, base: float = 10000.0, pairing: Pairing = "half"
) -> Rope:
    """Two axes, base 10000, halves.

    Pairs: the first half with the row, the second with the column.
    Compatible with: the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose tokens come in blocks of 2 x 2:
        positions[merge_order(h, w)].
    Source: Wang et al., Qwen2-VL (arXiv 2409.12191), section 2.1.
    """
    return _build_axial("qwen2-vl-vision", head_dim, depth, base, pairing, columns_first=False)


def _check_reference(reference: Sequence[int]) -> tuple[int, ...]:
    lengths = list(reference) if isinstance(reference, Iterable) else []
    if len(lengths) != 2 or any(isinstance(length, bool) or not isinstance(length, int | float) for length in lengths):
        raise ValueError(
            f"reference is {reference!r}; it must be a grid of tokens (rows, columns), for instance (16, 16)"
        )
    return tuple(lengths)


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
    "llama": Preset("1D, base 500000, halves (text)", _llama),
    "rope-vit-axial": Preset("2D axial, base 100, for image grids", _rope_vit_axial),
    "rope-vit-mixed": Preset("2D, learned, every pair turns with both axes", _rope_vit_mixed),
    "sam2": Preset("2D axial, base 10000 (SAM 2's memory attention)", _sam2),
    "eva02": Preset("2D axial, indices rescaled to a 16 x 16 grid", _eva02),
    "dinov3": Preset("2D axial, cell centres in [-1, 1], augmentation in training", _dinov3),
    "perception-encoder": Preset("2D axial, indices from 1 beside a class token at 0", _perception_encoder),
    "pixtral": Preset("2D, rows and columns on the even and odd rungs of one ladder", _pixtral),
    "llama4-vision": Preset("2D axial, indices from 1, class token at the end", _llama4_vision),
    "gemma4-vision": Preset("2D axial, base 100, halves within each axis's channels", _gemma4_vision),
    "qwen2-vl-vision": Preset("2D axial, halves (Qwen-VL's vision towers)", _qwen2_vl_vision),
    "qwen2-vl": Preset("3D M-RoPE, one ladder cut into chunks t, h, w (Qwen2-VL, Qwen2.5-VL)", build_qwen2_vl),
    "qwen3-vl": Preset("3D M-RoPE, one ladder dealt out t, h, w, t, h, w, ... (Qwen3-VL)", build_qwen3_vl),
    "v-jepa2": Preset("3D axial, a third of the pairs an axis, the rest unrotated", build_v_jepa2),
    "videorope": Preset(
        "3D, time on the slowest pairs, h and w alternating on the others, frames on a diagonal", build_videorope
    ),
    "axial-3d": Preset("3D axial, base 100, a third of the pairs an axis", build_axial_3d),
    "mixed-3d": Preset("3D, learned, every pair turns with all axes", build_mixed_3d),
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
    shape = {"head_dim": head_dim, "num_heads": num_heads, "depth": depth}
    for what, count in shape.items():
        # Which heads divide into pairs, and the nearest that does, depends on the preset.
        if isinstance(count, bool) or not hasattr(count, "__index__") or (count < 1 and what != "head_dim"):
            raise ValueError(f"{what} is {count!r}; it must be a positive integer")
    own = PRESETS[name].options()
    known = [*shape, *own]
    for option, value in options.items():
        if option not in own:
            raise ValueError(
                f"preset {name!r} has no option {option!r}; its options are {', '.join(known)}"
                f"{did_you_mean(option, known)}"
            )
        if option == "pairing" and value not in PAIRINGS:
            hint = did_you_mean(value, PAIRINGS)
            raise ValueError(f"pairing is {value!r}; choose one of {', '.join(PAIRINGS)}{hint}")
    return PRESETS[name].build(head_dim, num_heads, depth, **options)


def presets() -> dict[str, str]:
    """Names of all presets, each with one line about it."""
    return {name: row.summary for name, row in PRESETS.items()}
