"""Clips of objects made from photographs: things cut out of some move and bend over another, behind and before others.

Places are x, y in short sides of the picture from its upper left corner; so are lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vision_rope.config import ObjectsConfig
from vision_rope.data.cutouts import SmallPhotographs, draw_shape, grow_region, pixel_places, soften
from vision_rope.data.randomness import derive_seed
from vision_rope.data.segmented_clips import SegmentedClip, SegmentedSource, choose_objects
from vision_rope.data.sources import ImageSource
from vision_rope.data.video_sources import NOMINAL_FPS

# Share of the occluders that are bars, and the range of a bar's half width.
BARS = 0.4
BAR_WIDTHS = (0.03, 0.1)
# What must be seen of an object in the first frame, as a share of the short side's square: a rim shows nobody what is
# meant.
VISIBLE = 0.01
# Times that a clip is made anew where doubles and occluders hide all objects in its first frame.
TRIES = 4


@dataclass(frozen=True)
class Motion:
    """How a cut-out lies in each frame: its own points, seen from its middle, are stretched, turned, and moved.

    Attributes:
        centre: (frames, 2), where the cut-out's middle is.
        size: (frames,), how many times as large as it was cut out.
        stretch: (frames,), times as wide, and as many times less high.
        angle: (frames,), clockwise in radians.
    """

    centre: Tensor
    size: Tensor
    stretch: Tensor
    angle: Tensor

    def undo(self) -> Tensor:
        """From a point's offset from the centre in the picture to that in the cut-out, (frames, 2, 2)."""
        cosine, sine = self.angle.cos(), self.angle.sin()
        wide, high = self.size * self.stretch, self.size / self.stretch
        return torch.stack((cosine / wide, sine / wide, -sine / high, cosine / high), dim=-1).unflatten(-1, (2, 2))


@dataclass(frozen=True)
class Bending:
    """How a cut-out bends: two shears by waves, one after the other, which no strength makes fold.

    Attributes:
        strength: most that a point moves.
        length: of a wave.
        phase: (2, frames) of each shear's wave, in radians.
    """

    strength: float
    length: float
    phase: Tensor


@dataclass(frozen=True)
class Layer:
    """A cut-out, its motion, and the id of its object, 0 for what is not to be followed.

    Attributes:
        picture: (3, height, width), pixels 0 to 255.
        cover: (height, width), how much of each pixel belongs to it.
        origin: (2,), its middle in the picture it is cut out of.
    """

    picture: Tensor
    cover: Tensor
    origin: Tensor
    motion: Motion
    bending: Bending
    object_id: int = 0


class PseudoVideoSource(SegmentedSource):
    """Clips made from the photographs of an image source, one before each as its background.

    All follows from the sample's generator, in evaluation from the index alone.

    Args:
        photographs: the source of images.
        num_frames: frames of a clip.
        objects: what is drawn.
        size: of the frames, (height, width).
    """

    def __init__(
        self, photographs: ImageSource, num_frames: int, objects: ObjectsConfig, size: tuple[int, int]
    ) -> None:
        super().__init__(f"pseudo:{photographs.name}", num_frames, objects.num_objects)
        self.licence = photographs.licence
        self._photographs = photographs
        self._small = SmallPhotographs(photographs, size)
        self._objects = objects

    def __len__(self) -> int:
        return len(self._photographs)

    def path(self, index: int) -> str:
        """The background's."""
        return self._photographs.path(index)

    def read(self, index: int, generator: torch.Generator | None = None) -> tuple[SegmentedClip, int]:
        """See `ClipSource.read`."""
        generator = generator or torch.Generator().manual_seed(derive_seed(index))
        for _ in range(TRIES):
            draw = _Draw(self._objects, self._small, self.num_frames, generator)
            frames, ids = compose(draw.background(index), draw.layers())
            ids = choose_objects(ids, least=math.ceil(VISIBLE * min(self._small.size) ** 2))
            if ids.any():
                break
        seconds = torch.arange(self.num_frames, dtype=torch.float64) / NOMINAL_FPS
        return SegmentedClip(draw.finish(frames), ids, seconds), 0


