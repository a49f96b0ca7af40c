"""`Rope`, a rotary position embedding: frequencies, coordinates, and the rotations they make together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_rope.coordinates import Coordinates
from vision_rope.extension import Extension, check_grid, check_method, compute_extension
from vision_rope.frequencies import Ladder, angles, frequency_matrix
from vision_rope.rotation import PAIRINGS, Pairing, Rotation, outer_rotations
from vision_rope.turning import is_transformed

# method, trained grid and options, as `extend` takes them
ExtensionChoice = tuple[str, tuple[int, ...], dict[str, Any]]


class Rope(nn.Module):
    """A rotary position embedding: frequencies (how fast pairs turn) and coordinates (where the tokens of a grid sit).

    Fixed frequencies are numbers, not state: nothing of them is in the state dict, and no cast or move changes them.
    Learned frequencies are one Parameter, float32 whatever the model is cast to.

    Attributes:
        axes: number of axes of a position.
        head_dim: channels of a head; head_dim / 2 pairs turn.
        pairing: which channels form a pair, see `Rotation`.
        coordinates: how positions are laid on a grid.
        ladders: the ladder of each axis; None where frequencies are learned.
        name: name of the preset.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        axes: int,
        pairing: Pairing = "interleaved",
        ladders: Sequence[Ladder] | None = None,
        initial_frequencies: Callable[..., Tensor] | None = None,
        depth: int = 1,
        coordinates: Coordinates | None = None,
        name: str = "custom",
    ) -> None:
        """Give either `ladders`, one an axis, or `initial_frequencies`, a function that draws
        (depth, heads, axes, pairs) and takes a generator."""
        super().__init__()
        if pairing not in PAIRINGS:
            raise ValueError(f"pairing is {pairing!r}; choose one of {', '.join(PAIRINGS)}")
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; channels turn in pairs, so it must be even")
        if (ladders is None) == (initial_frequencies is None):
            raise ValueError("give either ladders (fixed frequencies) or initial_frequencies (learned ones)")
        self.head_dim = head_dim
        self.axes = axes
        self.pairing: Pairing = pairing
        self.depth = depth
        self.coordinates = coordinates or Coordinates()
        self.ladders = None if ladders is None else tuple(ladders)
        self.name = name
        self.extension: Extension | None = None
        self._initial_frequencies = initial_frequencies
        self._matrix: Tensor | None = None
        self._kept: tuple[tuple[Any, ...], list[Rotation]] | None = None
        if self.ladders is not None:
            self.register_parameter("learned_frequencies", None)
            self._matrix = self._build_matrix(torch.device("cpu"))
        else:
            assert initial_frequencies is not None
            self.learned_frequencies: nn.Parameter | None = nn.Parameter(initial_frequencies())

    @property
    def frequencies(self) -> Tensor:
        """(depth or 1, heads or 1, axes, pairs) float32, in radians a unit of position; a Parameter where learned."""
        if self.learned_frequencies is not None and self.extension is None:
            return self.learned_frequencies
        device = None if self.learned_frequencies is None else self.learned_frequencies.device
        return self._extended_frequencies(device or torch.device("cpu"), self.extension).float()

    def positions(self, *size: int, times: Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
        """Positions of a grid in this embedding's own coordinates.

        Args:
            times: of three axes, where the steps sit in time instead of at 0, 1, 2, ...; fractions are welcome.

        Shapes: size (n), (h, w) or (t, h, w), times (t) or (batch, t) -> (tokens, axes), with the batch in front where
            given.
        Raises: ValueError where the size has another number of axes than the embedding, or the times do not fit.
        """
        self._check_size(size)
        self._check_times(times, size)
        return self.coordinates.positions(*size, times=times, device=device)

    def forward(self, positions: Tensor, layer: int = 0) -> Rotation:
        """The rotation of tokens at these positions in one layer.

        Shapes: positions (tokens, axes) or (batch, tokens, axes) -> cos, sin (heads or 1, tokens, head_dim / 2),
            with the batch in front where given.
        Raises: ValueError where positions have another number of axes, or the layer does not exist.
        """
        if not 0 <= layer < self.depth:
            raise ValueError(f"layer is {layer}; this rotary embedding has layers 0 to {self.depth - 1}")
        frequencies = self._extended_frequencies(positions.device, self.extension)
        scale = 1.0 if self.extension is None else self.extension.attention_scale
        return self._rotation(positions, frequencies[layer if len(frequencies) > 1 else 0], scale)

    def rotations(self, positions: Tensor, extension: Extension | None = None) -> list[Rotation]:
        """One rotation a layer, computed together; once in a forward pass of a model.

        Args:
            positions: as for a call.
            extension: context extension for this call, instead of the one that `extend` gave this embedding.
        """
        extension = self.extension if extension is None else extension
        frequencies = self._extended_frequencies(positions.device, extension)
        scale = 1.0 if extension is None else extension.attention_scale
        if len(frequencies) == 1:
            return [self._rotation(positions, frequencies[0], scale)] * self.depth
        return [self._rotation(positions, layer, scale) for layer in frequencies]

    def grid_rotations(
        self,
        *size: int,
        num_prefix_tokens: int = 0,
        repeats: int = 1,
        times: Tensor | None = None,
        augment: bool = False,
        extension: ExtensionChoice | Extension | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> list[Rotation]:
        """One rotation a layer for all tokens of a grid, prefix tokens in front; the fast way of `rotations`.

        A turn by a sum of angles is a product of turns, so cos and sin are computed for the coordinates of each axis
        alone. Where nothing is learned and nothing drawn, the rotations of the last grid are kept and returned again:
        do not write into them.

        Args:
            repeats: this many such grids, one after the other.
            times: as of `positions`; such rotations are not kept.
            augment: move the coordinates at random, as training does where the embedding's coordinates say so.
            extension: method, trained grid and options of a context extension for this call, as `extend` takes them,
                or one that `extension_for` has made.
            generator: source of the random numbers of `augment`.

        Shapes: size (n), (h, w) or (t, h, w), times (t) or (batch, t) -> cos, sin (heads or 1, num_prefix_tokens +
            repeats * tokens, head_dim / 2), with the batch in front where given.
        Raises: ValueError where the size has another number of axes than the embedding.
        """
        self._check_size(size)
        self._check_times(times, size)
        device = torch.get_default_device() if device is None else torch.device(device)
        drawn = augment and self.coordinates.augmented
        fleeting = drawn or times is not None or isinstance(extension, Extension)
        key = None if fleeting else self._key((repeats, *size), num_prefix_tokens, extension, device)
        kept = self._kept  # read once: another thread may replace it
        if key is not None and kept is not None and kept[0] == key:
            return kept[1]
        # Inference tensors kept here would break the training that follows.
        with nullcontext() if key is None else torch.inference_mode(False):
            chosen = self.extension
            if isinstance(extension, Extension):
                chosen = extension
            elif extension is not None:
                method, train_size, knobs = extension
                chosen = self.extension_for(method, train_size=train_size, size=size, **knobs)
            axes = self.coordinates.axes(*size, times=times, device=device)
            if drawn:
                axes = self.coordinates.augment_axes(axes, generator)
            frequencies = self.coordinates.along_axes(self._extended_frequencies(device, chosen))
            scale = 1.0 if chosen is None else chosen.attention_scale
            angle = _angles_of_axes(axes, frequencies)
            if repeats > 1:
                angle, size = F.pad(angle, (0, 0, repeats, 0)), (repeats, *size)
            by_layer = outer_rotations(angle, size, self.pairing, num_prefix_tokens, scale)
        rotations = by_layer * (self.depth // len(by_layer))
        # A fake tensor, which tools trace with, would outlive its tool.
        if key is not None and type(rotations[0].cos) is Tensor:
            self._kept = (key, rotations)
        return rotations

    def forget(self) -> None:
        """Drop the rotations of the last grid, which `grid_rotations` keeps."""
        self._kept = None

    def extension_for(
        self, method: str, *, train_size: Sequence[int], size: Sequence[int], **knobs: Any
    ) -> Extension | None:
        """What a context-extension method does to this embedding; None where it changes nothing. See `extend`."""
        check_method(
            method,
            knobs,
            has_ladder=self.ladders is not None,
            bounded=self.coordinates.bounded,
            subject=self.name,
        )
        return compute_extension(
            method,
            ladders=self.ladders,
            pairs=self.head_dim // 2,
            train_size=check_grid("train_size", train_size, self.axes, self.name),
            size=check_grid("size", size, self.axes, self.name),
            normalize=self.coordinates.normalize,
            knobs=knobs,
        )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw learned frequencies anew, for instance after a model built on "meta" got its memory."""
        if self.learned_frequencies is not None and self._initial_frequencies is not None:
            with torch.no_grad():
                self.learned_frequencies.copy_(self._initial_frequencies(generator=generator))

    def extra_repr(self) -> str:
        kind = "learned" if self.ladders is None else f"base={', '.join(f'{l.base:g}' for l in self.ladders)}"
        extension = "" if self.extension is None else f", extension=({self.extension.describe()})"
        return f"{self.name}, head_dim={self.head_dim}, axes={self.axes}, {kind}, pairing={self.pairing!r}{extension}"

    def _check_size(self, size: Sequence[int]) -> None:
        if len(size) != self.axes:
            raise ValueError(
                f"{self.name} has {self.axes} {'axis' if self.axes == 1 else 'axes'} and the grid {tuple(size)} has "
                f"{len(size)}; give one length for each axis, rows before columns"
            )

    def _check_times(self, times: Tensor | None, size: Sequence[int]) -> None:
        if times is None:
            return
        if self.axes != 3:
            raise ValueError(f"times are given and {self.name} has no axis of time; leave them out")
        if times.ndim not in (1, 2) or times.shape[-1] != size[0]:
            raise ValueError(
                f"times have shape {tuple(times.shape)} and the grid {tuple(size)} has {size[0]} steps; give one a "
                f"step: ({size[0]}), or (batch, {size[0]}) where samples differ"
            )

    def _key(
        self, size: Sequence[int], num_prefix_tokens: int, extension: Any, device: torch.device
    ) -> tuple[Any, ...] | None:
        """Everything that the rotations of a grid depend on; None where they may not be kept."""
        tracing = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed()
        if self.learned_frequencies is not None or tracing:
            return None
        stream = None
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return None  # a CUDA graph would read memory that is freed when another grid comes
            # Only the stream that wrote a table may read it without waiting.
            stream = torch.cuda.current_stream(device).cuda_stream
        own = (self.coordinates, self.ladders, self.pairing, self.depth, self.extension)
        return (tuple(size), num_prefix_tokens, repr(extension), device, stream, own)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and files hold no table.
        return {**self.__dict__, "_kept": None}

    def _rotation(self, positions: Tensor, frequencies: Tensor, attention_scale: float) -> Rotation:
        # Heads stand between batch and tokens: positions get that axis, frequencies (heads or 1, axes, pairs) have it.
        angle = angles(positions.unsqueeze(-3), frequencies)
        return Rotation(angle.cos().float(), angle.sin().float(), self.pairing, attention_scale)

    def _extended_frequencies(self, device: torch.device, extension: Extension | None) -> Tensor:
        """(depth or 1, heads or 1, axes, pairs) on the device: float64 where fixed, float32 where learned."""
        if self.learned_frequencies is not None:
            frequencies: Tensor = self.learned_frequencies
            if frequencies.dtype != torch.float32:
                raise ValueError(
                    f"the learned frequencies of {self.name} reached the forward pass as {frequencies.dtype}, which "
                    "turns pairs by wrong angles; under FSDP2 give the Rope module its own group in float32 "
                    "(vision_rope.parallel.shard does)"
                )
        else:
            kept = self._matrix  # read once: another thread may replace it
            if kept is None or kept.device != device:
                # Inference tensors kept here would break the training that follows.
                with torch.inference_mode(False):
                    kept = self._build_matrix(device)
                if type(kept) is Tensor:
                    self._matrix = kept
            frequencies = kept
        if extension is None:
            return frequencies
        return extension.apply(frequencies)

    def _build_matrix(self, device: torch.device) -> Tensor:
        assert self.ladders is not None
        # float64, so that cos and sin are right to the last bit of float32; MPS has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return frequency_matrix(self.ladders, self.head_dim // 2)[None, None].to(device=device, dtype=dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        """Move with the model, but stay float32: `model.bfloat16()` may not touch angles."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype != torch.float32:
                return tensor.to(device=moved.device, dtype=torch.float32)
            return moved

        super()._apply(move, recurse)
        if self.ladders is not None and self._matrix is not None:
            device = fn(torch.empty(0, device=self._matrix.device)).device
            if device != self._matrix.device:
                self._matrix = self._build_matrix(device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # With assign=True the loaded tensor becomes the Parameter: a checkpoint saved in bfloat16 must not make it one.
        key = prefix + "learned_frequencies"
        if key in state_dict:
            state_dict[key] = state_dict[key].float()
        super()._load_from_state_dict(state_dict, prefix, *args)


def _angles_of_axes(axes: Sequence[Tensor], frequencies: Tensor) -> Tensor:
    """The angles that the coordinates of each axis alone turn by, an axis after the other.

    Shapes: axes one tensor each, the first (steps) or (batch, steps), frequencies (layers, heads or 1, axes, pairs) ->
        (layers, heads or 1, sum of lengths, pairs), with the batch behind the layers where given
    """
    by_axis = frequencies.unsqueeze(-2).unbind(-3)
    if axes[0].ndim == 1:
        return torch.cat([axis.unsqueeze(-1) * f for axis, f in zip(axes, by_axis, strict=True)], dim=-2)
    batch = len(axes[0])
    beside = zip((axes[0][:, None], *axes[1:]), by_axis, strict=True)
    parts = [axis.unsqueeze(-1) * f.unsqueeze(1) for axis, f in beside]
    return torch.cat([part.expand(-1, batch, -1, -1, -1) for part in parts], dim=-2)


def extend(rope: Rope, method: str, *, train_size: Sequence[int], size: Sequence[int], **knobs: Any) -> Rope:
    """A rotary embedding for a larger grid than the one it was trained on.

    The factor of each axis is max(1, new / trained): a smaller size changes nothing. Learned frequencies stay shared
    with the original, so that training one trains both.

    Args:
        method: a name of `vision_rope.extension.EXTENSIONS`: none, interpolate, ntk, dynamic-ntk, ntk-by-parts, yarn,
            llama3, base, pitch.
        train_size: grid of tokens in training, (n), (h, w) or (t, h, w).
        size: grid of tokens now.
        knobs: options of the method, for instance beta_fast of yarn; factors="max" gives all axes the largest factor.

    Raises: ValueError where the method means nothing for this embedding, with the reason.
    """
    if rope.extension is not None:
        raise ValueError(f"{rope.name} is extended already; extend the original rotary embedding instead")
    extended = copy.copy(rope)
    # copy.copy shares the dictionaries of Parameters and submodules; each module must own its own.
    extended._parameters = dict(rope._parameters)
    extended.extension = rope.extension_for(method, train_size=train_size, size=size, **knobs)
    return extended
