"""`Rope`, a rotary position embedding, and the presets: published methods as choices of frequencies and positions."""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vision_rope.extension import Extension, check_method, compute_extension
from vision_rope.frequencies import Ladder, angles, check_head_dim, frequency_matrix, mixed_frequencies
from vision_rope.positions import Coordinates, Normalize
from vision_rope.rotation import PAIRINGS, Pairing, Rotation


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

    def positions(self, *size: int, device: torch.device | str | None = None) -> Tensor:
        """Positions of a grid in this embedding's own coordinates.

        Shapes: size (n), (h, w) or (t, h, w) -> (tokens, axes).
        Raises: ValueError where the size has another number of axes than the embedding.
        """
        if len(size) != self.axes:
            raise ValueError(
                f"{self.name} has {self.axes} {'axis' if self.axes == 1 else 'axes'} and the grid {size} has "
                f"{len(size)}; give one length for each axis, rows before columns"
            )
        return self.coordinates.positions(*size, device=device)

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

    def extension_for(
        self, method: str, *, train_size: Sequence[int], size: Sequence[int], **knobs: Any
    ) -> Extension | None:
        """What a context-extension method does to this embedding; None where it changes nothing. See `extend`."""
        row = check_method(
            method,
            knobs,
            has_ladder=self.ladders is not None,
            bounded=self.coordinates.bounded,
            subject=self.name,
        )
        if len(train_size) != self.axes:
            raise ValueError(
                f"train_size {tuple(train_size)} has {len(train_size)} axes and {self.name} has {self.axes}; "
                "give one for each"
            )
        return compute_extension(row, self.ladders, self.head_dim // 2, train_size, size, **knobs)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw learned frequencies anew, for instance after a model built on "meta" got its memory."""
        if self.learned_frequencies is not None and self._initial_frequencies is not None:
            with torch.no_grad():
                self.learned_frequencies.copy_(self._initial_frequencies(generator=generator))

    def extra_repr(self) -> str:
        kind = "learned" if self.ladders is None else f"base={', '.join(f'{l.base:g}' for l in self.ladders)}"
        return f"{self.name}, head_dim={self.head_dim}, axes={self.axes}, {kind}, pairing={self.pairing!r}"

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
            if self._matrix is None or self._matrix.device != device:
                # Inference tensors kept here would break the training that follows.
                with torch.inference_mode(False):
                    self._matrix = self._build_matrix(device)
            frequencies = self._matrix
        if extension is None:
            return frequencies
        return frequencies * extension.multiplier.to(device=frequencies.device, dtype=frequencies.dtype)

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


def extend(rope: Rope, method: str, *, train_size: Sequence[int], size: Sequence[int], **knobs: Any) -> Rope:
    """A rotary embedding for a larger grid than the one it was trained on.

    The factor of each axis is max(1, new / trained): a smaller size changes nothing. Learned frequencies stay shared
    with the original, so that training one trains both.

    Args:
        method: a name of `vision_rope.extension.EXTENSIONS`: none, interpolate, ntk, yarn, pitch.
        train_size: grid of tokens in training, (n), (h, w) or (t, h, w).
        size: grid of tokens now.
        knobs: options of the method, for instance beta_fast of yarn.

    Raises: ValueError where the method means nothing for this embedding, with the reason.
    """
    if rope.extension is not None:
        raise ValueError(f"{rope.name} is extended already; extend the original rotary embedding instead")
    extended = copy.copy(rope)
    # copy.copy shares the dictionaries of Parameters and submodules; each module must own its own.
    extended._parameters = dict(rope._parameters)
    extended.extension = rope.extension_for(method, train_size=train_size, size=size, **knobs)
    return extended


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
        ladders = _axial_ladders(head_dim, 100.0 if base is None else base, columns_first=False, scale=2 * torch.pi)
    elif base is not None or min_period is None or max_period is None:
        raise ValueError(
            f"base is {base}, min_period {min_period}, max_period {max_period}; give either base or both periods"
        )
    elif not 0 < min_period < max_period or head_dim < 8:
        raise ValueError(
            f"min_period is {min_period} and max_period {max_period} with head_dim {head_dim}; periods must be positive, "
            "the first the smaller one, and head_dim at least 8"
        )
    else:
        ladders = _axial_ladders(
            head_dim,
            max_period / min_period,
            columns_first=False,
            scale=2 * torch.pi / min_period,
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
        raise ValueError(f"preset is {name!r}; the presets are {', '.join(PRESETS)}{_nearest(name, PRESETS)}")
    for what, count in (("num_heads", num_heads), ("depth", depth)):
        if count < 1:
            raise ValueError(f"{what} is {count}; it must be a positive integer")
    known = PRESETS[name].options()
    for option in options:
        if option not in known:
            raise ValueError(
                f"preset {name!r} has no option {option!r}; its options are {', '.join(known)}{_nearest(option, known)}"
            )
    return PRESETS[name].build(head_dim, num_heads, depth, **options)


def presets() -> dict[str, str]:
    """Names of all presets, each with one line about it."""
    return {name: row.summary for name, row in PRESETS.items()}


def _nearest(name: str, known: Any) -> str:
    matches = cast(list[str], difflib.get_close_matches(name, list(known), n=1))
    return f"; did you mean {matches[0]!r}?" if matches else ""