class _Draw:
    """One clip's random choices."""

    def __init__(
        self, objects: ObjectsConfig, photographs: SmallPhotographs, num_frames: int, generator: torch.Generator
    ) -> None:
        self._objects = objects
        self._photographs = photographs
        self._generator = generator
        self._times = torch.arange(num_frames)
        height, width = photographs.size
        self._extent = torch.tensor([width, height]) / min(height, width)

    def background(self, index: int) -> Layer:
        """A photograph that pans, turns and zooms itself, a bit larger than the picture."""
        size = self._between(1.1, 1.4) * (self._objects.growth * self._normal() / 2 * self._times).exp()
        pan = self._objects.speed * self._normal(2) * self._times[:, None]
        still = torch.ones(len(self._times))
        angle = math.radians(self._objects.turn) / 2 * self._normal() * self._times
        picture = self._photographs[index].float()
        middle = self._extent / 2
        return Layer(picture, still, middle, Motion(middle + pan, size, still, angle), self._bending(0.0))

    def layers(self) -> list[Layer]:
        """Things in their order from back to front, occluders last; at least one thing has an id."""
        objects = self._objects
        num_ids = self._whole(1, objects.num_objects)
        things: list[Layer] = []
        for number in range(1, objects.num_objects + 1):
            thing = self._thing(number if number <= num_ids else 0)
            things.append(thing)
            if self._happens(objects.look_alikes):
                things.append(self._double(thing))
        order = torch.randperm(len(things), generator=self._generator).tolist()
        occluders = [self._occluder(things[0])] if self._happens(objects.occluders) else []
        return [things[place] for place in order] + occluders

    def finish(self, frames: Tensor) -> Tensor:
        """Brightness, blur and noise over all; float (frames, 3, height, width) -> uint8."""
        objects = self._objects
        middle = (len(self._times) - 1) / 2
        drift = objects.drift * float(self._normal()) * (self._times - middle) / max(2 * middle, 1.0)
        frames = frames * (1 + drift)[:, None, None, None]
        if self._happens(objects.blur):
            frames = F.avg_pool2d(frames, 3, stride=1, padding=1, count_include_pad=False)
        if objects.noise:
            strength = 255 * objects.noise * self._between(0, 1)
            frames = frames + strength * torch.randn(frames.shape, generator=self._generator)
        return frames.round_().clamp_(0, 255).to(torch.uint8)

    def _thing(self, object_id: int) -> Layer:
        radius = 0.5 * self._between(*self._objects.object_size)
        photograph = self._photographs[self._whole(0, len(self._photographs) - 1)]
        # Cut out where all of it lies in its photograph.
        origin = radius + (self._extent - 2 * radius) * self._uniform(2)
        cover = draw_shape(self._photographs.size, radius, origin, self._generator)
        if self._happens(self._objects.regions) and (region := grow_region(photograph, cover, origin)) is not None:
            cover = region
        motion = self._motion()
        if object_id and len(self._times) > 2 and self._happens(self._objects.hide):
            motion = self._leave_and_return(motion)
        return Layer(photograph.float(), cover, origin, motion, self._bending(radius), object_id)

    def _double(self, thing: Layer) -> Layer:
        """The same cut-out, with a motion of its own."""
        bending = Bending(thing.bending.strength, thing.bending.length, self._phases())
        return Layer(thing.picture, thing.cover, thing.origin, self._motion(), bending)

    def _occluder(self, target: Layer) -> Layer:
        """A bar or a blob that is in front of a thing's middle at one time after the first frame."""
        size = self._photographs.size
        angle = math.tau * float(self._uniform())
        if self._happens(BARS):
            origin = self._extent / 2
            x, _ = pixel_places(size)
            half_width = self._between(*BAR_WIDTHS)
            cover = soften(half_width - (x - origin[0]).abs(), size).expand(size)
            # Long enough to reach across the picture from any place in it.
            large = 3.0
        else:
            radius = 0.5 * self._between(*self._objects.object_size)
            origin = radius + (self._extent - 2 * radius) * self._uniform(2)
            cover, large = draw_shape(size, radius, origin, self._generator), 1.0
        meeting = self._whole(1, max(len(self._times) - 1, 1))
        # It starts from about so far away.
        velocity = torch.tensor([math.cos(angle), math.sin(angle)]) * self._between(0.5, 1.2) / meeting
        target_centre = target.motion.centre[min(meeting, len(self._times) - 1)]
        centre = target_centre + (self._times - meeting)[:, None] * velocity
        same = torch.ones(len(self._times))
        # A bar is not made wider as it is made longer.
        motion = Motion(centre, large**0.5 * same, large**-0.5 * same, angle * same)
        photograph = self._photographs[self._whole(0, len(self._photographs) - 1)]
        return Layer(photograph.float(), cover, origin, motion, self._bending(0.0))

    def _motion(self) -> Motion:
        """A walk with a heading from a place well in the picture, and steady growth, stretch and turn."""
        objects, times = self._objects, self._times
        steps = objects.speed * (self._normal(1, 2) + 0.5 * self._normal(len(times), 2))
        steps[0] = 0
        start = self._extent * (0.2 + 0.6 * self._uniform(2))
        size = (objects.growth * self._normal() * times).exp()
        stretch = (0.2 * self._normal() + objects.growth / 2 * self._normal() * times).exp()
        angle = math.radians(objects.turn) * self._normal() * times
        return Motion(start + steps.cumsum(0), size, stretch, angle)

    def _leave_and_return(self, motion: Motion) -> Motion:
        """The same motion, but far out of the picture for some frames between the first and the last."""
        leaving = self._whole(1, len(self._times) - 2)
        returning = self._whole(leaving + 1, len(self._times) - 1)
        away = ((self._times >= leaving) & (self._times < returning)).float()
        angle = math.tau * float(self._uniform())
        far = 4 * float(self._extent.max()) * torch.tensor([math.cos(angle), math.sin(angle)])
        return Motion(motion.centre + away[:, None] * far, motion.size, motion.stretch, motion.angle)

    def _bending(self, radius: float) -> Bending:
        strength = self._objects.elastic * radius * float(self._uniform())
        # One wave in its diameter.
        return Bending(strength, 2 * radius, self._phases())

    def _phases(self) -> Tensor:
        """A random one at first, and a steady change of up to a few tenths a frame."""
        return math.tau * self._uniform(2, 1) + 0.3 * self._normal(2, 1) * self._times

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def _between(self, least: float, most: float) -> float:
        return least + (most - least) * float(self._uniform())

    def _whole(self, least: int, most: int) -> int:
        """Both ends are among the choices."""
        return int(torch.randint(least, most + 1, (), generator=self._generator))

    def _happens(self, probability: float) -> bool:
        return float(self._uniform()) < probability


