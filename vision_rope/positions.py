"""Where tokens sit: coordinates of grids, of prefix tokens, and their augmentation in training.

Positions are float32 tensors (tokens, axes), row-major, axes in the order (t, h, w) or its tail: (h, w) are rows and
columns, never x and y. A batch whose samples differ carries (batch, tokens, axes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Normalize = Literal["separate", "min", "max"]
NORMALIZE = ("separate", "min", "max")


def grid_positions(*size: int, device: torch.device | str | None = None) -> Tensor:
    """Index positions of a grid of tokens.

    Shapes: size (n), (h, w) or (t, h, w) -> (n, 1), (h * w, 2) or (t * h * w, 3).
    Raises: ValueError where a length is not a positive integer.
    """
    return mesh(index_axes(size, device))


def mesh(axes: Sequence[Tensor]) -> Tensor:
    """Positions of a grid from the coordinates of each of its axes.

    Shapes: axes (n), or (h) and (w), or (t), (h) and (w) -> (tokens, axes), row-major.
    Raises: ValueError where there is no axis.
    """
    if not axes:
        raise ValueError("axes is empty; a grid needs the coordinates of at least one axis")
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)


def rescaled_positions(
    *size: int, reference: Sequence[int], offset: float = 0.0, device: torch.device | str | None = None
) -> Tensor:
    """Index positions stretched, an axis at a time, to a reference grid: (index + offset) * reference / size.

    Shapes: size (h, w) -> (h * w, 2); reference has one length an axis.
    Raises: ValueError where size and reference disagree in their number of axes.
    Source: EVA-02 (arXiv 2303.11331), which trains on a 16 x 16 reference grid.
    """
    return mesh(rescaled_axes(size, reference, offset, device))


def centred_positions(
    *size: int, normalize: Normalize = "separate", device: torch.device | str | None = None
) -> Tensor:
    """Centres of the cells of a grid, in [-1, 1].

    "separate" divides each axis by its own length, so that every axis spans [-1, 1]; "min" and "max" divide all axes by
    the shortest or longest one, which keeps the aspect ratio.

    Shapes: size (h, w) -> (h * w, 2).
    Raises: ValueError for an unknown normalize.
    Source: DINOv3 (arXiv 2508.10104), position embedding of its ViTs.
    """
    return mesh(centred_axes(size, normalize, device))


def with_prefix(positions: Tensor, count: int, where: Literal["front", "end"] = "front") -> Tensor:
    """Positions with `count` zero rows for tokens that have no place: class tokens, registers, object pointers.

    Position zero is no rotation, so prefix tokens need no special case anywhere else.

    Shapes: (..., tokens, axes) -> (..., count + tokens, axes).
    Raises: ValueError for a negative count or an unknown `where`.
    """
    _check_tensor("positions", positions)
    if count < 0:
        raise ValueError(f"count is {count}; the number of prefix tokens must be zero or more")
    if where not in ("front", "end"):
        raise ValueError(f"where is {where!r}; prefix tokens stand at the 'front' or at the 'end'")
    if count == 0:
        return positions
    zeros = positions.new_zeros(*positions.shape[:-2], count, positions.shape[-1])
    return torch.cat((zeros, positions) if where == "front" else (positions, zeros), dim=-2)


def crop_positions(
    positions: Tensor,
    *,
    grid: tuple[int, int],
    top: float,
    left: float,
    size: tuple[float, float],
    out: tuple[int, int] | None = None,
) -> Tensor:
    """Positions of a crop's tokens within the whole image: rows and columns of the crop keep their place in the grid.

    Args:
        positions: of the whole image's grid, in any coordinates that grow evenly along an axis (those of all presets).
        grid: rows and columns of the whole image, in tokens.
        top, left, size: first row and column, height and width of the crop in tokens of that grid; they may be
            fractions and may leave the image.
        out: rows and columns of tokens that the crop has once it is resized, as after a random resized crop; by default
            its size, which must be whole numbers then. A token sits at the centre of what it covers.

    Shapes: (..., grid tokens, 2) -> (..., crop tokens, 2).
    Raises: ValueError where positions are not those of the grid, or the crop is empty.
    """
    _check_size(grid)
    if positions.shape[-1] != 2 or positions.shape[-2] != grid[0] * grid[1]:
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}; a grid of {grid[0]} x {grid[1]} tokens needs "
            f"(..., {grid[0] * grid[1]}, 2), without prefix tokens (add them after cropping)"
        )
    if min(size) <= 0:
        raise ValueError(f"size is {tuple(size)}; a crop has a positive height and width, in tokens")
    if out is None:
        if any(length != int(length) for length in size):
            raise ValueError(
                f"size is {tuple(size)}; a crop of fractions of tokens needs out, its own number of tokens"
            )
        out = (int(size[0]), int(size[1]))
    _check_size(out)
    cells = positions.unflatten(-2, grid)
    for dim, first, length, count in ((-3, top, size[0], out[0]), (-2, left, size[1], out[1])):
        tokens = torch.arange(count, dtype=torch.float32, device=positions.device)
        cells = _read_between(cells, dim, first + (tokens + 0.5) * (length / count) - 0.5)
    return cells.flatten(-3, -2)


def _read_between(cells: Tensor, dim: int, places: Tensor) -> Tensor:
    """Coordinates at fractional places along one axis of a grid, on the line through the two neighbours."""
    length = cells.shape[dim]
    if length == 1:
        if places.any():
            raise ValueError(
                "an axis of one token has no distance between tokens, so only the whole of it can be cropped; "
                "give positions of a finer grid"
            )
        return cells.index_select(dim, places.long())
    below = places.floor().clamp(0, length - 2)
    part = (places - below).to(cells.dtype).view(-1, *[1] * (-1 - dim))
    low, high = (cells.index_select(dim, index.long()) for index in (below, below + 1))
    return torch.lerp(low, high, part)


def pad_positions(positions: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One batch of samples with different numbers of tokens, and a mask of the tokens that there are.

    Padding sits at position zero, at the end. The mask, mask[:, None, None, :], keeps attention from looking at it.

    Shapes: a tensor (tokens, axes) a sample -> (batch, most tokens, axes), and (batch, most tokens) boolean.
    Raises: ValueError where there is no sample, or they differ in their number of axes.
    """
    _check_samples(positions)
    padded = pad_sequence(list(positions), batch_first=True)
    tokens = torch.arange(padded.shape[1], device=padded.device)
    lengths = torch.tensor([len(sample) for sample in positions], device=padded.device)
    return padded, tokens < lengths[:, None]


