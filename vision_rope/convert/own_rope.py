"""timm's own rotary embeddings as ours: the same angles, for a model that has been trained with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed, RotaryEmbeddingMRope
from torch import Tensor, nn

from vision_rope.coordinates import Coordinates
from vision_rope.frequencies import axial_ladders, ladders_between, mixed_frequencies, shared_ladder
from vision_rope.rope import Rope

OWN = "own"


def own_rope(model: nn.Module) -> Rope:
    """The rotary embedding that a timm model was built with, learned frequencies included.

    Raises: ValueError for a model without one, or with one that has no counterpart here, with the reason.
    """
    module = timm_rope(model)
    if module is None:
        raise ValueError(
            f"position is {OWN!r}, and the {type(model).__name__} has no rotary embedding of its own; choose one of "
            "vision_rope.presets()"
        )
    return translate(module, depth=len(model.blocks))  # type: ignore[arg-type]


def timm_rope(model: nn.Module) -> Any:
    """A timm model's own rotary embedding as timm's module, or None."""
    # Models with windows have one for whole grids and one for windows.
    return getattr(model, "rope", getattr(model, "rope_global", None))


def translate(module: Any, depth: int) -> Rope:
    """One of timm's rotary embeddings as a Rope.

    Raises: ValueError where it has no counterpart, with the reason.
    """
    build = TRANSLATIONS.get(type(module))
    if build is None:
        known = ", ".join(kind.__name__ for kind in TRANSLATIONS)
        raise ValueError(f"the model's rotary embedding is {type(module).__name__}; known are timm's {known}")
    return build(module, depth)


def mixed_from_timm(freqs: Tensor, indexing: str) -> Tensor:
    """timm's learned frequencies (axes, depth, heads, pairs) as ours, (depth, heads, axes, pairs), rows before columns.

    Args:
        indexing: timm's order of axes: "ij" is rows first, "xy" columns first.
    """
    return (freqs if indexing == "ij" else freqs.flip(0)).permute(1, 2, 0, 3).contiguous()


def mixed_to_timm(frequencies: Tensor, indexing: str) -> Tensor:
    """The inverse of `mixed_from_timm`."""
    freqs = frequencies.permute(2, 0, 1, 3)
    return (freqs if indexing == "ij" else freqs.flip(0)).contiguous()


def adopt_frequencies(model: Any, module: Any, position: str | Rope, options: Mapping[str, Any]) -> None:
    """Tell a converted model timm's layout of learned frequencies, and begin with them unless others were asked for.

    Args:
        module: the rotary embedding that timm built the model with, or None.
        position, options: what was asked for.
    """
    if not isinstance(module, RotaryEmbeddingMixed):
        return
    model.timm_axes = module.grid_indexing
    if position == "rope-vit-mixed" and not {"base", "generator"} & options.keys():
        # The weights were trained with these frequencies.
        with torch.no_grad():
            model.position.learned_frequencies.copy_(mixed_from_timm(module.freqs, module.grid_indexing))


def _axial(module: Any, depth: int) -> Rope:
    if module.grid_type != "index":
        raise ValueError(f"the model's rotary embedding has a grid of type {module.grid_type!r}; 'index' is known")
    reference = None if module.ref_feat_shape is None else tuple(module.ref_feat_shape)
    return _fixed(
        module,
        depth,
        ladders=axial_ladders(module.dim, float(module.temperature), columns_first=module.grid_indexing == "xy"),
        coordinates=Coordinates(reference=reference, offset=module.grid_offset, **_augmentation(module)),
    )


def _dinov3(module: Any, depth: int) -> Rope:
    if module.grid_offset:
        raise ValueError(
            f"the model's rotary embedding has grid_offset {module.grid_offset} beside normalised coordinates, which "
            "has no counterpart here"
        )
    columns_first = module.grid_indexing == "xy"
    if module.min_period is not None and module.max_period is not None:
        ladders = ladders_between(module.dim, module.min_period, module.max_period, columns_first=columns_first)
    else:
        ladders = axial_ladders(module.dim, module.temperature, columns_first=columns_first, scale=2 * math.pi)
    coordinates = Coordinates(normalize=module.normalize_coords, **_augmentation(module))
    return _fixed(module, depth, ladders=ladders, coordinates=coordinates)


def _multimodal(module: Any, depth: int) -> Rope:
    """Rows and columns of M-RoPE; pairs that turn with time stand still in an image."""
    ladders = shared_ladder(float(module.temperature), module.axis.tolist(), axes=3)[1:]
    return _fixed(module, depth, ladders=ladders, coordinates=Coordinates(**_augmentation(module)), pairing="half")


def _mixed(module: Any, depth: int) -> Rope:
    head_dim = module.dim // module.num_heads
    rope = Rope(
        head_dim=head_dim,
        axes=2,
        initial_frequencies=partial(mixed_frequencies, head_dim, module.num_heads, depth, base=module.temperature),
        depth=depth,
        coordinates=Coordinates(**_augmentation(module)),
        name=OWN,
    ).to(module.freqs.device)
    with torch.no_grad():
        rope.learned_frequencies.copy_(mixed_from_timm(module.freqs, module.grid_indexing))  # type: ignore[union-attr]
    return rope


def _fixed(module: Any, depth: int, *, ladders: Any, coordinates: Coordinates, pairing: Any = None) -> Rope:
    return Rope(
        head_dim=module.dim,
        axes=2,
        pairing=pairing or ("half" if module.rotate_half else "interleaved"),
        ladders=ladders,
        depth=depth,
        coordinates=coordinates,
        name=OWN,
    )


def _augmentation(module: Any) -> dict[str, Any]:
    return {"shift": module.shift_coords, "jitter": module.jitter_coords, "rescale": module.rescale_coords}


TRANSLATIONS: dict[type[nn.Module], Any] = {
    RotaryEmbeddingCat: _axial,
    RotaryEmbeddingDinoV3: _dinov3,
    RotaryEmbeddingMixed: _mixed,
    RotaryEmbeddingMRope: _multimodal,
}