def compose(background: Layer, layers: list[Layer]) -> tuple[Tensor, Tensor]:
    """Paint layers over a background, each over those before it.

    A pixel has the id of the frontmost layer that covers half of it or more; the background goes on mirrored beyond
    its border.

    Shapes: float (frames, 3, height, width), pixels 0 to 255, and uint8 ids (frames, height, width)
    """
    places = find_source(background)
    frames = sample(background.picture[None], places[None], padding="reflection")[0]
    ids = torch.zeros(frames.shape[0], *frames.shape[2:], dtype=torch.uint8)
    if not layers:
        return frames, ids
    # Colours times cover: soft edges do not take in what lay around the cut-out.
    cut = torch.stack([torch.cat((layer.picture * layer.cover, layer.cover[None])) for layer in layers])
    moved = sample(cut, torch.stack([find_source(layer) for layer in layers]), padding="zeros")
    for layer, picture in zip(layers, moved, strict=True):
        cover = picture[:, 3]
        frames = frames.mul_(1 - cover[:, None]).add_(picture[:, :3])
        ids.masked_fill_(cover >= 0.5, layer.object_id)
    return frames, ids


def find_source(layer: Layer) -> Tensor:
    """The place in a layer's own picture that each pixel of each frame shows.

    Shapes: (frames, height, width, 2) as x, y
    """
    x, y = pixel_places((layer.picture.shape[1], layer.picture.shape[2]))
    undo = layer.motion.undo()
    # Rows and columns apart, which meet in one sum.
    column = x - layer.motion.centre[:, :1]
    row = y - layer.motion.centre[:, 1:]
    across = (undo[:, 0, :1] * column)[:, None] + (undo[:, 0, 1:] * row)[..., None]
    down = (undo[:, 1, :1] * column)[:, None] + (undo[:, 1, 1:] * row)[..., None]
    bending = layer.bending
    if bending.strength:
        rate = math.tau / bending.length
        across = across + bending.strength * torch.sin(rate * down + bending.phase[0, :, None, None])
        down = down + bending.strength * torch.sin(rate * across + bending.phase[1, :, None, None])
    return torch.stack((across + layer.origin[0], down + layer.origin[1]), dim=-1)


def sample(pictures: Tensor, places: Tensor, *, padding: str) -> Tensor:
    """Look pictures up, bilinearly, at places of their own in each frame.

    Shapes: pictures (layers, channels, height, width), places (layers, frames, height, width, 2) as x, y -> (layers,
        frames, channels, height, width)
    """
    height, width = pictures.shape[-2:]
    # In the units of grid_sample a picture reaches from -1 to 1.
    grid = places * (2 * min(height, width) / places.new_tensor([width, height])) - 1
    # Frames one below the other: each picture is looked up in all of them at once.
    found = F.grid_sample(pictures, grid.flatten(1, 2), padding_mode=padding, align_corners=False)
    return found.unflatten(2, (-1, height)).transpose(1, 2)