def pack_positions(positions: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """One sequence of all samples' tokens, one sample after the other without padding, and the samples' lengths.

    Shapes: a tensor (tokens, axes) a sample -> (all tokens, axes), and one length a sample.
    Raises: ValueError where there is no sample, or they differ in their number of axes.
    """
    _check_samples(positions)
    return torch.cat(list(positions)), [len(sample) for sample in positions]


def merge_order(*size: int, merge: int = 2, device: torch.device | str | None = None) -> Tensor:
    """Index of tokens in blocks of merge x merge, the order in which Qwen-VL's vision towers have them.

    positions[order] are the positions in that order; order.argsort() leads back to rows.

    Shapes: size (h, w) or (t, h, w) -> (tokens,) int64.
    Raises: ValueError where merge does not divide h and w.
    """
    _check_size(size)
    if len(size) not in (2, 3) or merge < 1 or size[-2] % merge or size[-1] % merge:
        raise ValueError(
            f"a grid of {tuple(size)} tokens cannot be cut into blocks of {merge} x {merge}; give (h, w) or (t, h, w) "
            "with h and w multiples of merge"
        )
    index = torch.arange(math.prod(size), device=device)
    pattern = "(steps rows block_row columns block_column) -> (steps rows columns block_row block_column)"
    return rearrange(
        index, pattern, rows=size[-2] // merge, columns=size[-1] // merge, block_row=merge, block_column=merge
    )


def augment_positions(
    positions: Tensor,
    *,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Positions moved and stretched at random, the same for all tokens, in the order shift, jitter, rescale.

    Args:
        shift: each axis is moved by a number drawn from [-shift, shift].
        jitter: each axis is multiplied by a factor drawn log-uniformly from [1 / jitter, jitter].
        rescale: all axes are multiplied by one factor drawn log-uniformly from [1 / rescale, rescale].
        generator: source of the random numbers; torch's own when not given.

    Shapes: (..., tokens, axes) -> the same.
    Raises: ValueError for a negative shift, or for a jitter or rescale below 1.
    Source: DINOv3 (arXiv 2508.10104), which trains with rescale 2.
    """
    moved = augment_axes(positions.unbind(-1), shift=shift, jitter=jitter, rescale=rescale, generator=generator)
    return torch.stack(moved, dim=-1)


def augment_axes(
    axes: Sequence[Tensor],
    *,
    shift: float | None = None,
    jitter: float | None = None,
    rescale: float | None = None,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """The coordinates of each axis moved and stretched at random, with the numbers that `augment_positions` draws.

    Shapes: one tensor an axis, of any shape -> the same.
    Raises: as `augment_positions`.
    """
    check_augmentation(shift, jitter, rescale)

    def draw(count: int, bound: float) -> Tensor:
        # Drawn on the generator's device (CPU when none is given), so that one seed means one picture on any device.
        device = "cpu" if generator is None else generator.device
        drawn = torch.empty(count, dtype=torch.float32, device=device)
        return drawn.uniform_(-bound, bound, generator=generator).to(axes[0].device)

    axes = list(axes)
    if shift is not None:
        axes = [axis + moved for axis, moved in zip(axes, draw(len(axes), shift), strict=True)]
    if jitter is not None:
        axes = [axis * factor for axis, factor in zip(axes, draw(len(axes), math.log(jitter)).exp(), strict=True)]
    if rescale is not None:
        factor = draw(1, math.log(rescale)).exp()
        axes = [axis * factor for axis in axes]
    return axes


def index_axes(size: Sequence[int], device: torch.device | str | None) -> list[Tensor]:
    """The coordinates of each axis of `grid_positions`."""
    _check_size(size)
    return [torch.arange(length, dtype=torch.float32, device=device) for length in size]


def rescaled_axes(
    size: Sequence[int], reference: Sequence[int], offset: float, device: torch.device | str | None
) -> list[Tensor]:
    """The coordinates of each axis of `rescaled_positions`."""
    _check_size(size)
    if len(reference) != len(size):
        raise ValueError(
            f"reference {tuple(reference)} has {len(reference)} axes and the grid {tuple(size)} has {len(size)}; "
            "give one reference length for each axis"
        )
    return [
        (axis + offset) * (wanted / length)
        for axis, length, wanted in zip(index_axes(size, device), size, reference, strict=True)
    ]


def centred_axes(size: Sequence[int], normalize: Normalize, device: torch.device | str | None) -> list[Tensor]:
    """The coordinates of each axis of `centred_positions`."""
    _check_size(size)
    if normalize == "separate":
        divisors = list(size)
    elif normalize == "min":
        divisors = [min(size)] * len(size)
    elif normalize == "max":
        divisors = [max(size)] * len(size)
    else:
        raise ValueError(f"normalize is {normalize!r}; choose one of {', '.join(NORMALIZE)}")
    return [
        (axis + 0.5) / divisor * 2.0 - 1.0 for axis, divisor in zip(index_axes(size, device), divisors, strict=True)
    ]


def _check_size(size: Sequence[int]) -> None:
    if not size:
        raise ValueError("a grid needs at least one length: (n), (h, w) or (t, h, w)")
    if torch.jit.is_tracing():
        return  # lengths are tensors there, which a comparison would turn into constants
    for length in size:
        # A length is symbolic while a model is exported with dynamic height and width.
        if isinstance(length, bool) or not isinstance(length, int | torch.SymInt) or length < 1:
            raise ValueError(f"a grid of {tuple(size)} tokens is not possible: every length must be a positive integer")


def _check_tensor(name: str, positions: Tensor) -> None:
    if not isinstance(positions, Tensor) or positions.ndim < 2:
        given = tuple(positions.shape) if isinstance(positions, Tensor) else positions
        what = f"has shape {given}" if isinstance(positions, Tensor) else f"is {given!r}"
        raise ValueError(
            f"{name} {what}; it must be a tensor (tokens, axes), for instance grid_positions(4, 6) for a grid of 4 x 6"
        )


def _check_samples(positions: Sequence[Tensor]) -> None:
    for index, sample in enumerate(positions):
        _check_tensor(f"positions[{index}]", sample)
    if not len(positions):
        raise ValueError("positions is empty; give the positions of at least one sample")
    shapes = [tuple(sample.shape) for sample in positions]
    if any(len(shape) != 2 or shape[-1] != shapes[0][-1] for shape in shapes):
        raise ValueError(f"positions have shapes {shapes}; each must be (tokens, axes) with the same number of axes")


def check_augmentation(shift: float | None, jitter: float | None, rescale: float | None) -> None:
    """Raise ValueError for amounts that `augment_positions` cannot move positions by."""
    if shift is not None and shift < 0:
        raise ValueError(f"shift is {shift}; positions move by up to this much, so it must be zero or more")
    for name, factor in (("jitter", jitter), ("rescale", rescale)):
        if factor is not None and factor < 1:
            raise ValueError(f"{name} is {factor}; factors are drawn from [1/{name}, {name}], so it must be 1 or more")
