"""What following objects through a video is worth without training: two floors, with the interface of a segmenter.

`CopyFirst` leaves every mask where it was given. `PatchPropagation` gives each place the mask of the most alike patches
of the first and the latest frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from vision_rope.segmenter.prompts import MaskPrompt

# Logits of what a prompt says for certain.
SURE = 10.0
# Masks of fewer pixels say nothing of where an object is.
FEWEST_PIXELS = 12
SHORTEST_SIDE = 40

# CIE 1931 coordinates of the primaries of sRGB, and white (D65).
XYZ_OF_RGB = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)


@dataclass(frozen=True)
class CopyState:
    """Masks as they were given, by object id.

    Shapes: float logits (height, width)
    """

    masks: Mapping[int, Tensor] = field(default_factory=dict)


class CopyFirst:
    """The floor that knows no motion: the mask of an object's prompt in all later frames."""

    def start(self) -> CopyState:
        """The state before the first frame."""
        return CopyState()

    def step(
        self, state: CopyState, frame: Tensor, prompts: Mapping[int, MaskPrompt | Sequence[MaskPrompt]] | None = None
    ) -> tuple[CopyState, dict[int, Tensor]]:
        """Look at a frame: a new state, and the masks of all objects; see `VideoSegmenter.step`."""
        masks = dict(state.masks)
        for object_id, mask in _read_prompts(prompts, frame).items():
            masks[object_id] = torch.where(mask, SURE, -SURE)
        return CopyState(masks), dict(masks)


@dataclass(frozen=True)
class Window:
    """A square of a frame, which may reach beyond it.

    Units: pixels from the frame's upper left corner
    """

    row: float
    column: float
    side: float

    @property
    def corner(self) -> tuple[int, int]:
        """Its first row and column."""
        return round(self.row - self.side / 2), round(self.column - self.side / 2)


@dataclass(frozen=True, eq=False)
class Seen:
    """Patches of a window with the part of each cell that the object fills.

    Shapes:
        patches: (cells, values)
        shares: (cells)
    """

    patches: Tensor
    shares: Tensor


@dataclass(frozen=True, eq=False)
class PatchObject:
    """What is known of an object: its first frame, its latest ones, and the window to look at next."""

    first: Seen
    latest: tuple[Seen, ...]
    window: Window


