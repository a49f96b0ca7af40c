"""timm's VisionTransformerSAM: some blocks attend to the whole grid, the others inside windows of it.

Global blocks get the positions of the grid, windowed ones those of a window, padding of the last windows included.
Relative biases stay, with their keys, and go on working beside the new encoding; they go with position="none", unless
keep_absolute=True keeps all of the model's own. Windows stay whatever the encoding: with "none" too, the model sees
which patches share one. With position="own" each kind of block has the rotation that timm gave it.

As timm's, a model takes images of any size that its patches divide; `set_input_size`, which timm's other models have,
makes a size its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import PatchDropout, resample_abs_pos_embed_nhwc
from timm.models import vision_transformer_sam as sam
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vision_rope.convert.attention import Arrangement, Position, PositionedAttention
from vision_rope.convert.conversion import Layers, accept_any_size, convert_model
from vision_rope.convert.input_size import check_input_size
from vision_rope.convert.model import PositionedModel
from vision_rope.convert.own_bias import drop_biases, has_biases, refuse_linear
from vision_rope.convert.own_rope import OWN, own_rope, translate
from vision_rope.convert.position import fit_grid
from vision_rope.coordinates import Coordinates
from vision_rope.positions import grid_positions
from vision_rope.relative import RelativeEncoding
from vision_rope.rope import Rope
from vision_rope.rotation import Rotation, rotate
from vision_rope.sinusoidal import Sinusoidal


class PositionedSamAttention(PositionedAttention, sam.Attention):
    """timm's Attention of SAM with positions; its own rotation is not used."""

    # As timm's own rotation turns them.
    rotate_half = False
    rel_pos_h: nn.Parameter
    rel_pos_w: nn.Parameter

    def forward(self, x: Tensor, rope: Position | None = None) -> Tensor:  # type: ignore[override]
        """Shapes: x (batch, rows, columns, dim) -> the same."""
        assert not isinstance(rope, Arrangement), "forward_packed refuses models with windows"
        grid = x.shape[1], x.shape[2]
        tokens = x.flatten(1, 2)
        bias = None
        if self.use_rel_pos:
            # Biases say what a query finds at an offset: they are for queries as they are, wherever they stand.
            q, k, v = self._split(tokens, None)
            bias = self._own_bias(q, grid)
            if isinstance(rope, Rotation):
                q, k = rotate(q, rope), rotate(k, rope)
        else:
            q, k, v = self._split(tokens, rope)
        attended = self._attend(q, k, v, position=rope, mask=bias, is_causal=False)
        return self._project(attended, tokens).unflatten(1, grid)

    def _own_bias(self, q: Tensor, grid: tuple[int, int]) -> Tensor:
        """Shapes: q (batch, heads, rows * columns, head_dim) -> (batch, heads, rows * columns, rows * columns)"""
        by_row, by_column = (
            offset_vectors(table, length) for table, length in zip((self.rel_pos_h, self.rel_pos_w), grid, strict=True)
        )
        q = q.flatten(0, 1).unflatten(1, grid)
        rows = torch.einsum("nrcd,rkd->nrck", q, by_row)
        columns = torch.einsum("nrcd,ckd->nrck", q, by_column)
        bias = rows[..., :, None] + columns[..., None, :]
        return bias.flatten(3, 4).flatten(1, 2).unflatten(0, (-1, self.num_heads))


def offset_vectors(table: Tensor, length: int) -> Tensor:
    """A query's learned vector for each key along an axis, by how far away it is.

    Shapes: table (offsets, head_dim) -> (length, length, head_dim)
    """
    table = resample_offsets(table, length)
    places = torch.arange(length, device=table.device)
    return table[places[:, None] - places + (length - 1)]


def resample_offsets(table: Tensor, length: int) -> Tensor:
    """A table of offsets for an axis of that length.

    Shapes: (offsets, head_dim) -> (2 * length - 1, head_dim)
    """
    offsets = 2 * length - 1
    if table.shape[0] == offsets:
        return table
    return F.interpolate(table.t()[None], size=offsets, mode="linear")[0].t()


class PositionedSamBlock(sam.Block):
    """timm's Block of SAM that hands positions to its attention."""

    def forward(self, x: Tensor, rope: Position | None = None) -> Tensor:
        """Shapes: x (batch, rows, columns, dim) -> the same."""
        grid = x.shape[1], x.shape[2]
        parts = self.norm1(x)
        if self.window_size:
            parts = cut_windows(parts, self.window_size)
        parts = self.drop_path1(self.ls1(self.attn(parts, rope=rope)))
        if self.window_size:
            parts = join_windows(parts, grid)
        x = (x + parts).flatten(1, 2)
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x.unflatten(1, grid)


