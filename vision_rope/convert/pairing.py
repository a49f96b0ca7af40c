"""Another pairing of channels for a model that is built or trained already, without changing what it computes."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vision_rope.convert.attention import PositionedAttention
from vision_rope.convert.linear import LinearAttention
from vision_rope.convert.model import PositionedModel
from vision_rope.rope import Rope
from vision_rope.rotation import PAIRINGS, Pairing, pairing_permutation
from vision_rope.suggestion import did_you_mean

Model = TypeVar("Model", bound=nn.Module)

REMEDY = "convert before weights are sharded, quantised or adapted, or undo that first"


def convert_pairing(model: Model, pairing: Pairing) -> Model:
    """Change which channels of a head turn together; outputs stay what they were, to float32 rounding.

    In every head the rows of the projections to queries and keys change places, and the weights of their norms; under
    "performer" attention the rows of its random matrix, since its features are what turns. All else stays, values too.
    The model is changed in place and returned; one that has the pairing already stays as it is.

    The model gets a Rope of its own: others that share the old one keep it (learned frequencies stay shared). Copies of
    the model, such as averaged weights, are converted apart. Gradients and the states of optimizers keep the old order,
    and traced, exported or captured graphs the old rotation: convert before they are made, or make them anew.

    Args:
        model: a model with a rotary embedding; one that holds such models, as a MaskedModel does, is converted whole.
        pairing: "interleaved", "half" or "half-per-axis", see `Rotation`.

    Raises: ValueError for an unknown pairing, a model without rotary embedding, a head_dim that the pairing does not
        divide, and weights that are no longer plain (wrapped for several processes, sharded, quantised, adapters);
        the model is untouched then.
    """
    if pairing not in PAIRINGS:
        hint = did_you_mean(pairing, PAIRINGS)
        raise ValueError(f"pairing is {pairing!r}; choose one of {', '.join(PAIRINGS)}{hint}")
    if any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules()):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, whose copies in other processes would not follow; "
            "convert in every process before it is wrapped"
        )
    parts = rotary_parts(model)
    if not parts:
        raise ValueError(
            f"{_describe(model)}, so that it has no pairing to convert; give it one of vision_rope.presets()"
        )
    _reorder([(part, part.position.pairing, pairing) for part in parts])
    for part in parts:
        part.position = _pair_anew(part.position, pairing)
    return model


def reorder_weights(model: nn.Module, source: str) -> None:
    """Bring weights that were stored in the pairing `source`, and loaded as they are, into the model's own pairing.

    Raises: ValueError as `convert_pairing` does; a model without rotary embedding has nothing to reorder.
    """
    if source not in PAIRINGS:
        raise ValueError(f"the weights have the pairing {source!r}; known are {', '.join(PAIRINGS)}")
    _reorder([(part, source, part.position.pairing) for part in rotary_parts(model)])  # type: ignore[misc]


def pairing_of(model: nn.Module) -> Pairing | None:
    """The pairing of a model's rotary embeddings; None where it has none.

    Raises: ValueError where its parts have different ones.
    """
    found = list(dict.fromkeys(part.position.pairing for part in rotary_parts(model)))
    if len(found) > 1:
        raise ValueError(
            f"parts of the model have the pairings {' and '.join(found)}; convert the whole model: "
            f"vision_rope.convert_pairing(model, {found[0]!r})"
        )
    return found[0] if found else None


def rotary_parts(model: nn.Module) -> list[Any]:
    """The positioned models with a Rope that a model is or holds: of a masked one the encoder and the decoder."""
    return [part for part in model.modules() if isinstance(part, PositionedModel) and isinstance(part.position, Rope)]


def _reorder(parts: list[tuple[PositionedModel, Pairing, Pairing]]) -> None:
    """Permute the weights of each part from one pairing to another; all are checked before the first is changed."""
    changes: dict[Hashable, tuple[Tensor, Tensor]] = {}
    for part, source, target in parts:
        if source == target:
            continue
        for name, layer in part.named_modules():
            if isinstance(layer, PositionedAttention):
                changes |= {_memory(change[0]): change for change in _changes(name, layer, source, target)}
    with torch.no_grad():
        for tensor, order in changes.values():
            tensor.copy_(tensor[order.to(tensor.device)])


def _memory(tensor: Tensor) -> Hashable:
    """Where a tensor lies: tied weights are one Parameter, or several that share memory, and are permuted once."""
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _changes(
    name: str, layer: PositionedAttention, source: Pairing, target: Pairing
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of an attention layer with the order that their first axis gets."""
    if isinstance(layer, LinearAttention) and layer.projection is not None:
        matrix = layer.projection.matrix
        yield matrix, pairing_permutation(len(matrix), source, target)
        return
    channels = pairing_permutation(layer.head_dim, source, target)
    for part, wanted in _orders(layer, channels):
        module = getattr(layer, part)
        leaves = {part: module} if isinstance(module, Tensor) else dict(_tensors(module))
        plain = isinstance(module, nn.Linear) and {"weight"} <= leaves.keys() <= {"weight", "bias"}
        if "norm" not in part and not isinstance(module, Tensor) and not plain:
            raise ValueError(
                f"{name}.{part} is a {type(module).__name__} with {', '.join(leaves) or 'no weights'}, where a Linear "
                f"with its weight and bias is needed; {REMEDY}"
            )
        for leaf, tensor in leaves.items():
            if type(tensor) not in (nn.Parameter, Tensor) or tensor.shape[:1] != wanted.shape:
                raise ValueError(
                    f"{name}.{part}.{leaf} is a {type(tensor).__name__} of shape {tuple(tensor.shape)}, where a plain "
                    f"one of {len(wanted)} rows is needed; {REMEDY}"
                )
            yield tensor, wanted
    for table in ("rel_pos_h", "rel_pos_w"):  # SAM's vectors of offsets, (offsets, head_dim), which meet queries
        if getattr(layer, table, None) is not None:
            yield getattr(layer, table).t(), channels


def _orders(layer: Any, channels: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names of what an attention layer has for queries and keys, with the order that their first axis gets."""

    def order(parts: int, turned: int, heads: int) -> Tensor:
        # On the CPU whatever the default device, as all orders are; meta would have no numbers.
        rows = torch.arange(parts * heads * layer.head_dim, device="cpu").unflatten(0, (parts, heads, layer.head_dim))
        return torch.cat((rows[:turned][..., channels], rows[turned:])).flatten()

    if layer.qkv is not None:
        yield "qkv", order(3, 2, layer.num_heads)
    else:
        yield "q_proj", order(1, 1, layer.num_heads)
        yield "k_proj", order(1, 1, layer.k_proj.out_features // layer.head_dim)
    for part in ("q_bias", "k_bias"):
        if getattr(layer, part, None) is not None:
            yield part, order(1, 1, layer.num_heads)
    yield from (("q_norm", channels), ("k_norm", channels))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _pair_anew(rope: Rope, pairing: Pairing) -> Rope:
    """The same rotary embedding for another pairing; its parameters stay shared with the old one."""
    other = copy.copy(rope)
    # copy.copy shares the dictionaries of Parameters; each module must own its own.
    other._parameters = dict(rope._parameters)
    other.pairing = pairing
    return other


def _describe(model: nn.Module) -> str:
    named = next((part.position_name for part in model.modules() if isinstance(part, PositionedModel)), None)
    kind = f"the model is a {type(model).__name__}"
    if named is None:
        return f"{kind} without a position encoding of this package"
    return f"{kind} with the position encoding {named!r}, which turns no channels"
