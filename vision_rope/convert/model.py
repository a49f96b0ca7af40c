"""What conversion makes of a timm model, whatever its family.

Conversion swaps classes in place: the model keeps its modules, weights and state-dict keys, and stays an instance of
its timm class, but its forward computes the positions of the patch grid once and hands each block what they mean in
its attention, a rotation or relative terms, as an argument. Nothing of that is left in a module between calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import PatchDropoutWithIndices, resample_abs_pos_embed
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vision_rope.convert.attention import Position
from vision_rope.convert.input_size import check_divisible
from vision_rope.convert.own_rope import mixed_from_timm
from vision_rope.convert.position import check_train_size, fit_grid, take_places, time_length
from vision_rope.extension import Extension, check_name
from vision_rope.positions import grid_positions, with_prefix
from vision_rope.relative import RelativeEncoding
from vision_rope.rope import ExtensionChoice, Rope
from vision_rope.sinusoidal import Sinusoidal


class Start(NamedTuple):
    """What the blocks of a model get.

    Attributes:
        tokens: (batch, prefix + patches, dim).
        positions: one a block.
        grid: rows and columns of the patches, of a video steps before them; None where images of the batch differ in
            them.
        mask: who may look at whom, as timm's `attn_mask`.
        valid: (batch, patches) boolean, False for padding; None where there is none.
    """

    tokens: Tensor
    positions: Sequence[Position | None]
    grid: tuple[int, ...] | None
    mask: Tensor | None
    valid: Tensor | None = None


class PositionedModel(nn.Module):
    """What conversion adds to a timm model: a position encoding, and grids of any size.

    Attributes:
        position: the encoding as a module: a Rope, a Sinusoidal, a RelativeEncoding, or None (none, learned).
        position_name: the encoding's name.
        attention_name: softmax or linear.
        train_grid: grid of patches the model was built for: (rows, columns), of a video (steps, rows, columns).
        extension: context extension for larger grids: method, training grid and options; None where off.
    """

    position: Rope | Sinusoidal | RelativeEncoding | None
    position_name: str
    attention_name: str
    train_grid: tuple[int, ...]
    extension: tuple[str, tuple[int, ...], dict[str, Any]] | None
    # timm's order of axes in learned frequencies: "xy" (columns first) or "ij", see `mixed_from_timm`.
    timm_axes: str = "xy"
    # From timm's class:
    blocks: nn.Sequential
    patch_embed: Any
    pos_embed: nn.Parameter | None
    cls_token: nn.Parameter | None
    reg_token: nn.Parameter | None
    patch_drop: nn.Module
    pos_drop: nn.Module
    norm_pre: nn.Module
    norm: nn.Module
    num_prefix_tokens: int
    no_embed_class: bool

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """timm's own name and layout of learned frequencies are understood too."""
        freqs = state_dict.get(f"{prefix}rope.freqs")
        if freqs is not None and getattr(self.position, "learned_frequencies", None) is not None:
            del state_dict[f"{prefix}rope.freqs"]
            state_dict[f"{prefix}position.learned_frequencies"] = mixed_from_timm(freqs, self.timm_axes)
        # No file holds timm's indices of offsets and zero biases, and to_empty leaves anything in them.
        for module in self.modules():
            refill: Any = getattr(module, "init_non_persistent_buffers", None)
            if refill is not None:
                refill()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Shapes: images (batch, channels, height, width) -> tokens (batch, prefix + rows * columns, dim).

        Raises: ValueError where the patch size does not divide the image.
        """
        return self.forward_patches(self.embed_patches(x), attn_mask=attn_mask, is_causal=is_causal)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Shapes: images (batch, channels, height, width) -> patch embeddings (batch, rows, columns, dim).

        Raises: ValueError where the patch size does not divide the image.
        """
        self._check_image_size(images)
        return self.patch_embed(images)

    def forward_patches(
        self,
        patches: Tensor,
        *,
        kept: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Everything after the patch embedding: positions, blocks and the last norm.

        Args:
            kept: places of the patches that are encoded, the others are left out; None encodes all. Positions stay
                those in the whole grid.

        Shapes: patches (batch, rows, columns, dim), kept int64 (batch, visible) -> tokens (batch, prefix + rows *
            columns or visible, dim)
        Raises: ValueError where `kept` meets a model that drops patches by itself.
        """
        x, positions = self._place(patches, kept)
        return self._run_blocks(x, positions, attn_mask, is_causal)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """Outputs of chosen blocks, with the arguments and return values of timm's method of this name.

        Maps (output_fmt="NCHW") are (batch, dim, *grid).
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt is {output_fmt!r}; choose NCHW (maps) or NLC (tokens)")
        take, last = feature_take_indices(len(self.blocks), indices)
        start = self._start(x, attn_mask)
        x, grid, prefix = start.tokens, start.grid, self.num_prefix_tokens
        if output_fmt == "NCHW" and (grid is None or x.shape[1] != prefix + math.prod(grid)):
            raise ValueError(
                "output_fmt is 'NCHW' and patches were dropped, or the images' grids differ; maps need all patches of "
                "one grid: use 'NLC' or eval mode"
            )
        maps, prefixes = [], []
        blocks = self.blocks[: last + 1] if stop_early else self.blocks
        for index, (block, position) in enumerate(zip(blocks, start.positions, strict=False)):
            x = self._run_block(block, x, start.mask, is_causal, position)
            if index in take:
                taken = self.norm(x) if norm else x
                prefixes.append(taken[:, :prefix])
                tokens = taken[:, prefix:]
                if output_fmt == "NCHW":
                    tokens = tokens.unflatten(1, grid).movedim(-1, 1).contiguous()
                maps.append(tokens)
        with_tokens = return_prefix_tokens and prefix > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": maps}
            if with_tokens:
                result["image_intermediates_prefix"] = prefixes
            if start.valid is not None:
                result["patch_valid"] = start.valid
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        intermediates = list(zip(maps, prefixes, strict=True)) if with_tokens else maps
        return intermediates if intermediates_only else (self.norm(x), intermediates)

    def no_weight_decay(self) -> set[str]:
        """Parameters that no optimizer should decay: timm's, and learned frequencies."""
        learned = {f"position.{name}" for name, _ in self.position.named_parameters()} if self.position else set()
        return super().no_weight_decay() | learned  # type: ignore[misc]

    def set_extension(self, method: str, train_size: Sequence[int] | None = None, **knobs: Any) -> None:
        """See `vision_rope.set_extension`."""
        check_name(method)
        if method == "none":
            if knobs:
                raise ValueError(
                    f"{', '.join(knobs)} would have no effect with method 'none', which switches extension off"
                )
            self.extension = None
            return
        if not isinstance(self.position, Rope):
            raise ValueError(
                f"{method} means nothing for the position encoding {self.position_name!r}: context extension "
                "changes the frequencies of a rotary embedding, and there are none; use none"
            )
        grid = self.train_grid
        if train_size is not None:
            grid = check_train_size(train_size, self.train_grid, self.position_name)
        # A grid that needs extension, so that options are checked now and not in the first forward pass that needs it.
        trained = fit_grid(grid, self.position.axes)
        larger = [2 * length for length in trained]
        extension = self.position.extension_for(method, train_size=trained, size=larger, **knobs)
        if self.attention_name == "linear" and extension is not None and extension.attention_scale != 1.0:
            other = "" if method == "ntk-by-parts" else ", or choose ntk-by-parts without temperature"
            raise ValueError(
                f"{method} changes the temperature of the softmax and the model's attention is linear, which has none; "
                f"give temperature=0{other}"
            )
        self.extension = (method, grid, knobs)

    def fit_absolute(self, embedding: Tensor, grid: tuple[int, int]) -> Tensor:
        """An absolute embedding of this model's kind, trained on another grid (rows, columns), resampled to its own.

        Shapes: (1, prefix + rows * columns, dim) -> that of this model's pos_embed
        Raises: ValueError where the embedding is not one of that grid.
        """
        assert self.pos_embed is not None, "there is an embedding to be fitted to"
        own = tuple(self.patch_embed.grid_size)
        prefix = self.pos_embed.shape[1] - own[0] * own[1]
        if embedding.shape[1] != prefix + grid[0] * grid[1] or embedding.shape[2] != self.pos_embed.shape[2]:
            raise ValueError(
                f"embedding has shape {tuple(embedding.shape)}, but a grid of {grid[0]} x {grid[1]} needs "
                f"{(1, prefix + grid[0] * grid[1], self.pos_embed.shape[2])}"
            )
        return resample_abs_pos_embed(embedding, list(own), list(grid), num_prefix_tokens=prefix)

    def _start(self, x: Tensor, attn_mask: Tensor | None) -> Start:
        """Images (batch, channels, height, width) -> what the blocks get."""
        patches = self.embed_patches(x)
        return Start(*self._place(patches), tuple(patches.shape[1:-1]), attn_mask)

    def _place(
        self, patches: Tensor, kept: Tensor | None = None, times: Tensor | None = None
    ) -> tuple[Tensor, Sequence[Position | None]]:
        """Patches -> tokens with prefix and absolute embedding, and what each block gets of their positions.

        Args:
            times: of a video, where its steps sit in time, see `Rope.positions`; None counts them.
        """
        grid = tuple(patches.shape[1:-1])
        x = self._pos_embed(patches)
        if isinstance(self.patch_drop, PatchDropoutWithIndices):
            if kept is not None:
                raise ValueError(
                    "the model drops patches by itself (patch_drop_rate), and which of them are kept was given; "
                    "build it with patch_drop_rate=0"
                )
            x, kept = self.patch_drop(x)
        elif kept is not None:
            prefix, rest = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
            x = torch.cat((prefix, rest.gather(1, kept[..., None].expand(-1, -1, x.shape[-1]))), dim=1)
        return self.norm_pre(x), self._positions(grid, kept, x.device, times)

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Patches (batch, *grid, dim) -> tokens with prefix; absolute embeddings are added here."""
        grid = tuple(x.shape[1:-1])
        if isinstance(self.position, Sinusoidal):
            x = x + self.position(*grid, device=x.device).to(x.dtype).unflatten(0, grid)
        return self._join_prefix(x.flatten(1, -2), None if self.pos_embed is None else self._absolute_embedding(grid))

    def _join_prefix(self, x: Tensor, embedding: Tensor | None) -> Tensor:
        """Prefix tokens in front of patches, and the absolute embedding of both added.

        Shapes: x (batch, patches, dim), embedding (1, prefix or 0 + patches, dim) -> (batch, prefix + patches, dim)
        """
        tokens = (self.cls_token, getattr(self, "dist_token", None), self.reg_token)
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        if embedding is None:
            return self.pos_drop(torch.cat((*prefix, x), dim=1))
        if self.no_embed_class:
            x = x + embedding
        # A copy in another layout would change the last bits of what follows.
        x = torch.cat((*prefix, x), dim=1) if prefix else x
        return self.pos_drop(x if self.no_embed_class else x + embedding)

    def _absolute_embedding(self, grid: Sequence[int]) -> Tensor:
        """The model's own absolute embedding, resampled to a grid, with that of prefix tokens where they have one.

        Shapes: -> (1, prefix or 0 + patches, dim)
        """
        # Not by timm's method, whose x.view(batch, -1, dim) takes no batch of 0 images.
        return resample_abs_pos_embed(
            self.pos_embed,
            list(grid[-2:]),
            list(self.patch_embed.grid_size),
            num_prefix_tokens=0 if self.no_embed_class else self.num_prefix_tokens,
        )

    def _positions(
        self, grid: tuple[int, ...], kept: Tensor | None, device: torch.device, times: Tensor | None = None
    ) -> Sequence[Position | None]:
        """What each block gets, for the patches that are left (kept: (batch, patches) indices; None: all)."""
        encoding = self._encoding_in_attention()
        if encoding is None:
            return [None] * len(self.blocks)
        if isinstance(encoding, RelativeEncoding):
            positions = grid_positions(*grid, device=device)
            return encoding(positions if kept is None else positions[kept], grid, self.num_prefix_tokens)
        size, repeats = fit_grid(grid, encoding.axes), math.prod(grid[: -encoding.axes])
        if kept is None:
            return encoding.grid_rotations(
                *size,
                num_prefix_tokens=self.num_prefix_tokens,
                repeats=repeats,
                times=times,
                augment=self.training,
                extension=self._extension_choice() if times is None else self._extension(grid, times),
                device=device,
            )
        positions = encoding.positions(*size, times=times, device=device)
        if self.training:
            positions = encoding.coordinates.augment(positions)
        positions = take_places(positions.repeat(repeats, 1) if repeats > 1 else positions, kept)
        return encoding.rotations(with_prefix(positions, self.num_prefix_tokens), self._extension(grid, times))

    def _encoding_in_attention(self) -> Rope | RelativeEncoding | None:
        """The encoding where it acts in attention.

        Raises: ValueError where it has fewer layers than the model.
        """
        encoding = self.position
        if not isinstance(encoding, Rope | RelativeEncoding):
            return None
        if len(self.blocks) > encoding.depth:
            raise ValueError(
                f"the model has {len(self.blocks)} blocks and its encoding layers for {encoding.depth}; "
                "add blocks before add_position"
            )
        return encoding

    def _extension_choice(self) -> ExtensionChoice | None:
        """The context extension in the axes of the rotary embedding."""
        if self.extension is None or not isinstance(self.position, Rope):
            return None
        method, train_size, knobs = self.extension
        return method, fit_grid(train_size, self.position.axes), knobs

    def _extension(self, grid: Sequence[int], times: Tensor | None = None) -> Extension | None:
        """What context extension does on a grid; its axis of time is as long as the times say, where they are given."""
        choice = self._extension_choice()
        if choice is None or not isinstance(self.position, Rope):
            return None
        method, train_size, knobs = choice
        size = fit_grid(grid, self.position.axes)
        if times is not None:
            size = (time_length(times), *size[1:])
        return self.position.extension_for(method, train_size=train_size, size=size, **knobs)

    def _drop_absolute(self) -> None:
        """Take the model's own absolute embedding away."""
        self.pos_embed = None

    def _run_blocks(
        self,
        x: Tensor,
        positions: Sequence[Position | None],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """All blocks and the last norm."""
        for block, position in zip(self.blocks, positions, strict=False):
            x = self._run_block(block, x, attn_mask, is_causal, position)
        return self.norm(x)

    def _run_block(
        self,
        block: nn.Module,
        x: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        position: Position | None,
    ) -> Tensor:
        if self.grad_checkpointing and not torch.jit.is_scripting():
            # All blocks share the graph of learned positions, which reentrant checkpoints would walk once a block.
            return checkpoint(block, x, attn_mask=attn_mask, is_causal=is_causal, rope=position, use_reentrant=False)
        return block(x, attn_mask=attn_mask, is_causal=is_causal, rope=position)

    def _check_image_size(self, images: Tensor) -> None:
        if self.patch_embed.dynamic_img_pad:
            return
        size, patch = images.shape[-2:], self.patch_embed.feat_ratio(as_scalar=False)
        # Divisible sizes first: exported graphs must not ask for the size that a model is built for. Of that one timm
        # cuts off what is left (siglip: 384 px, patches of 14).
        if all(length % unit == 0 for length, unit in zip(size, patch, strict=True)) or size == self._built_for():
            return
        check_divisible("images have", size, patch)

    def _built_for(self) -> tuple[int, int] | None:
        """The size in pixels that the patch embedding was built for, where it was built for one."""
        size = getattr(self.patch_embed, "img_size", None)
        return None if size is None else (size[0], size[1])
