"""Linear attention against its explicit quadratic form in float64; the contract of every row of FEATURE_MAPS."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope import linear_attention
from vision_rope.linear_attention import CHUNK, FEATURE_MAPS

EPS = 1e-6
HEAD_DIM = 8


def projection_for(name, num_features=12):
    if not FEATURE_MAPS[name].needs_projection:
        return None
    return vr.performer_projection(HEAD_DIM, num_features, generator=torch.Generator().manual_seed(1))


def features_of(x, name, projection):
    """Second formulation: the features as the papers write them, in float64, with eps beside the largest one."""
    x = x.double()
    if name == "elu":
        return torch.where(x > 0, x + 1, x.exp()) + EPS
    x = x / x.shape[-1] ** 0.25
    features = torch.exp(torch.einsum("...c,fc->...f", x, projection.double()) - (x**2).sum(-1, keepdim=True) / 2)
    return features + EPS * features.amax(-1, keepdim=True)


def turn_by_loop(x, angle):
    """Interleaved pairs, one at a time."""
    out = x.clone()
    for i in range(angle.shape[-1]):
        a, b, cos, sin = x[..., 2 * i], x[..., 2 * i + 1], angle[..., i].cos(), angle[..., i].sin()
        out[..., 2 * i], out[..., 2 * i + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def attend_by_matrix(q, k, v, name, projection, q_angle=None, k_angle=None, is_causal=False):
    """Second formulation: all weights, query by key, RoFormer's equation 19 as it stands."""
    q, k = features_of(q, name, projection), features_of(k, name, projection)
    normaliser = q @ k.mT
    q_turned = q if q_angle is None else turn_by_loop(q, q_angle.double())
    k_turned = k if k_angle is None else turn_by_loop(k, k_angle.double())
    weights = q_turned @ k_turned.mT
    if is_causal:
        weights, normaliser = weights.tril(), normaliser.tril()
    return (weights / normaliser.sum(-1, keepdim=True)) @ v.double()


