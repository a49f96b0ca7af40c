"""Images of different sizes in one forward pass, as one sequence without padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from timm.layers import DropPath
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vision_rope.attention import split_runs
from vision_rope.convert.attention import Packed
from vision_rope.convert.model import PositionedModel
from vision_rope.rotation import Rotation

PACKABLE = (VisionTransformer, Eva)


def forward_packed(model: nn.Module, images: Sequence[Tensor]) -> Tensor:
    """Outputs of a model for images of different sizes, equal to those of one image after the other.

    The tokens of all images are one sequence, so that all other layers of a block run once; attention stays inside each
    image, with the positions of its own grid. It is a loop of scaled_dot_product_attention, one call for neighbours of
    equal size: sort images by size where there are many. Dropped patches, positions moved at random in training, a
    context extension (`set_extension`) and gradient checkpointing work as for single images.

    Args:
        model: a model with a position encoding of this package, of timm's VisionTransformer or Eva family.
        images: of any sizes that the model's patches divide.

    Shapes: an image (channels, height, width) -> (images, classes), in the order of the images
    Raises: ValueError for another model or one without pooling, no images, an image that is none or whose size does
        not fit, and where training would drop paths.
    """
    positioned: Any = _check_model(model)
    images = _check_images(positioned, images)
    runs, tokens, positions = [], [], []
    for _, neighbours in groupby(images, key=lambda image: image.shape):
        batch = torch.stack(list(neighbours))
        start = positioned._start(batch, None)
        runs.append(tuple(start.tokens.shape[:2]))
        tokens.append(start.tokens.flatten(0, 1))
        positions.append(start.positions)
    x, packed = torch.cat(tokens)[None], None
    for block, layer in zip(positioned.blocks, zip(*positions, strict=True), strict=False):
        packed = _pack(runs, list(layer), packed)
        x = positioned._run_block(block, x, None, False, packed)
    by_run = split_runs(positioned.norm(x)[None], runs)  # with an axis where heads would be
    return torch.cat([positioned.forward_head(run[:, 0]) for run in by_run])


def _pack(runs: list[tuple[int, int]], positions: list[Any], last: Packed | None) -> Packed:
    """Positions of one layer; those of the last one where they are the same."""
    if last is not None and all(one is other for one, other in zip(positions, last.positions, strict=True)):
        return last
    if not isinstance(positions[0], Rotation):
        return Packed(runs, positions)
    cos, sin = (
        torch.cat([_lay(getattr(part, name), count) for part, (count, _) in zip(positions, runs, strict=True)], dim=-2)
        for name in ("cos", "sin")
    )
    return Packed(runs, positions, Rotation(cos, sin, positions[0].pairing))


def _lay(table: Tensor, count: int) -> Tensor:
    """A table for each of several images, one after the other.

    Shapes: (heads or 1, tokens, pairs), or (count, ...) where images differ -> (heads or 1, count * tokens, pairs)
    """
    return table.expand(count, *table.shape[-3:]).movedim(0, 1).flatten(1, 2)


def _check_model(model: nn.Module) -> PositionedModel:
    if not isinstance(model, PositionedModel):
        raise ValueError(
            f"model is a {type(model).__name__} without a position encoding of this package; call add_position first "
            "(position='learned' keeps timm's own), and give the model itself where something wraps it"
        )
    if not isinstance(model, PACKABLE):
        names = " and ".join(family.__name__ for family in PACKABLE)
        raise ValueError(
            f"model is a {type(model).__name__}; packing works for timm's {names} families; a NaFlexVit takes images "
            "of several sizes as a NaFlex batch, other models take those of one size"
        )
    if len(model.train_grid) == 3:
        raise ValueError(
            f"model is a {type(model).__name__}, a model of videos; packing is for images: give it clips of one size"
        )
    if model.global_pool == "":
        raise ValueError(
            "the model does not pool its tokens (global_pool=''), and images have different numbers of them; choose "
            "another pooling with reset_classifier"
        )
    if model.training and any(isinstance(layer, DropPath) and layer.drop_prob for layer in model.modules()):
        raise ValueError(
            "the model drops paths in training (drop_path_rate), which would drop those of all images at once, since "
            "they are one sequence; build it with drop_path_rate=0"
        )
    if model.training and getattr(model, "distilled_training", False):
        raise ValueError(
            "the model trains with distillation and has two outputs an image; switch it off with "
            "set_distilled_training(False)"
        )
    return model


def _check_images(model: Any, images: Sequence[Tensor]) -> list[Tensor]:
    images = list(images)
    if not images:
        raise ValueError("images is empty; give at least one image (channels, height, width)")
    for index, image in enumerate(images):
        if not isinstance(image, Tensor) or image.ndim != 3:
            given = f"has shape {tuple(image.shape)}" if isinstance(image, Tensor) else f"is a {type(image).__name__}"
            raise ValueError(f"images[{index}] {given}; an image is a tensor (channels, height, width)")
        try:
            model._check_image_size(image)
        except ValueError as error:
            channels = model.in_chans
            last = image.shape[-1] == channels != image.shape[0]
            hint = "; channels come first: give image.permute(2, 0, 1)" if last else ""
            raise ValueError(f"images[{index}] has shape {tuple(image.shape)}: {error}{hint}") from None
    return images
