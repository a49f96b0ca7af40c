"""Attention whose cost grows linearly with the tokens: positive features of queries and keys instead of a softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vision_rope.rotation import Rotation, rotate
from vision_rope.suggestion import did_you_mean

# Tokens whose scores are computed one by one in causal attention; the rest goes through sums over earlier chunks.
CHUNK = 128


@dataclass(frozen=True)
class FeatureMap:
    """A row of FEATURE_MAPS.

    Attributes:
        compute: (x, projection) -> features, not negative, and the logarithm of a factor (..., tokens, 1) they have
            been divided by, so that large inputs do not overflow; 0 where there is none.
        needs_projection: whether it takes a projection matrix.
    """

    compute: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    needs_projection: bool


def elu_features(x: Tensor, projection: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """elu(x) + 1, as many features as channels.

    Source: Katharopoulos et al. (arXiv 2006.16236), equation 7.
    """
    return F.elu(x) + 1, torch.zeros_like(x[..., :1])


def performer_features(x: Tensor, projection: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positive random features, whose mean product is exp(q . k / sqrt(head_dim)), that of softmax attention.

    Source: Choromanski et al. (arXiv 2009.14794), lemma 1; its factor 1 / sqrt(features) cancels and is left out.
    """
    assert projection is not None
    x = x * x.shape[-1] ** -0.25
    exponent = x @ projection.to(x.dtype).mT - x.square().sum(dim=-1, keepdim=True) / 2
    # A constant for the gradient: it cancels in the quotient of attention.
    largest = exponent.detach().amax(dim=-1, keepdim=True)
    return (exponent - largest).exp(), largest


FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu": FeatureMap(elu_features, needs_projection=False),
    "performer": FeatureMap(performer_features, needs_projection=True),
}


