"""How a frame of any size is laid on a backbone's grid, and how its masks come back: the aspect ratio is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vision_rope.memory.encoder import MASK_STRIDE

Size = tuple[int, int]
# How far beyond 0 and 1 frames may be that were resized with a sharp filter.
OVERSHOOT = 0.5


class FrameSizeError(ValueError):
    """A frame that has another size than the first one of its video.

    Attributes:
        number: of the frame, from 0 on.
        size, first: rows and columns of it and of the first frame.
    """

    def __init__(self, message: str, *, number: int, size: Size, first: Size) -> None:
        super().__init__(message)
        self.number = number
        self.size = size
        self.first = first


@dataclass(frozen=True)
class Framing:
    """The sizes of a frame on its way through a segmenter; the padding is below and on the right.

    Attributes: frame, resized, padded: (height, width) in pixels, as it came, as it is looked at, with the padding.
    """

    frame: Size
    resized: Size
    padded: Size

    @staticmethod
    def fit(frame: Size, stride: int, image_size: int | None) -> Framing:
        """The framing of frames of a size.

        Args:
            stride: the padded size is a multiple of it.
            image_size: the long side that frames are resized to; None leaves them as they are.

        Raises: ValueError for an image_size that is no number of pixels.
        """
        if image_size is None:
            resized = frame
        elif isinstance(image_size, bool) or not isinstance(image_size, int) or image_size < 1:
            raise ValueError(
                f"image_size is {image_size!r}; give the long side in pixels, 1 or more, or None for frames as they are"
            )
        else:
            scale = image_size / max(frame)
            resized = (max(1, round(frame[0] * scale)), max(1, round(frame[1] * scale)))
        height, width = (-(-side // stride) * stride for side in resized)
        return Framing(frame, resized, (height, width))

    def lay(self, frame: Tensor) -> Tensor:
        """Resize and pad a frame. The padding is zero, which is the mean colour of normalised frames.

        Shapes: (..., channels, height, width) -> (..., channels, *padded)
        """
        height, width = self.padded
        return functional.pad(resize(frame, self.resized), (0, width - self.resized[1], 0, height - self.resized[0]))

    def lay_points(self, points: Tensor) -> Tensor:
        """Points (x, y) in pixels of the frame as shares of the padded one, from the edge of the first pixel on."""
        scale = points.new_tensor([self.resized[1] / self.frame[1], self.resized[0] / self.frame[0]])
        return (points * scale + 0.5) / points.new_tensor([self.padded[1], self.padded[0]])

    def lay_mask(self, mask: Tensor, grid: Size) -> Tensor:
        """Masks as the memory encoder sees them: 16 cells along an axis for each cell of the grid.

        Args:
            grid: (rows, columns) of the padded frame.

        Shapes: bool (objects, height, width) -> float (objects, 1, 16 * rows, 16 * columns), 0 or 1
        """
        laid = self.lay(mask[:, None].float())
        size = (MASK_STRIDE * grid[0], MASK_STRIDE * grid[1])
        return choose_cells(resize(laid, size)).float()

    def lift(self, mask_logits: Tensor) -> Tensor:
        """Logits of a grid as those of the frame's pixels.

        Shapes: (objects, 1, h, w) -> (objects, height, width)
        """
        x = functional.interpolate(mask_logits, size=self.padded, mode="bilinear", align_corners=False)
        return resize(x[..., : self.resized[0], : self.resized[1]], self.frame)[:, 0]


def choose_cells(shares: Tensor) -> Tensor:
    """The cells that stand for a mask: those that it fills half; where there are none, those that it fills most.

    A small object must not become one that is not there.

    Shapes: (..., height, width), from 0 to 1 -> bool (..., height, width)
    """
    most = shares.amax((-2, -1), keepdim=True)
    return (shares > 0) & (shares >= most.clamp(max=0.5))


def read_frame(frame: Any, device: torch.device) -> Tensor:
    """A frame as numbers from 0 to 1.

    Args:
        frame: an array or PIL image (height, width, 3), or a tensor (3, height, width); uint8, or floating point in
            [0, 1].

    Shapes: -> float32 (3, height, width)
    Raises: ValueError for anything else.
    """
    if isinstance(frame, Tensor):
        x = frame
    else:
        import numpy as np

        array = np.asarray(frame)
        if array.ndim != 3 or array.shape[-1] != 3:
            raise ValueError(
                f"frame has shape {array.shape}; an array must be (height, width, 3) in RGB, a tensor (3, height, "
                "width)"
            )
        # A copy: arrays of pictures and videos are often not writable, which torch warns of.
        x = torch.from_numpy(np.array(array)).permute(2, 0, 1)
    if x.ndim != 3 or x.shape[0] != 3 or 0 in x.shape:
        raise ValueError(
            f"frame has shape {tuple(x.shape)}; a tensor must be (3, height, width) in RGB, an array (height, width, 3)"
        )
    if x.dtype == torch.uint8:
        # The small numbers travel to the device.
        return x.to(device, non_blocking=True).float() / 255
    if not x.is_floating_point():
        raise ValueError(f"frame has dtype {x.dtype}; it must be uint8, or floating point from 0 to 1")
    # The answer of a GPU would have to be waited for.
    if x.device.type == "cpu":
        low, high = x.min().item(), x.max().item()
        if not -OVERSHOOT <= low <= high <= 1 + OVERSHOOT:
            raise ValueError(
                f"frame has values from {low:g} to {high:g}; floats must be from 0 to 1: divide by 255, or undo the "
                "normalisation"
            )
    return x.to(device, torch.float32, non_blocking=True)


def resize(x: Tensor, size: Size) -> Tensor:
    """Pictures of another size, bilinear and antialiased; those that have it stay as they are.

    Shapes: floating point (height, width), with channels and a batch in front or not -> the same, of the size
    """
    if x.shape[-2:] == torch.Size(size):
        return x
    batch = x[(None,) * (4 - x.ndim)]
    out = functional.interpolate(batch, size=size, mode="bilinear", align_corners=False, antialias=True)
    return out.view(*x.shape[:-2], *size)