# Not timm's functions, whose remainders take a compiler for all sizes three times as long.
def cut_windows(x: Tensor, size: int) -> Tensor:
    """Square windows of a map, with zeros where the last ones reach beyond it.

    Shapes: (batch, rows, columns, dim) -> (batch * windows, size, size, dim)
    """
    batch, rows, columns, dim = x.shape
    down, across = (rows + size - 1) // size, (columns + size - 1) // size
    x = F.pad(x, (0, 0, 0, across * size - columns, 0, down * size - rows))
    return x.view(batch, down, size, across, size, dim).transpose(2, 3).reshape(-1, size, size, dim)


def join_windows(windows: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of `cut_windows`, for a map of that grid.

    Shapes: (batch * windows, size, size, dim) -> (batch, rows, columns, dim)
    """
    rows, columns = grid
    size, dim = windows.shape[-2:]
    down, across = (rows + size - 1) // size, (columns + size - 1) // size
    x = windows.view(-1, down, across, size, size, dim).transpose(2, 3)
    return x.reshape(-1, down * size, across * size, dim)[:, :rows, :columns].contiguous()


class PositionedVisionTransformerSAM(PositionedModel, sam.VisionTransformerSAM):
    """timm's VisionTransformerSAM with a position encoding of this package; made by `add_position`.

    Attributes:
        window_coordinates: how positions are laid in a window, where that is not as they are laid in the grid.
    """

    num_prefix_tokens = 0
    window_coordinates: Coordinates | None = None
    neck: nn.Module

    def forward_features(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Shapes: images (batch, channels, height, width) -> maps (batch, num_features, rows, columns).

        Raises: ValueError where the patch size does not divide the image.
        """
        return self.forward_patches(self.embed_patches(x))

    def forward_patches(self, patches: Tensor, *, kept: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Everything after the patch embedding: positions, blocks and the neck.

        Shapes: patches (batch, rows, columns, dim) -> maps (batch, num_features, rows, columns)
        Raises: ValueError where patches are left out, of which windows have none to spare.
        """
        if kept is not None:
            raise ValueError(
                "patches were left out, and the windows of a VisionTransformerSAM need all of a grid; encode all"
            )
        x, positions = self._place(patches)
        for block, position in zip(self.blocks, positions, strict=False):
            x = self._run_block(block, x, position)
        return self.neck(x.permute(0, 3, 1, 2))

    def forward_intermediates(  # type: ignore[override]
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Outputs of chosen blocks, with the arguments and return values of timm's method of this name."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is {output_fmt!r}; a VisionTransformerSAM has maps alone: use NCHW")
        take, last = feature_take_indices(len(self.blocks), indices)
        x, positions = self._place(self.embed_patches(x))
        maps = []
        blocks = self.blocks[: last + 1] if stop_early else self.blocks
        for index, (block, position) in enumerate(zip(blocks, positions, strict=False)):
            x = self._run_block(block, x, position)
            if index in take:
                taken = x.permute(0, 3, 1, 2)
                maps.append(self.neck(taken) if norm else taken)
        return maps if intermediates_only else (self.neck(x.permute(0, 3, 1, 2)), maps)

    def set_extension(self, method: str, train_size: Sequence[int] | None = None, **knobs: Any) -> None:
        """See `vision_rope.set_extension`; global blocks alone are extended, since windows never grow."""
        if method != "none" and all(block.window_size for block in self.blocks):
            raise ValueError(
                f"{method} means nothing for this model: all of its blocks attend inside windows of one size; use none"
            )
        super().set_extension(method, train_size, **knobs)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Make a size the model's own: what each forward pass would resample for it is resampled once for all.

        Units: pixels, one number or (height, width).
        Raises: ValueError where the patch size does not divide the image.
        """
        check_input_size(self.patch_embed, img_size, patch_size)
        self.patch_embed.set_input_size(img_size=img_size, patch_size=patch_size)
        rows, columns = self.patch_embed.grid_size
        with torch.no_grad():
            if self.pos_embed is not None:
                self.pos_embed = _renew(self.pos_embed, resample_abs_pos_embed_nhwc(self.pos_embed, [rows, columns]))
            for block in self.blocks:
                layer: Any = block.attn
                if layer.use_rel_pos and not block.window_size:
                    layer.rel_pos_h = _renew(layer.rel_pos_h, resample_offsets(layer.rel_pos_h, rows))
                    layer.rel_pos_w = _renew(layer.rel_pos_w, resample_offsets(layer.rel_pos_w, columns))
        update_model_input_size(self, self.patch_embed.img_size, patch_size=patch_size)

    def fit_absolute(self, embedding: Tensor, grid: tuple[int, int]) -> Tensor:
        """See `PositionedModel.fit_absolute`.

        Shapes: (1, rows, columns, dim) -> that of this model's pos_embed
        """
        if tuple(embedding.shape[1:3]) != tuple(grid):
            raise ValueError(f"embedding has shape {tuple(embedding.shape)}, but the grid is {grid[0]} x {grid[1]}")
        return resample_abs_pos_embed_nhwc(embedding, list(self.patch_embed.grid_size))

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Shapes: patches (batch, rows, columns, dim) -> the same, absolute embeddings added."""
        grid = x.shape[1], x.shape[2]
        if isinstance(self.position, Sinusoidal):
            x = x + self.position(*grid, device=x.device).to(x.dtype).unflatten(0, grid)
        if self.pos_embed is not None:
            x = x + resample_abs_pos_embed_nhwc(self.pos_embed, list(grid))
        return self.pos_drop(x)

    def _positions(
        self, grid: tuple[int, ...], kept: Tensor | None, device: torch.device, times: Tensor | None = None
    ) -> Sequence[Position | None]:
        """What each block gets: for its whole grid, or for a window."""
        whole = super()._positions(grid, kept, device)
        sizes: list[Any] = [block.window_size for block in self.blocks]
        in_windows = {size: self._window_positions(size, device) for size in dict.fromkeys(sizes) if size}
        return [in_windows[size][layer] if size else whole[layer] for layer, size in enumerate(sizes)]

    def _window_positions(self, size: int, device: torch.device) -> Sequence[Position | None]:
        encoding = self._encoding_in_attention()
        if encoding is None:
            return [None] * len(self.blocks)
        if isinstance(encoding, RelativeEncoding):
            return encoding(grid_positions(size, size, device=device), (size, size))
        coordinates = self.window_coordinates or encoding.coordinates
        positions = coordinates.positions(*fit_grid((size, size), encoding.axes), device=device)
        # Windows never grow, whatever the image: context extension has no part in them.
        return encoding.rotations(coordinates.augment(positions) if self.training else positions)

    def _run_block(self, block: nn.Module, x: Tensor, position: Position | None) -> Tensor:  # type: ignore[override]
        if self.grad_checkpointing and not torch.jit.is_scripting():
            # All blocks share the graph of learned positions, which reentrant checkpoints would walk once a block.
            return checkpoint(block, x, rope=position, use_reentrant=False)
        return block(x, rope=position)


LAYERS = Layers({sam.Block: PositionedSamBlock}, {sam.Attention: PositionedSamAttention})


def convert(model: Any, position: str | Rope, *, keep_absolute: bool = False, **options: Any) -> PositionedModel:
    """Convert a model of this family in place, see `vision_rope.add_position`."""
    refuse_linear(model, options)
    if isinstance(model.patch_drop, PatchDropout):
        raise ValueError(
            f"patch_drop_rate is {model.patch_drop.prob}, and windows need all patches of a grid; build the timm model "
            "with patch_drop_rate=0"
        )
    chosen = own_rope(model) if position == OWN else position
    window = translate(model.rope_window, len(model.blocks)) if position == OWN else None
    positioned = convert_model(
        model,
        PositionedVisionTransformerSAM,
        chosen,
        tuple(model.patch_embed.grid_size),
        # Where there is none to keep, biases are kept.
        has_absolute=model.pos_embed is not None or (keep_absolute and has_biases(model)),
        known=LAYERS,
        keep_absolute=keep_absolute,
        **options,
    )
    accept_any_size(model)
    model.window_coordinates = None if window is None else window.coordinates
    model.rope_global = model.rope_window = None
    for block in model.blocks:
        block.attn.rope = None
    if positioned.position_name == "none" and not keep_absolute:
        drop_biases(model)
    return positioned


def _renew(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach(), requires_grad=parameter.requires_grad)