@dataclass(frozen=True)
class PatchState:
    """What is known after some frames.

    Attributes:
        objects: by id.
        size: (height, width) of the frames; none before the first.
    """

    objects: Mapping[int, PatchObject] = field(default_factory=dict)
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class PatchPropagation:
    """The floor that knows colours: a cell takes the mean mask of the cells that look most like it.

    An object is looked at in a square window around its last mask, resized to `resolution` pixels. The patch around
    each cell is compared with those of its first frame and of its latest ones, in the windows of their own.

    Attributes:
        zoom: side of the window over that of the object.
        resolution: pixels along the side of a resized window.
        stride: pixels along the side of a cell.
        patch: pixels along the side of a patch.
        radius: how many cells away alike ones may be, from window to window.
        num_alike: how many of them count.
        num_latest: how many frames are kept beside the first.
        temperature: in squared units of CIE Lab, a channel: patches so much farther apart weigh 1/e.

    Source: label propagation as in Jabri et al., Space-Time Correspondence as a Contrastive Random Walk (2020), on
        colours in place of learned features and in windows.
    """

    zoom: float = 2.0
    resolution: int = 96
    stride: int = 2
    patch: int = 5
    radius: int = 12
    num_alike: int = 10
    num_latest: int = 2
    temperature: float = 10.0

    def start(self) -> PatchState:
        """The state before the first frame."""
        return PatchState()

    def step(
        self, state: PatchState, frame: Tensor, prompts: Mapping[int, MaskPrompt | Sequence[MaskPrompt]] | None = None
    ) -> tuple[PatchState, dict[int, Tensor]]:
        """Follow all objects into a frame: a new state, and their masks; see `VideoSegmenter.step`.

        Shapes:
            frame: uint8 (3, height, width)
        """
        given = _read_prompts(prompts, frame)
        size = (frame.shape[-2], frame.shape[-1])
        if state.size not in (None, size):
            raise ValueError(f"frame has {size} pixels (rows, columns), but those before had {state.size}; resize it")
        logits: dict[int, Tensor] = {}
        patches: dict[int, Tensor] = {}
        for object_id in {**state.objects, **given}:
            if object_id in given:
                logits[object_id] = torch.where(given[object_id], SURE, -SURE)
                continue
            known = state.objects[object_id]
            patches[object_id] = self._describe(frame, known.window)
            logits[object_id] = self._paste(self._match(patches[object_id], known), known.window, size)
        if not logits:
            return replace(state, size=size), {}
        logits = dict(zip(logits, _separate(torch.stack(list(logits.values()))), strict=True))
        objects = {}
        for object_id, mask in logits.items():
            shares = mask.sigmoid()
            if object_id in given:
                window = self._begin(given[object_id])
                first = Seen(self._describe(frame, window), self._pool(shares, window))
                objects[object_id] = PatchObject(first, (), self._follow(window, shares))
                continue
            known = state.objects[object_id]
            seen = Seen(patches[object_id], self._pool(shares, known.window))
            latest = (*known.latest, seen)[-self.num_latest :] if self.num_latest else ()
            objects[object_id] = PatchObject(known.first, latest, self._follow(known.window, shares))
        return PatchState(objects, size), logits

    @property
    def _cells(self) -> int:
        """Cells along the side of a window."""
        return self.resolution // self.stride

    def _describe(self, frame: Tensor, window: Window) -> Tensor:
        """The patch around each cell of a window, (cells, values)."""
        colours = rgb_to_lab(_cut(frame, window, self.resolution) / 255)
        around = functional.pad(colours[None], (self.patch // 2,) * 4, mode="replicate")
        return functional.unfold(around, self.patch, stride=self.stride)[0].mT.contiguous()

    def _pool(self, shares: Tensor, window: Window) -> Tensor:
        return _cut(shares[None], window, self._cells).flatten()

    def _match(self, patches: Tensor, known: PatchObject) -> Tensor:
        """The part of each cell that the object fills, (cells, cells), from the cells that look most like it."""
        cells = self._cells
        memory = (known.first, *known.latest)
        keys = torch.stack([seen.patches for seen in memory])
        shares = torch.stack([seen.shares for seen in memory])
        norms = keys.square().sum(-1)
        rows, columns = torch.arange(cells, device=keys.device).view(-1, 1), torch.arange(cells, device=keys.device)
        found = []
        # A few rows at a time meet only the rows around them, which saves half of the work.
        for start in range(0, cells, self.radius):
            stop = min(start + self.radius, cells)
            low, high = max(start - self.radius, 0), min(stop + self.radius, cells)
            queries, near = patches[start * cells : stop * cells], slice(low * cells, high * cells)
            # Distances but for the norm of the query, which is the same for all keys.
            distances = (norms[:, None, near] - 2 * queries @ keys[:, near].mT) / patches.shape[-1]
            apart = (rows[start:stop, None, None] - rows[low:high]).square()
            apart = apart + (columns[:, None, None] - columns).square()
            far = apart.view(len(queries), -1) > self.radius**2
            distances = distances.masked_fill_(far, torch.inf).transpose(0, 1).flatten(1)
            nearest, places = distances.topk(self.num_alike, largest=False)
            weights = (-nearest / self.temperature).softmax(-1)
            found.append((weights * shares[:, near].flatten()[places]).sum(-1))
        return torch.cat(found).view(cells, cells)

    def _paste(self, shares: Tensor, window: Window, size: tuple[int, int]) -> Tensor:
        """The shares of a window's cells as logits of a frame's pixels."""
        side = max(round(window.side), 1)
        grown = functional.interpolate(shares[None, None], size=(side, side), mode="bilinear")[0, 0]
        (top, left), (height, width) = window.corner, size
        whole = shares.new_full(size, -SURE)
        inside = grown[max(-top, 0) : max(height - top, 0), max(-left, 0) : max(width - left, 0)]
        top, left = max(top, 0), max(left, 0)
        whole[top : top + inside.shape[0], left : left + inside.shape[1]] = inside.logit(1e-4)
        return whole

    def _begin(self, mask: Tensor) -> Window:
        """The window around a mask that was given; the whole frame where it is empty."""
        height, width = mask.shape
        box = _find_box(mask.float(), 0.0) or (0, 0, height, width)
        side = self.zoom * max(box[2] - box[0], box[3] - box[1]) + 2
        return Window((box[0] + box[2]) / 2, (box[1] + box[3]) / 2, _limit_side(side, mask))

    def _follow(self, window: Window, shares: Tensor) -> Window:
        """The window for the next frame: it follows the mask, and changes its side slowly."""
        inside = shares > 0.5
        if int(inside.sum()) < FEWEST_PIXELS:
            return replace(window, side=_limit_side(1.05 * window.side, shares))
        box = _find_box(shares * inside, 0.01)
        assert box is not None
        wanted = _limit_side(self.zoom * max(box[2] - box[0], box[3] - box[1]) + 2, shares)
        side = min(max(0.6 * window.side + 0.4 * wanted, 0.9 * window.side), 1.1 * window.side)
        return Window((box[0] + box[2]) / 2, (box[1] + box[3]) / 2, side)


def rgb_to_lab(colours: Tensor) -> Tensor:
    """Colours of sRGB in CIE Lab, white being D65.

    Shapes: (3, height, width) from 0 to 1, and so the result: lightness from 0 to 100, a and b of about -100 to 100
    """
    linear = torch.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    weights = colours.new_tensor(XYZ_OF_RGB) / colours.new_tensor(WHITE)[:, None]
    xyz = torch.einsum("xc,chw->xhw", weights, linear)
    edge = 6 / 29
    x, y, z = torch.where(xyz > edge**3, xyz.clamp(min=edge**3) ** (1 / 3), xyz / (3 * edge**2) + 4 / 29)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _read_prompts(prompts: Mapping[int, MaskPrompt | Sequence[MaskPrompt]] | None, frame: Tensor) -> dict[int, Tensor]:
    """Masks of prompts, on the device of the frame."""
    masks = {}
    for object_id, given in (prompts or {}).items():
        prompt = given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
        if not isinstance(prompt, MaskPrompt):
            raise ValueError(f"prompts[{object_id}] is a {type(prompt).__name__}, but a floor needs a MaskPrompt")
        if prompt.mask.shape != frame.shape[-2:]:
            raise ValueError(
                f"the mask of object {object_id} has {tuple(prompt.mask.shape)} pixels, but the frame has "
                f"{tuple(frame.shape[-2:])}; resize the mask"
            )
        masks[object_id] = prompt.mask.to(frame.device)
    return masks


def _separate(logits: Tensor) -> Tensor:
    """Leave each pixel to the object of its highest logit: the others are lowered by that one.

    Shapes: (objects, height, width)
    """
    highest, winner = logits.max(0, keepdim=True)
    places = torch.arange(len(logits), device=logits.device).view(-1, 1, 1)
    return torch.where(places == winner, logits, logits - highest.clamp(min=0))


def _cut(image: Tensor, window: Window, size: int) -> Tensor:
    """A window of an image, resized; beyond the image its border is repeated.

    Shapes: (channels, height, width) -> float (channels, size, size)
    """
    height, width = image.shape[-2:]
    (top, left), side = window.corner, max(round(window.side), 1)
    rows = torch.arange(top, top + side, device=image.device)
    columns = torch.arange(left, left + side, device=image.device)
    cut = image[:, rows.clamp(0, height - 1)][:, :, columns.clamp(0, width - 1)].float()
    if side < size:
        return functional.interpolate(cut[None], size=(size, size), mode="bilinear")[0]
    return functional.adaptive_avg_pool2d(cut, size)


def _find_box(mass: Tensor, left_out: float) -> tuple[int, int, int, int] | None:
    """Top, left, bottom and right of what has mass, without a share of it at each side; None where nothing has."""
    edges = []
    for axis in (1, 0):
        below = mass.sum(axis).double().cumsum(0)
        total = float(below[-1])
        if not total > 0:
            return None
        edges.append((int((below <= left_out * total).sum()), int((below < (1 - left_out) * total).sum()) + 1))
    (top, bottom), (left, right) = edges
    return top, left, min(bottom, mass.shape[0]), min(right, mass.shape[1])


def _limit_side(side: float, frame: Tensor) -> float:
    return min(max(side, SHORTEST_SIDE), 1.2 * max(frame.shape))
