"""timm's NaFlexVit: images of one size, or batches in which each image has a grid of its own and padding behind it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch.nn.functional as F
from timm.models import get_model_input_config
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, create_attention_mask
from torch import Tensor, nn

from vision_rope.convert.attention import Position
from vision_rope.convert.conversion import convert_model
from vision_rope.convert.joining import join_rotations
from vision_rope.convert.model import PositionedModel, Start
from vision_rope.convert.own_rope import OWN, adopt_frequencies, own_rope, timm_rope
from vision_rope.convert.position import fit_grid
from vision_rope.positions import with_prefix
from vision_rope.relative import RelativeEncoding
from vision_rope.rope import Rope
from vision_rope.sinusoidal import Sinusoidal


class PositionedNaFlexVit(PositionedModel, NaFlexVit):
    """timm's NaFlexVit with a position encoding of this package; made by `add_position`.

    It is called as timm's: with images, or with a batch of timm's NaFlex collate, in which `patch_coord` holds the row
    and the column of each patch in its own image, and `patch_valid` is False for padding.
    """

    embeds: NaFlexEmbeds
    use_key_only_attn_mask: bool
    # It is a part of the embeds here.
    pos_embed = None

    @property
    def patch_embed(self) -> Any:
        """The embeds, under the name that they have in other families."""
        return self.embeds

    def forward_features(  # type: ignore[override]
        self,
        patches: Tensor,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Any:
        """Tokens of images; of a NaFlex batch a dictionary of them and of which patches are valid, as timm's method.

        Shapes: patches (batch, channels, height, width), or (batch, patches, ...) with patch_coord (batch, patches, 2)
            and patch_valid (batch, patches) -> (batch, prefix + patches, dim)
        Raises: ValueError where the patch size does not divide the images.
        """
        start = self._start(_as_batch(patches, patch_coord, patch_valid), attn_mask)
        x = start.tokens
        for block, position in zip(self.blocks, start.positions, strict=False):
            x = self._run_block(block, x, start.mask, False, position)
        x = self.norm(x)
        return x if patch_coord is None else {"patches": x, "patch_valid": start.valid}

    def forward_intermediates(
        self,
        x: Tensor | dict[str, Tensor],
        *args: Any,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Outputs of chosen blocks, with the arguments and return values of timm's method of this name."""
        batch = _as_batch(x, patch_coord, patch_valid)
        if "patch_coord" in batch and self._drops_patches() and not options.get("output_dict"):
            raise ValueError(
                "output_dict is False, and patches are dropped in training: which of the others are padding would be "
                "lost; give output_dict=True"
            )
        return super().forward_intermediates(batch, *args, **options)  # type: ignore[arg-type]

    def _start(self, x: Any, attn_mask: Tensor | None) -> Start:
        """Images, or a NaFlex batch as a dictionary -> what the blocks get."""
        batch = _as_batch(x)
        if "patch_coord" in batch:
            return self._start_naflex(batch, batch.get("attn_mask", attn_mask))
        self._check_image_size(batch["patches"])
        tokens, (rows, columns) = self.embeds(batch["patches"])
        if isinstance(self.position, Sinusoidal):
            tokens = tokens + self._sinusoids(self.position(rows, columns, device=tokens.device), tokens)
        tokens, kept = self._drop(tokens)
        positions = self._positions((rows, columns), kept, tokens.device)
        return Start(self.norm_pre(tokens), positions, (rows, columns), batch.get("attn_mask", attn_mask))

    def _start_naflex(self, batch: dict[str, Tensor], mask: Tensor | None) -> Start:
        """A batch of images that each have a grid of their own, and padding behind it -> what the blocks get."""
        if self.attention_name == "linear":
            raise ValueError(
                "the batch has padding and the model's attention is linear, which has no scores to mask it in; give "
                "images of one size, or build the model with attention='softmax'"
            )
        coord = batch["patch_coord"].long()
        valid = batch.get("patch_valid", coord.new_ones(coord.shape[:2])).bool()
        # Whatever stands there for padding, it has no part in the size of the grid.
        coord = coord.masked_fill(~valid[..., None], 0)
        sizes = _grid_sizes(coord)
        tokens, _ = self.embeds(batch["patches"], patch_coord=coord, patch_valid=valid)
        if isinstance(self.position, Sinusoidal):
            rows, columns = _largest(sizes)
            table = self.position(rows, columns, device=tokens.device)
            tokens = tokens + self._sinusoids(table[coord[..., 0] * columns + coord[..., 1]], tokens)
        tokens, kept = self._drop(tokens)
        if kept is not None:
            coord, valid = coord.gather(1, kept[..., None].expand(-1, -1, 2)), valid.gather(1, kept)
        if mask is None:
            mask = create_attention_mask(
                valid,
                num_prefix_tokens=self.num_prefix_tokens,
                symmetric=not self.use_key_only_attn_mask,
                q_len=1,
                dtype=tokens.dtype,
            )
        return Start(self.norm_pre(tokens), self._positions_at(coord, sizes), None, mask, valid)

    def _drop(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens after dropout and patch dropout, and the places of the patches that are left; None where all are."""
        tokens = self.pos_drop(tokens)
        return self.patch_drop(tokens) if self._drops_patches() else (tokens, None)

    def _drops_patches(self) -> bool:
        return self.training and not isinstance(self.patch_drop, nn.Identity)

    def _sinusoids(self, table: Tensor, tokens: Tensor) -> Tensor:
        """What is added to the tokens, nothing to prefix tokens."""
        return F.pad(table.to(tokens.dtype), (0, 0, self.num_prefix_tokens, 0))

    def _positions_at(self, coord: Tensor, sizes: dict[tuple[int, int], list[int]]) -> Sequence[Position | None]:
        """What each block gets, for patches at these places in grids of these sizes.

        Shapes: coord (batch, patches, 2)
        """
        encoding = self._encoding_in_attention()
        if encoding is None:
            return [None] * len(self.blocks)
        if isinstance(encoding, RelativeEncoding):
            return encoding(coord, _largest(sizes), self.num_prefix_tokens)
        parts = []
        for (rows, columns), members in sizes.items():
            table = encoding.positions(*fit_grid((rows, columns), encoding.axes), device=coord.device)
            if self.training:
                table = encoding.coordinates.augment(table)
            places = coord[members]
            positions = with_prefix(table[places[..., 0] * columns + places[..., 1]], self.num_prefix_tokens)
            parts.append(encoding.rotations(positions, self._extension((rows, columns))))
        return join_rotations(parts, list(sizes.values()))

    def _drop_absolute(self) -> None:
        embeds = self.embeds
        embeds.pos_embed = embeds.pos_embed_y = embeds.pos_embed_x = None
        embeds.pos_embed_type = "none"


def convert(model: Any, position: str | Rope, **options: Any) -> PositionedModel:
    """Convert a model of this family in place, see `vision_rope.add_position`."""
    own = timm_rope(model)
    chosen = own_rope(model) if position == OWN else position
    grid = model.embeds.dynamic_feat_size(get_model_input_config(model)["input_size"][-2:])
    has_absolute = model.embeds.pos_embed_type != "none"
    positioned = convert_model(model, PositionedNaFlexVit, chosen, grid, has_absolute=has_absolute, **options)
    model.rope = None
    model.rope_is_mixed = False
    # Sinusoids are added before the dropout.
    model.pos_drop, model.embeds.pos_drop = model.embeds.pos_drop, nn.Identity()
    adopt_frequencies(positioned, own, position, options)
    return positioned


def _as_batch(x: Any, patch_coord: Tensor | None = None, patch_valid: Tensor | None = None) -> dict[str, Tensor]:
    """Images or a NaFlex batch as a dictionary without what is None; one that is given as such stays."""
    if isinstance(x, dict):
        return {name: part for name, part in x.items() if part is not None}
    given = {"patches": x, "patch_coord": patch_coord, "patch_valid": patch_valid}
    return {name: part for name, part in given.items() if part is not None}


def _grid_sizes(coord: Tensor) -> dict[tuple[int, int], list[int]]:
    """Sizes (rows, columns) of the images' grids, and which images have them."""
    sizes: dict[tuple[int, int], list[int]] = {}
    for index, (row, column) in enumerate(coord.amax(dim=1).tolist()):
        sizes.setdefault((row + 1, column + 1), []).append(index)
    return sizes or {(1, 1): []}


def _largest(sizes: Collection[tuple[int, int]]) -> tuple[int, int]:
    """The smallest grid that holds grids of all sizes."""
    return max(rows for rows, _ in sizes), max(columns for _, columns in sizes)