def linear_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_rotation: Rotation | None = None,
    k_rotation: Rotation | None = None,
    feature_map: str | Callable[[Tensor], Tensor] = "elu",
    projection: Tensor | None = None,
    is_causal: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Linear attention with rotary positions: features are turned in the numerator and as they are in the normaliser.

        out[m] = sum_n (R_m f(q_m)) . (R_n f(k_n)) v_n  /  sum_n f(q_m) . f(k_n)

    So the normaliser is positive, while weights may be negative and do not sum to 1 except without rotation. Sums are
    in float32 at least, also under autocast. Memory grows with the tokens, never with their square.

    Args:
        q_rotation, k_rotation: of queries and keys that are not rotated yet, for head_dim = number of features; None
            is position zero for all tokens.
        feature_map: a name of `FEATURE_MAPS`, or a function (..., tokens, head_dim) -> (..., tokens, features) with
            values that are not negative.
        projection: random matrix of "performer", from `performer_projection`.
        is_causal: a token sees itself and earlier tokens only.
        eps: added to every feature (after division by the token's largest one for "performer"), which keeps the
            normaliser above zero.

    Shapes: q (..., heads, queries, head_dim), k (..., heads, keys, head_dim), v (..., heads, keys, channels),
        projection (features, head_dim) -> (..., heads, queries, channels) in the dtype of v.
    Raises: ValueError where shapes do not fit, for an unknown feature map, a projection that is missing or has no use,
        and a rotation with an attention_scale.
    Source: RoFormer (arXiv 2104.09864), equation 19.
    """
    compute = _choose(feature_map, projection, q.shape[-1])
    _check_shapes(q, k, v, is_causal)
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it keeps the normaliser above zero and must be positive, for instance 1e-6")
    device = q.device.type
    # Asked first: devices without autocast, such as "meta", refuse to have it switched off.
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _attend(q, k, v, q_rotation, k_rotation, compute, projection, is_causal, eps)
    return _attend(q, k, v, q_rotation, k_rotation, compute, projection, is_causal, eps)


def performer_projection(
    head_dim: int,
    num_features: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw the projection of "performer": rows orthogonal in groups of head_dim, each as long as a Gaussian vector.

    Args:
        generator: source of the draw; torch's own where not given.
        device: of the result; the generator's where not given.

    Shapes: -> (num_features, head_dim) float32.
    Raises: ValueError where a number is not positive.
    Source: Choromanski et al. (arXiv 2009.14794), section 2.4.
    """
    for name, value in (("head_dim", head_dim), ("num_features", num_features)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    where = device if generator is None else generator.device
    count = -(-num_features // head_dim)
    gaussian = torch.randn(count, head_dim, head_dim, generator=generator, device=where, dtype=torch.float32)
    directions, triangle = torch.linalg.qr(gaussian)
    # QR alone prefers some orthogonal matrices to others.
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    rows = directions.mT.flatten(0, 1)[:num_features]
    lengths = torch.randn(num_features, head_dim, generator=generator, device=where, dtype=torch.float32).norm(dim=-1)
    return (rows * lengths[:, None]).to(device)


def check_feature_map(name: str) -> FeatureMap:
    """The row of FEATURE_MAPS, or ValueError with the nearest name."""
    if not isinstance(name, str) or name not in FEATURE_MAPS:
        raise ValueError(
            f"feature_map is {name!r}; choose one of {', '.join(FEATURE_MAPS)}{did_you_mean(name, FEATURE_MAPS)}"
        )
    return FEATURE_MAPS[name]


def _choose(
    feature_map: str | Callable[[Tensor], Tensor], projection: Tensor | None, head_dim: int
) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    if callable(feature_map):
        if projection is not None:
            raise ValueError("projection would have no effect with a feature_map that is a function; leave it out")
        function = feature_map

        def compute(x: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
            features = function(x)
            return features, torch.zeros_like(features[..., :1])

        return compute
    row = check_feature_map(feature_map)
    if row.needs_projection and projection is None:
        raise ValueError(
            f"projection is None and feature_map {feature_map!r} needs one; draw it once, with "
            f"performer_projection({head_dim}, num_features), and keep it with the weights"
        )
    if projection is not None:
        if not row.needs_projection:
            raise ValueError(f"projection would have no effect with feature_map {feature_map!r}; leave it out")
        if projection.ndim != 2 or projection.shape[1] != head_dim:
            raise ValueError(
                f"projection has shape {tuple(projection.shape)} and q has head_dim {head_dim}; it must be "
                f"(features, {head_dim})"
            )
    return row.compute


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if min(q.ndim, k.ndim, v.ndim) < 3:
        raise ValueError(f"{shapes}: each must be (..., heads, tokens, head_dim); split the channels into heads first")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"{shapes}: q and k must have the same head_dim")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"{shapes}: k and v must have the same number of tokens")
    if k.shape[-2] < 1:
        raise ValueError(f"{shapes}: there is no key to attend to; give at least one")
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"{shapes}: is_causal needs as many queries as keys, since a token sees the tokens up to it")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_rotation: Rotation | None,
    k_rotation: Rotation | None,
    compute: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]],
    projection: Tensor | None,
    is_causal: bool,
    eps: float,
) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    # The factor of a query's features cancels; that of a key's is its weight among the keys.
    q_features, _ = compute(q.to(dtype), projection)
    k_features, k_log_weight = compute(k.to(dtype), projection)
    q_features, k_features = q_features + eps, k_features + eps
    q_turned = _turn(q_features, q_rotation, "q_rotation")
    k_turned = _turn(k_features, k_rotation, "k_rotation")
    attended = _sum_causally if is_causal else _sum_all
    return attended(q_features, q_turned, k_features, k_turned, v.to(dtype), k_log_weight).to(v.dtype)


