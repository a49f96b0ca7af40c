"""SAM 2 models, as Meta and Ultralytics publish them, with this package's memory attention in the place of theirs."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from vision_rope.memory.attention import Grid, MemoryAttention
from vision_rope.rope import Rope
from vision_rope.rope_presets import preset

# What all published SAM 2 weights have, and `MemoryAttention` computes.
FLAGS = {"pos_enc_at_input": True, "batch_first": True}
LAYER_FLAGS = {
    "pos_enc_at_attn": False,
    "pos_enc_at_cross_attn_queries": False,
    "pos_enc_at_cross_attn_keys": True,
}

# Grid of the frame that a model is working on in this thread: SAM 2's call of memory attention does not carry it.
_frame_grid: ContextVar[Grid | None] = ContextVar("frame_grid", default=None)


def replace_memory_attention(model: Any) -> Any:
    """Give a SAM 2 model this package's memory attention, in place: same weights, same masks, right on any grid.

    Projections and norms stay the same modules under the same names, with their device, dtype and hooks; dropout stays
    that of the model, and Ultralytics drops no attention weights. A model that has it already stays as it is.

    Args:
        model: of Meta's `sam2` or of Ultralytics (`SAM(...).model`), or built like them.

    Raises: ValueError for another model, or one whose memory attention has other positions than SAM 2's.
    """
    needed = ("memory_attention", "sam_prompt_encoder", "_prepare_memory_conditioned_features")
    missing = [name for name in needed if not hasattr(model, name)]
    if missing:
        raise ValueError(
            f"model is a {type(model).__name__} without {', '.join(missing)}; give a SAM 2 model, of Ultralytics "
            "SAM('sam2.1_t.pt').model"
        )
    if not isinstance(model.memory_attention, ReplacedMemoryAttention):
        model.memory_attention = ReplacedMemoryAttention(model.memory_attention, model.sam_prompt_encoder)
        model.__class__ = _grid_telling(type(model))
    return model


class ReplacedMemoryAttention(MemoryAttention):
    """`MemoryAttention` with the call and the attributes that a SAM 2 model expects.

    Args:
        attention: SAM 2's, whose projections and norms it takes over.
        prompt_encoder: knows the model's own grid as `image_embedding_size`.
    """

    def __init__(self, attention: Any, prompt_encoder: Any) -> None:
        _check_flags(attention, "memory_attention", FLAGS)
        for index, layer in enumerate(attention.layers):
            _check_flags(layer, f"memory_attention.layers.{index}", LAYER_FLAGS)
            _check_layer(layer, f"memory_attention.layers.{index}")
        first = attention.layers[0]
        rope = read_rope(attention)
        with torch.device("meta"):  # the weights come from `attention`
            super().__init__(
                dim=first.self_attn.q_proj.in_features,
                memory_dim=first.cross_attn_image.k_proj.in_features,
                depth=len(attention.layers),
                mlp_dim=first.linear1.out_features,
                num_heads=first.self_attn.num_heads,
                dropout=first.dropout.p,
            )
        self.rope = rope
        for name, module in list(self.named_modules()):
            if isinstance(module, nn.Linear | nn.LayerNorm):
                self.set_submodule(name, attention.get_submodule(name))
        for own, layer in zip(self.layers, attention.layers, strict=True):
            for name in ("self_attn", "cross_attn_image"):
                # Meta's attention drops weights in training, that of Ultralytics has no such number.
                getattr(own, name).dropout = getattr(getattr(layer, name), "dropout_p", 0.0)
        self.d_model: int = attention.d_model
        # In a tuple, or it would become a part of this module and of its state dict.
        self._prompt_encoder = (prompt_encoder,)
        self.train(attention.training)

    def forward(  # type: ignore[override]
        self,
        curr: Tensor | list[Tensor],
        memory: Tensor,
        curr_pos: Tensor | list[Tensor] | None = None,
        memory_pos: Tensor | None = None,
        num_obj_ptr_tokens: int = 0,
        grid: Grid | None = None,
    ) -> Tensor:
        """SAM 2's own call, in which a list of one tensor is that tensor.

        Args:
            grid: (rows, columns) of the frame and of every stored one; where it is not given, that of the frame on
                which the model is working, or else the model's own.

        Shapes: curr and curr_pos (rows * columns, batch, dim), memory and memory_pos (tokens, batch, memory_dim) ->
            (rows * columns, batch, dim)
        Raises: ValueError where the grid is not known.
        """
        tokens = _only("curr", curr)
        tokens_pos = None if curr_pos is None else _only("curr_pos", curr_pos)
        out = super().forward(
            tokens.transpose(0, 1),
            memory.transpose(0, 1),
            grid=grid or _frame_grid.get() or self._own_grid(len(tokens)),
            tokens_pos=None if tokens_pos is None else tokens_pos.transpose(0, 1),
            memory_pos=None if memory_pos is None else memory_pos.transpose(0, 1),
            num_pointer_tokens=num_obj_ptr_tokens,
        )
        return out.transpose(0, 1)

    def _own_grid(self, num_tokens: int) -> Grid:
        rows, columns = self._prompt_encoder[0].image_embedding_size
        if rows * columns != num_tokens:
            raise ValueError(
                f"curr has {num_tokens} tokens and the model's own grid is {(rows, columns)}; give the grid of the "
                "frame, grid=(rows, columns)"
            )
        return rows, columns


class GridTelling:
    """Makes of a SAM 2 model one that tells its memory attention the grid of the frame."""

    def _prepare_memory_conditioned_features(self, *args: Any, **kwargs: Any) -> Tensor:
        prepare = super()._prepare_memory_conditioned_features  # type: ignore[misc]
        rows, columns = inspect.signature(prepare).bind(*args, **kwargs).arguments["feat_sizes"][-1]
        token = _frame_grid.set((int(rows), int(columns)))
        try:
            return prepare(*args, **kwargs)
        finally:
            _frame_grid.reset(token)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class made while the program runs has no name that pickle could find.
        reduced: Any = super().__reduce_ex__(2)
        return _new, (type(self).__bases__[1],), *reduced[2:]


def _grid_telling(kind: type) -> type:
    return type(kind.__name__, (GridTelling, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _new(kind: type) -> Any:
    return object.__new__(_grid_telling(kind))


def _only(name: str, x: Tensor | list[Tensor]) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if len(x) != 1:
        raise ValueError(f"{name} has {len(x)} tensors; memory attention reads one level of features")
    return x[0]


def _check_flags(module: Any, name: str, flags: dict[str, bool]) -> None:
    for flag, needed in flags.items():
        found = getattr(module, flag, None)
        if found is not needed:
            raise ValueError(f"{name}.{flag} is {found}; only SAM 2's own choice can be replaced, {flag}={needed}")


def _check_layer(layer: Any, name: str) -> None:
    """Raise ValueError where a layer's perceptron has another activation, or its branches drop differently."""
    probe = torch.tensor([-1.0, 1.0])
    if not torch.equal(layer.activation(probe), probe.relu()):
        raise ValueError(f"{name}.activation is {layer.activation}; only SAM 2's own choice can be replaced, relu")
    rates = {getattr(layer, dropout).p for dropout in ("dropout", "dropout1", "dropout2", "dropout3")}
    if len(rates) > 1:
        raise ValueError(f"{name} drops with the probabilities {sorted(rates)}; only one for all can be replaced")


def read_rope(attention: Any, depth: int = 1) -> Rope:
    """The rotary embedding that all layers of a SAM 2 memory attention share.

    Raises: ValueError where they do not share one.
    """
    if isinstance(attention, MemoryAttention):
        return attention.rope
    kinds = [
        getattr(getattr(getattr(layer, name), "compute_cis", None), "keywords", {})
        for layer in attention.layers
        for name in ("self_attn", "cross_attn_image")
    ]
    if any(kind != kinds[0] for kind in kinds) or kinds[0].keys() != {"dim", "theta"}:
        raise ValueError(
            f"the attention layers have the rotary embeddings {kinds}; they must share one of `dim` and `theta`"
        )
    return preset("sam2", head_dim=kinds[0]["dim"], depth=depth, base=kinds[0]["theta"])
