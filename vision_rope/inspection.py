"""How far each pair of a rotary embedding turns across a grid, and which pairs meet angles that training never had.

The angle of a pair is the sum over axes of position * frequency, and attention sees the differences of two tokens'
angles. Everything below is about these relative angles between the tokens of a grid. Prefix tokens are left out.

- step: how far neighbouring tokens of an axis are apart. Indices have 1 in every grid. Coordinates that are normalised
  or rescaled to the grid have one that shrinks as the grid grows, so their wavelengths in tokens grow with it.
- wavelength of a pair on an axis: 2 pi / (|frequency| * step), in tokens of the given grid.
- turns across a grid on an axis: its number of tokens / wavelength. Its range is taken from edge to edge of its tokens,
  n steps where there are n of them, as the methods of extension count it (an axis has grown new / trained times).
- unseen: two tokens of the grid meet at an angle that is farther than one step from every angle of training. Relative
  angles have both signs and wrap around, so a pair that turns half a turn or more across the training grid has
  seen all of them. Within one step of an angle of training counts as seen, since that is how far the angles of
  training are from each other. Where a pair turns with both axes (learned frequencies), its turns and its step are
  the sums over the axes.
- decay bound: the mean over i of |S_i|, S_i the sum of exp(1j * distance * frequency) over the first i pairs. RoFormer
  bounds the attention of two tokens by it, times what their queries and keys differ by from pair to pair.

Source: turns and wavelengths as in YaRN (Peng et al., arXiv 2309.00071), section 3.2; the bound is RoFormer's (Su et
    al., arXiv 2104.09864), section 3.4.3, equation 37, along one axis with that axis's pairs in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vision_rope.coordinates import Coordinates
from vision_rope.extension import check_grid
from vision_rope.rope import Rope

AXES = ("rows", "columns")
Grid = tuple[int, ...]
# 8,192 x 8,192 pixels in patches of 16: tables of offsets stay below a GB.
MOST_TOKENS = 1 << 18

# What the suggestions rest on.
STUDIES = "docs/results/studies.md"


@dataclass(frozen=True, eq=False)
class Inspection:
    """A rotary embedding between the grid it was trained on and another one; made by `inspect_rope`.

    Fixed frequencies have one layer and one head, which stand for all of them.

    Attributes:
        rope: the embedding.
        train_grid, grid: (rows, columns) of tokens.
        frequencies: (layers, heads, axes, pairs) float64.
        unseen: pairs that meet unseen angles in the new grid, (layers, heads, pairs) bool.
        method: the suggested method of context extension, see `explain_method`.
        extended: the frequencies after that method.
        unseen_extended: pairs that meet unseen angles even so.
    """

    rope: Rope
    train_grid: Grid
    grid: Grid
    frequencies: Tensor
    unseen: Tensor
    method: str
    extended: Tensor
    unseen_extended: Tensor

    @property
    def learned(self) -> bool:
        """Whether frequencies are learned, in each layer and head their own."""
        return self.rope.learned_frequencies is not None

    @property
    def grows(self) -> bool:
        """Whether the new grid is longer on an axis than that of training."""
        return any(new > trained for new, trained in zip(self.grid, self.train_grid, strict=True))

    def wavelengths(self, grid: Grid) -> Tensor:
        """Wavelengths in tokens of a grid, (layers, heads, axes, pairs); inf where a pair stands still."""
        return 2 * math.pi / self._radians_a_step(grid)

    def turns(self, grid: Grid) -> Tensor:
        """Turns across a grid, (layers, heads, axes, pairs)."""
        return self._radians_a_step(grid) * torch.tensor(grid)[:, None] / (2 * math.pi)

    def decay(self, grid: Grid, axis: int, *, extended: bool = False) -> Tensor | None:
        """The decay bound along an axis of a grid at distances of 0, 1, 2, ... tokens, with the pairs of that axis.

        Shapes: -> (layers, heads, distances); None where no pair turns with the axis.
        """
        own = self.frequencies[:, :, axis].ne(0).flatten(0, 1).any(0)
        if not own.any():
            return None
        frequencies = (self.extended if extended else self.frequencies)[:, :, axis, own]
        step = axis_steps(self.rope.coordinates, grid)[axis]
        return decay_bound(frequencies * step, torch.arange(grid[axis], dtype=torch.float64))

    def _radians_a_step(self, grid: Grid) -> Tensor:
        return self.frequencies.abs() * axis_steps(self.rope.coordinates, grid)[:, None]


def inspect_rope(rope: Rope, train_grid: Sequence[int], grid: Sequence[int] | None = None) -> Inspection:
    """Compare what the pairs of a rotary embedding turn by in the grid it was trained on and in another one.

    The suggested method is interpolation where a pair meets unseen angles and coordinates are indices, else none.

    Args:
        rope: an embedding of two axes that is not extended.
        train_grid: (rows, columns) of tokens in training.
        grid: those of the new grid; the training grid where not given.

    Raises: ValueError for an embedding of text or videos, and for a grid that is none.
    """
    if rope.axes != len(AXES):
        raise ValueError(
            f"{rope.name} has {rope.axes} {'axis' if rope.axes == 1 else 'axes'}, and grids of image patches have rows "
            "and columns; choose a preset of two axes"
        )
    if rope.extension is not None:
        raise ValueError(f"{rope.name} is extended already; give the original rotary embedding")
    trained = check_grid("train_grid", train_grid, rope.axes, rope.name)
    new = trained if grid is None else check_grid("grid", grid, rope.axes, rope.name)
    frequencies = rope.frequencies.detach().to("cpu", torch.float64)
    unseen = find_unseen(frequencies, frequencies, rope.coordinates, trained, new)
    method = "none" if rope.coordinates.bounded or not unseen.any() else "interpolate"
    extension = rope.extension_for(method, train_size=trained, size=new)
    extended = frequencies if extension is None else extension.apply(frequencies)
    unseen_extended = find_unseen(frequencies, extended, rope.coordinates, trained, new)
    return Inspection(rope, trained, new, frequencies, unseen, method, extended, unseen_extended)


def axis_steps(coordinates: Coordinates, grid: Sequence[int]) -> Tensor:
    """How far neighbouring tokens of each axis are apart, (axes,) float64; 0 on an axis of one token."""
    axes = coordinates.axes(*grid, device="cpu")
    return torch.tensor([float(axis[-1] - axis[0]) / max(len(axis) - 1, 1) for axis in axes], dtype=torch.float64)


def find_unseen(
    frequencies: Tensor, new_frequencies: Tensor, coordinates: Coordinates, train_grid: Grid, grid: Grid
) -> Tensor:
    """Which pairs meet angles in a grid that training never had, see the top of this module.

    Args:
        frequencies: those of training.
        new_frequencies: those in the new grid: the same, or extended ones.

    Shapes: (..., axes, pairs) -> (..., pairs) bool.
    """
    if grid[0] * grid[1] > MOST_TOKENS:
        raise ValueError(
            f"the grid of {grid[0]} x {grid[1]} tokens is too large to look at each offset; take one of at most "
            f"{MOST_TOKENS:,} tokens"
        )
    seen = (frequencies.abs() * (axis_steps(coordinates, train_grid) * torch.tensor(train_grid))[:, None]).sum(-2)
    # Two tokens apart by (rows, columns) or by (-rows, -columns) meet at the same angle but for its sign.
    offsets = [torch.arange(grid[0], dtype=torch.float64), torch.arange(1 - grid[1], grid[1], dtype=torch.float64)]
    rows, columns = (offset * step for offset, step in zip(offsets, axis_steps(coordinates, grid), strict=True))
    largest = []
    for by_row, by_column in new_frequencies.reshape(-1, *new_frequencies.shape[-2:]):
        angle = rows[:, None, None] * by_row + columns[:, None] * by_column
        folded = (torch.remainder(angle + math.pi, 2 * math.pi) - math.pi).abs()
        largest.append(folded.amax(dim=(0, 1)))
    # Rounding of positions and frequencies, which are float32, is no new angle.
    return torch.stack(largest).view_as(seen) > seen * (1 + 1e-5)


def decay_bound(frequencies: Tensor, distances: Tensor) -> Tensor:
    """RoFormer's bound on attention at a distance, the mean of |S_i|; (pairs + 1) / 2 at distance 0.

    Shapes: frequencies (..., pairs) and distances (distances) -> (..., distances).
    Source: RoFormer (arXiv 2104.09864), section 3.4.3.
    """
    angle = distances[:, None] * frequencies[..., None, :]
    return torch.polar(torch.ones_like(angle), angle).cumsum(-1).abs().mean(-1)


def tabulate(inspection: Inspection) -> list[dict[str, Any]]:
    """A row a layer, head and pair: frequencies, wavelengths and turns by axis, and whether it meets unseen angles.

    `layer` and `head` are None where all have the same frequencies; a wavelength is None where the pair stands still.

    Units: frequencies in radians a unit of position, wavelengths in tokens of the training grid or the new one.
    """
    columns: dict[str, Tensor] = {}
    for axis, name in enumerate(AXES):
        columns[f"frequency_{name}"] = inspection.frequencies[:, :, axis]
    for grid, when in ((inspection.train_grid, "trained"), (inspection.grid, "new")):
        wavelengths, turns = inspection.wavelengths(grid), inspection.turns(grid)
        for axis, name in enumerate(AXES):
            columns[f"wavelength_{when}_{name}"] = wavelengths[:, :, axis]
            columns[f"turns_{when}_{name}"] = turns[:, :, axis]
    columns |= {"unseen": inspection.unseen, "unseen_extended": inspection.unseen_extended}
    values = [column.flatten().tolist() for column in columns.values()]
    _, heads, pairs = inspection.unseen.shape
    shared = not inspection.learned
    return [
        {
            "layer": None if shared else index // (heads * pairs),
            "head": None if shared else index // pairs % heads,
            "pair": index % pairs,
            **{name: None if value == math.inf else value for name, value in zip(columns, row, strict=True)},
        }
        for index, row in enumerate(zip(*values, strict=True))
    ]


def explain_method(inspection: Inspection) -> str:
    """Why the method is suggested, with the numbers that led to it."""
    coordinates, pairs = inspection.rope.coordinates, count(inspection.unseen)
    if inspection.grid == inspection.train_grid:
        return "this is the grid of training"
    if coordinates.bounded and inspection.unseen.any():
        return (
            f"{pairs} meet unseen angles, since all coordinates are divided by one side ({coordinates.normalize}) and "
            "the aspect ratio is another one than in training; no method is defined for that"
        )
    if coordinates.bounded:
        reason = "coordinates are fitted to the grid, so that every size spans the trained range, in other steps"
        if inspection.grows:
            reason += (
                "; pitch would keep the training step instead, which lost in the studies of photographs where training "
                f"had not rescaled the coordinates at random, and won where it had ({STUDIES})"
            )
        return reason
    if not inspection.grows:
        return "the grid is longer on no axis than in training, so that all its angles are among those of training"
    if not inspection.unseen.any():
        return "every angle of the new grid is within one step of those of training"
    growth = " and ".join(
        f"{new / trained:.3g} times the {axis}"
        for new, trained, axis in zip(inspection.grid, inspection.train_grid, AXES, strict=True)
        if new > trained
    )
    turns = inspection.turns(inspection.train_grid).sum(-2)[inspection.unseen]
    studies = (
        "helped learned frequencies on some pictures and cost accuracy on others"
        if inspection.learned
        else "mended fixed frequencies on photographs at three times the trained size and changed little at twice"
    )
    return (
        f"at {growth} of training {pairs} meet unseen angles, since they had turned only {turns.min():.2g} to "
        f"{turns.max():.2g} times and half a turn shows all; squeezed into the trained range "
        f"{int(inspection.unseen_extended.sum())} do. In the studies interpolation {studies} ({STUDIES})"
    )


def count(flags: Tensor) -> str:
    """How many of the pairs, in words: "3 of 32 pairs"."""
    return f"{int(flags.sum())} of {flags.numel()} pairs"