def _turn(features: Tensor, rotation: Rotation | None, name: str) -> Tensor:
    if rotation is None:
        return features
    if 2 * rotation.cos.shape[-1] != features.shape[-1]:
        raise ValueError(
            f"{name} is for head_dim {2 * rotation.cos.shape[-1]} and there are {features.shape[-1]} features; the "
            f"rotation turns features, so build its rotary embedding with head_dim={features.shape[-1]}, or choose as "
            "many features"
        )
    if rotation.attention_scale != 1.0:
        raise ValueError(
            f"{name} has attention_scale {rotation.attention_scale}, a temperature of the softmax, which means nothing "
            "without one; use an extension method without a temperature"
        )
    return rotate(features, rotation)


def _sum_all(q: Tensor, q_turned: Tensor, k: Tensor, k_turned: Tensor, v: Tensor, log_weight: Tensor) -> Tensor:
    weight = (log_weight - log_weight.amax(dim=-2, keepdim=True)).exp()
    return (q_turned @ (k_turned.mT @ (v * weight))) / (q @ (k.mT @ weight))


def _sum_causally(q: Tensor, q_turned: Tensor, k: Tensor, k_turned: Tensor, v: Tensor, log_weight: Tensor) -> Tensor:
    """Scores inside a chunk, sums over the keys of all earlier chunks; weights relative to the largest seen so far.

    Nothing of a later token enters an output, not even through a scale, as the largest weight of all would.
    """
    tokens = q.shape[-2]
    q, q_turned, k, k_turned, v = (_split_into_chunks(x) for x in (q, q_turned, k, k_turned, v))
    log_weight = F.pad(log_weight, (0, 0, 0, -tokens % CHUNK), value=float("-inf"))
    largest = _split_into_chunks(log_weight.cummax(dim=-2).values)
    log_weight = _split_into_chunks(log_weight)

    inside = _causal_weights(log_weight, largest)
    numerator = ((q_turned @ k_turned.mT) * inside) @ v
    normaliser = ((q @ k.mT) * inside).sum(dim=-1, keepdim=True)

    # Sums over one chunk, then over the chunks up to each, both relative to the largest weight up to the chunk's end.
    at_end = largest[..., -1, :]
    weight = (log_weight - at_end.unsqueeze(-2)).exp()
    up_to = _causal_weights(at_end, at_end)
    keys_and_values = _weighted_sums(up_to, k_turned.mT @ (v * weight))
    keys = _weighted_sums(up_to, k.mT @ weight)

    # What a chunk is given is the sum up to the chunk before it; the first is given nothing.
    before = F.pad(at_end[..., :-1, :], (0, 0, 1, 0), value=float("-inf"))
    carried = (before.unsqueeze(-2) - largest).exp()
    numerator = numerator + carried * (q_turned @ _shift(keys_and_values))
    normaliser = normaliser + carried * (q @ _shift(keys))
    # Divided after the padding is cut off, where the normaliser is 0.
    return numerator.flatten(-3, -2)[..., :tokens, :] / normaliser.flatten(-3, -2)[..., :tokens, :]


def _split_into_chunks(x: Tensor) -> Tensor:
    """Shapes: (..., tokens, channels) -> (..., chunks, CHUNK, channels), zeros behind the last token."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % CHUNK)).unflatten(-2, (-1, CHUNK))


def _causal_weights(log_weight: Tensor, largest: Tensor) -> Tensor:
    """exp(log_weight[n] - largest[m]) where n <= m, else 0.

    Shapes: log_weight, largest (..., n, 1) -> (..., n, n).
    """
    length = log_weight.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=log_weight.device).triu(1)
    # Filled before the exponential, which could overflow for later keys.
    return (log_weight.mT - largest).masked_fill(later, float("-inf")).exp()


def _weighted_sums(weights: Tensor, x: Tensor) -> Tensor:
    """Shapes: weights (..., chunks, chunks), x (..., chunks, rows, columns) -> (..., chunks, rows, columns)."""
    return (weights @ x.flatten(-2)).unflatten(-1, x.shape[-2:])


def _shift(x: Tensor) -> Tensor:
    """Give each chunk what was the previous one's. Shapes: (..., chunks, rows, columns) -> the same."""
    return F.pad(x[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