def rotation_for(name, tokens, num_features=12, lead=(1,), seed=0):
    """A rotation for the features of a map, and its angles."""
    features = num_features if FEATURE_MAPS[name].needs_projection else HEAD_DIM
    angle = 3 * torch.randn(*lead, tokens, features // 2, generator=torch.Generator().manual_seed(seed))
    return vr.Rotation(angle.cos(), angle.sin(), "interleaved"), angle


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_equals_the_quadratic_form(name, turned, is_causal, tokens):
    q, k, v = torch.randn(3, 2, 3, tokens, HEAD_DIM)
    projection = projection_for(name)
    rotation, angle = rotation_for(name, tokens) if turned else (None, None)
    attended = vr.linear_attend(
        q,
        k,
        v,
        q_rotation=rotation,
        k_rotation=rotation,
        feature_map=name,
        projection=projection,
        is_causal=is_causal,
    )
    expected = attend_by_matrix(q, k, v, name, projection, angle, angle, is_causal)
    assert_close(attended.double(), expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_float64_is_computed_in_float64(name):
    q, k, v = torch.randn(3, 1, 2, 150, HEAD_DIM, dtype=torch.float64)
    projection = projection_for(name)
    for is_causal in (False, True):
        attended = vr.linear_attend(q, k, v, feature_map=name, projection=projection, is_causal=is_causal)
        expected = attend_by_matrix(q, k, v, name, projection, is_causal=is_causal)
        assert_close(attended, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("lead", [(1,), (3,), (2, 1), (2, 3)], ids=["shared", "heads", "batch", "batch and heads"])
def test_other_keys_than_queries_and_rotations_that_broadcast(name, lead):
    q, k, v = torch.randn(2, 3, 5, HEAD_DIM), torch.randn(2, 3, 9, HEAD_DIM), torch.randn(2, 3, 9, 4)
    projection = projection_for(name)
    (q_rotation, q_angle), (k_rotation, k_angle) = (
        rotation_for(name, tokens, lead=lead, seed=tokens) for tokens in (5, 9)
    )
    attended = vr.linear_attend(
        q, k, v, q_rotation=q_rotation, k_rotation=k_rotation, feature_map=name, projection=projection
    )
    assert attended.shape == (2, 3, 5, 4)
    expected = attend_by_matrix(q, k, v, name, projection, q_angle, k_angle)
    assert_close(attended.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_weights_depend_on_offsets_and_no_rotation_is_position_zero(name):
    """Law 1: prefix tokens are tokens at position zero; the same keys seen from elsewhere have other weights."""
    num_features = 12 if FEATURE_MAPS[name].needs_projection else HEAD_DIM
    rope = vr.preset("roformer", head_dim=num_features)
    q, k, v = torch.randn(3, 1, 2, 6, HEAD_DIM)
    options = {"feature_map": name, "projection": projection_for(name)}

    def at(offset, key_offset=None):
        q_place = rope.positions(6) + offset
        k_place = rope.positions(6) + (offset if key_offset is None else key_offset)
        return vr.linear_attend(q, k, v, q_rotation=rope(q_place), k_rotation=rope(k_place), **options)

    assert_close(at(3), at(0), atol=1e-5, rtol=1e-5)
    assert (at(3, 0) - at(0)).abs().max() > 1e-2
    still = rope(torch.zeros(6, 1))
    assert torch.equal(
        vr.linear_attend(q, k, v, q_rotation=still, k_rotation=still, **options), vr.linear_attend(q, k, v, **options)
    )


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_without_rotation_it_averages_values_with_positive_weights(name):
    q, k = torch.randn(2, 1, 2, 40, HEAD_DIM)
    for is_causal in (False, True):
        weights = vr.linear_attend(
            q,
            k,
            torch.eye(40).expand(1, 2, 40, 40),
            feature_map=name,
            projection=projection_for(name),
            is_causal=is_causal,
        )
        assert_close(weights.sum(-1), torch.ones(1, 2, 40))
        assert (weights >= 0).all()
        assert (weights[..., 0] > 0).all()


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_a_causal_output_knows_nothing_of_later_tokens(name):
    """To the bit, even where a later key would dwarf all others in a scale taken over all keys."""
    q, k, v = torch.randn(3, 1, 2, 2 * CHUNK + 9, HEAD_DIM)
    rotation, _ = rotation_for(name, q.shape[-2])
    options = {"feature_map": name, "projection": projection_for(name), "is_causal": True}
    options |= {"q_rotation": rotation, "k_rotation": rotation}
    before = vr.linear_attend(q, k, v, **options)
    for first in (20, CHUNK, CHUNK + 30):
        k_later, v_later = k.clone(), v.clone()
        k_later[..., first:, :] *= 6
        v_later[..., first:, :] += 1
        after = vr.linear_attend(q, k_later, v_later, **options)
        assert_close(after[..., :first, :], before[..., :first, :], rtol=0, atol=0)
        assert not torch.allclose(after[..., first:, :], before[..., first:, :])


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("size", [0.0, 30.0, 1e4])
def test_inputs_of_any_size_stay_finite(name, size):
    """Exponentials of large keys overflow without their stabiliser, and normalisers become zero without eps."""
    q, k, v = size * torch.randn(3, 1, 2, CHUNK + 20, HEAD_DIM)
    for sign in (1, -1):
        for is_causal in (False, True):
            inputs = [sign * q.abs(), -k.abs(), v]
            inputs = [x.clone().requires_grad_() for x in inputs]
            attended = vr.linear_attend(*inputs, feature_map=name, projection=projection_for(name), is_causal=is_causal)
            assert attended.isfinite().all()
            assert attended.abs().max() <= v.abs().max() * (1 + 1e-5)
            for gradient in torch.autograd.grad(attended.sum(), inputs):
                assert gradient.isfinite().all()


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(name, is_causal, monkeypatch):
    monkeypatch.setattr(linear_attention, "CHUNK", 2)
    q, k, v = (torch.randn(1, 2, 5, HEAD_DIM, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rotation, _ = rotation_for(name, 5)

    def attend(q, k, v):
        return vr.linear_attend(
            q,
            k,
            v,
            q_rotation=rotation,
            k_rotation=rotation,
            feature_map=name,
            projection=projection_for(name),
            is_causal=is_causal,
        )

    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)


def test_learned_frequencies_get_a_gradient():
    rope = vr.preset("rope-vit-mixed", head_dim=HEAD_DIM, num_heads=2)
    q, k, v = torch.randn(3, 1, 2, 6, HEAD_DIM)
    rotation = rope(rope.positions(2, 3))
    vr.linear_attend(q, k, v, q_rotation=rotation, k_rotation=rotation).square().sum().backward()
    assert rope.frequencies.grad.abs().min() > 0


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_sums_in_float32(name, is_causal, dtype):
    """Failure class 5: the dtype stays, and the error is one rounding of the result."""
    q, k, v = (torch.randn(1, 2, 2000, HEAD_DIM).abs().to(dtype) for _ in range(3))
    rotation, _ = rotation_for(name, 2000)
    options = {"feature_map": name, "projection": projection_for(name), "is_causal": is_causal}
    options |= {"q_rotation": rotation, "k_rotation": rotation}
    attended = vr.linear_attend(q, k, v, **options)
    assert attended.dtype == dtype
    expected = vr.linear_attend(q.float(), k.float(), v.float(), **options)
    assert_close(attended, expected.to(dtype), rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(vr.linear_attend(q, k, v, **options), attended)
        assert torch.equal(vr.linear_attend(q.float(), k.float(), v.float(), **options), expected)


class Attend(torch.nn.Module):
    def __init__(self, name, is_causal):
        super().__init__()
        self.options = {"feature_map": name, "projection": projection_for(name), "is_causal": is_causal}

    def forward(self, q, k, v, cos, sin):
        rotation = vr.Rotation(cos, sin, "interleaved")
        return vr.linear_attend(q, k, v, q_rotation=rotation, k_rotation=rotation, **self.options)


@pytest.mark.integration
@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_compiled_and_exported_graphs_hold_no_complex_numbers(name, is_causal):
    """Failure class 7; without is_causal one exported graph serves any number of tokens."""
    module, seen = Attend(name, is_causal), []

    def inputs(tokens):
        rotation, _ = rotation_for(name, tokens)
        return (*torch.randn(3, 2, 3, tokens, HEAD_DIM), rotation.cos, rotation.sin)

    def backend(graph, _):
        seen.extend(node.meta.get("example_value") for node in graph.graph.nodes)
        return graph

    first, second = inputs(150), inputs(150 if is_causal else 300)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    assert_close(compiled(*first), module(*first), atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(compiled(*first), module(*first), atol=1e-5, rtol=1e-5)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    shapes = ({2: tokens}, {2: tokens}, {2: tokens}, {1: tokens}, {1: tokens})
    exported = torch.export.export(module, first, dynamic_shapes=None if is_causal else shapes)
    seen.extend(node.meta.get("val") for node in exported.graph.nodes)
    tensors = [value for value in seen if isinstance(value, torch.Tensor)]
    assert len(tensors) > 12
    assert not any(value.is_complex() for value in tensors)
    assert_close(exported.module()(*second), module(*second), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences_never_hold_a_square(name, is_causal):
    """8192 x 8192 scores are 256 MiB a head; no tensor of the forward or backward pass comes near."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.untyped_storage().nbytes())
            return out

    q, k, v = (torch.randn(1, 1, 8192, HEAD_DIM, requires_grad=True) for _ in range(3))
    with Watch():
        attended = vr.linear_attend(q, k, v, feature_map=name, projection=projection_for(name), is_causal=is_causal)
        attended.sum().backward()
    assert 8192 * HEAD_DIM * 4 <= largest <= 8192 * CHUNK * 4


def test_a_function_can_be_the_feature_map():
    q, k, v = torch.randn(3, 1, 2, 6, HEAD_DIM)
    attended = vr.linear_attend(q, k, v, feature_map=lambda x: torch.nn.functional.elu(x) + 1)
    assert_close(attended, vr.linear_attend(q, k, v))
    rope = vr.preset("roformer", head_dim=2 * HEAD_DIM)
    rotation = rope(rope.positions(6))
    doubled = vr.linear_attend(
        q, k, v, feature_map=lambda x: torch.cat((x, -x), -1).relu(), q_rotation=rotation, k_rotation=rotation
    )
    assert doubled.shape == v.shape


def test_the_projection_is_orthogonal_and_as_long_as_gaussian_vectors():
    projection = vr.performer_projection(16, 40, generator=torch.Generator().manual_seed(0))
    assert projection.shape == (40, 16)
    assert projection.dtype == torch.float32
    for group in projection.split(16):
        products = group @ group.T
        assert_close(products, torch.diag(products.diagonal()), atol=1e-4, rtol=0)
    many = vr.performer_projection(16, 4096, generator=torch.Generator().manual_seed(0))
    assert_close(many.square().sum(-1).mean().item(), 16.0, atol=0.3, rtol=0)  # chi-squared, 16 degrees of freedom
    assert_close(many.square().sum(-1).var().item(), 32.0, atol=4.0, rtol=0)
    assert_close(many.T @ many / 4096, torch.eye(16), atol=0.1, rtol=0)
    assert many.unflatten(0, (-1, 16)).mean(dim=0).abs().max() < 0.3  # LAPACK's QR prefers one sign on the diagonal
    again = vr.performer_projection(16, 40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again, projection)
    assert not torch.equal(vr.performer_projection(16, 40, generator=torch.Generator().manual_seed(1)), projection)
    assert vr.performer_projection(16, 40, device="meta").is_meta


def test_performer_approximates_softmax_attention():
    """Lemma 1: the mean of many random features is the softmax kernel; orthogonal rows have the smaller error."""
    q, k, v = torch.randn(3, 1, 2, 10, HEAD_DIM)
    q, k = q / 2, k / 2
    expected = vr.attend(q, k, v)

    def error(projection):
        return (vr.linear_attend(q, k, v, feature_map="performer", projection=projection) - expected).abs().mean()

    generator = torch.Generator().manual_seed(0)
    assert error(vr.performer_projection(HEAD_DIM, 20000, generator=generator)) < 0.02
    orthogonal = [error(vr.performer_projection(HEAD_DIM, 64, generator=generator)) for _ in range(30)]
    independent = [error(torch.randn(64, HEAD_DIM, generator=generator)) for _ in range(30)]
    assert sum(orthogonal) < sum(independent)


def test_meta_tensors():
    q = torch.empty(2, 3, 150, HEAD_DIM, device="meta")
    for is_causal in (False, True):
        assert vr.linear_attend(q, q, q, is_causal=is_causal).shape == q.shape


def call(**changes):
    q, k, v = torch.randn(3, 1, 2, 6, HEAD_DIM)
    return vr.linear_attend(**{"q": q, "k": k, "v": v, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feature_map": "elo"}, "elu, performer; did you mean 'elu'"),
        ({"feature_map": "performer"}, r"performer_projection\(8, num_features\)"),
        ({"projection": torch.ones(4, 8)}, "no effect with feature_map 'elu'"),
        ({"projection": torch.ones(4, 8), "feature_map": torch.relu}, "no effect with a feature_map that is"),
        ({"projection": torch.ones(4, 9), "feature_map": "performer"}, r"\(4, 9\).*must be \(features, 8\)"),
        ({"eps": 0.0}, "eps is 0.0.*positive"),
        ({"eps": math.nan}, "eps is nan"),
        ({"q": torch.ones(6, 8)}, r"q \(6, 8\).*split the channels into heads"),
        ({"q": torch.ones(1, 2, 6, 4)}, "same head_dim"),
        ({"k": torch.ones(1, 2, 5, 8)}, "k and v must have the same number of tokens"),
        ({"k": torch.ones(1, 2, 0, 8), "v": torch.ones(1, 2, 0, 8)}, "at least one"),
        ({"q": torch.ones(1, 2, 5, 8), "is_causal": True}, "as many queries as keys"),
    ],
)
def test_wrong_input_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        call(**changes)


@pytest.mark.parametrize("name", ["q_rotation", "k_rotation"])
def test_rotations_that_do_not_fit_are_refused(name):
    """Failure class 8: the rotation is one of features, not of channels, and both numbers are named."""
    rope = vr.preset("roformer", head_dim=HEAD_DIM)
    rotation = rope(rope.positions(6))
    with pytest.raises(ValueError, match=f"{name} is for head_dim 8 and there are 12 features.*head_dim=12"):
        call(**{name: rotation}, feature_map="performer", projection=projection_for("performer"))
    with pytest.raises(ValueError, match="5 tokens"):
        call(**{name: rope(rope.positions(5))})
    warm = vr.Rotation(rotation.cos, rotation.sin, "interleaved", attention_scale=1.2)
    with pytest.raises(ValueError, match=f"{name} has attention_scale 1.2.*without a temperature"):
        call(**{name: warm})
