"""Rotation: every form against a plain loop, laws of a rotation, dtypes, gradients, compilation and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.rotation import PAIRINGS


def make_rotation(heads=1, tokens=6, pairs=4, pairing="interleaved", batch=None, seed=0):
    shape = (heads, tokens, pairs) if batch is None else (batch, heads, tokens, pairs)
    angle = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return vr.Rotation(angle.cos(), angle.sin(), pairing), angle


def rotate_by_loop(x, angle, pairing):
    """Second formulation: each pair by itself, in float64, from the 2 x 2 rotation matrix."""
    out = x.double().clone()
    angle = angle.double().expand(*x.shape[:-1], x.shape[-1] // 2)
    pairs = x.shape[-1] // 2
    for i in range(pairs):
        a, b = {
            "interleaved": (2 * i, 2 * i + 1),
            "half": (i, i + pairs),
            "half-per-axis": (i, i + pairs // 2) if i < pairs // 2 else (i + pairs // 2, i + pairs),
        }[pairing]
        cos, sin = angle[..., i].cos(), angle[..., i].sin()
        out[..., a] = x[..., a].double() * cos - x[..., b].double() * sin
        out[..., b] = x[..., a].double() * sin + x[..., b].double() * cos
    return out


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("shape", ["heads", "one head", "batch", "no batch", "two batches"])
def test_rotate_equals_the_loop(pairing, shape):
    heads, batch = (3, 2) if shape == "batch" else (1 if shape == "one head" else 3, None)
    rotation, angle = make_rotation(heads=heads, pairing=pairing, batch=batch)
    lead = {"no batch": (), "two batches": (4, 2)}.get(shape, (2,))
    x = torch.randn(*lead, 3, 6, 8)
    assert_close(vr.rotate(x, rotation), rotate_by_loop(x, angle, pairing).float())


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("batch", [None, 2])
def test_rotate_qkv_equals_rotate(pairing, batch):
    rotation, _ = make_rotation(heads=3, pairing=pairing, batch=batch)
    qkv = torch.randn(2, 6, 3, 3, 8)
    q, k, v = vr.rotate_qkv(qkv, rotation)
    assert_close(q, vr.rotate(qkv[:, :, 0].transpose(1, 2), rotation), rtol=0, atol=0)
    assert_close(k, vr.rotate(qkv[:, :, 1].transpose(1, 2), rotation), rtol=0, atol=0)
    assert torch.equal(v, qkv[:, :, 2].transpose(1, 2))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_position_zero_is_the_identity_to_the_bit(pairing):
    """Law 1."""
    rope = vr.preset("rope-vit-axial", head_dim=16, pairing=pairing)
    rotation = rope(vr.with_prefix(rope.positions(2, 3), 2))
    x = torch.randn(2, 4, 8, 16)
    assert torch.equal(rotation.cos[:, :2], torch.ones(1, 2, 8))
    assert torch.equal(rotation.sin[:, :2], torch.zeros(1, 2, 8))
    assert torch.equal(vr.rotate(x, rotation)[:, :, :2], x[:, :, :2])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_norms_stay_and_angles_add(pairing):
    first, angle_1 = make_rotation(pairing=pairing, seed=1)
    second, angle_2 = make_rotation(pairing=pairing, seed=2)
    both = vr.Rotation((angle_1 + angle_2).cos(), (angle_1 + angle_2).sin(), pairing)
    x = torch.randn(2, 3, 6, 8)
    assert_close(vr.rotate(x, first).norm(dim=-1), x.norm(dim=-1))
    assert_close(vr.rotate(vr.rotate(x, first), second), vr.rotate(x, both), atol=1e-5, rtol=1e-5)


def test_scores_depend_on_the_offset_only_and_turning_twice_shows():
    """Failure class 11: norms cannot see a second application, relative scores can."""
    rope = vr.preset("roformer", head_dim=64)
    q, k = torch.randn(2, 1, 1, 64)

    def score(m, n, times=1):
        query, key = q, k
        for _ in range(times):
            query = vr.rotate(query, rope(torch.tensor([[float(m)]])))
            key = vr.rotate(key, rope(torch.tensor([[float(n)]])))
        return (query * key).sum()

    assert_close(score(5, 2), score(105, 102), atol=2e-4, rtol=0)
    assert abs(score(5, 2) - score(5, 4)) > 0.1
    assert abs(score(5, 2) - score(5, 2, times=2)) > 0.1


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_output_keeps_the_dtype_of_x(pairing, dtype):
    """Failure class 5; arithmetic in float32 inside: the error is one rounding of the result."""
    rotation, angle = make_rotation(pairing=pairing)
    x = torch.randn(2, 3, 6, 8, dtype=torch.float64).to(dtype)
    turned = vr.rotate(x, rotation)
    assert turned.dtype == dtype
    expected = rotate_by_loop(x, angle, pairing)
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float64 else 1e-6
    assert ((turned.double() - expected).abs() <= rounding * expected.abs() + 3e-6).all()
    q, _, _ = vr.rotate_qkv(torch.randn(2, 6, 3, 3, 8).to(dtype), rotation)
    assert q.dtype == dtype


# torch itself scripts functions for forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("packed", [False, True])
def test_derivatives_of_every_kind(pairing, packed):
    """With respect to x and learned angles: first and second ones backward, and forward mode, against differences."""
    # As small as heads, tokens and a batch that shares its angles allow: checks cost the square of the size.
    angle = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn((2, 2, 3, 2, 8) if packed else (2, 2, 2, 8), dtype=torch.float64, requires_grad=True)

    def turn(x, angle):
        rotation = vr.Rotation(angle.cos(), angle.sin(), pairing)
        return vr.rotate_qkv(x, rotation) if packed else vr.rotate(x, rotation)

    assert torch.autograd.gradcheck(turn, (x, angle), check_forward_ad=True)
    # Second derivatives along random directions: a whole matrix of them takes seconds.
    assert torch.autograd.gradgradcheck(turn, (x, angle), fast_mode=True)
    fixed = x.detach().clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: turn(x, angle.detach()), (fixed,))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradients_where_cos_and_sin_are_no_unit_vector(pairing):
    """A table that somebody scaled or learned freely still gets its own gradient."""
    x, cos, sin = (torch.randn(2, 3, size, dtype=torch.float64, requires_grad=True) for size in (8, 4, 4))
    assert torch.autograd.gradcheck(lambda x, cos, sin: vr.rotate(x, vr.Rotation(cos, sin, pairing)), (x, cos, sin))


# torch itself scripts functions for forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_function_transforms(pairing):
    """torch.func: a gradient a sample, and a tangent inside of a gradient."""
    rotation, _ = make_rotation(heads=3, pairing=pairing)
    qkv = torch.randn(2, 6, 3, 3, 8)

    def loss(one):
        q, k, _ = vr.rotate_qkv(one[None], rotation)
        return (q**3).sum() + (q * k).sum()

    each = torch.func.vmap(torch.func.grad(loss))(qkv)
    assert_close(each, torch.stack([torch.func.grad(loss)(one) for one in qkv]))
    weight = torch.eye(8, requires_grad=True)
    x = torch.randn(2, 3, 6, 8)
    _, tangent = torch.func.jvp(lambda x: vr.rotate(x @ weight, rotation), (x,), (2 * x,))
    assert_close(tangent, vr.rotate(2 * x, rotation))
    (gradient,) = torch.autograd.grad(tangent.square().sum(), weight)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwrite_gives_the_same_numbers_and_respects_gradients(pairing, dtype):
    rotation, _ = make_rotation(heads=3, pairing=pairing)
    x, qkv = torch.randn(2, 3, 6, 8).to(dtype), torch.randn(2, 6, 3, 3, 8).to(dtype)
    expected, packed = vr.rotate(x, rotation), vr.rotate_qkv(qkv, rotation)
    private = x.clone()
    turned = vr.rotate(private, rotation, overwrite=True)
    assert torch.equal(turned, expected)
    assert pairing != "interleaved" or turned.data_ptr() == private.data_ptr(), "in place where it is faster"
    for got, wanted in zip(vr.rotate_qkv(qkv.clone(), rotation, overwrite=True), packed, strict=True):
        assert torch.equal(got, wanted)
    kept = x.clone().requires_grad_(True)
    vr.rotate(kept, rotation, overwrite=True)
    assert torch.equal(kept, x), "a tensor that a gradient needs is never written to"


def test_without_overwrite_the_input_stays():
    rotation, _ = make_rotation(heads=3)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        qkv = torch.randn(2, 6, 3, 3, 8).to(dtype)
        before = qkv.clone()
        vr.rotate_qkv(qkv, rotation)
        vr.rotate(qkv[:, :, 0].transpose(1, 2), rotation)
        assert torch.equal(qkv, before), dtype


def test_backward_keeps_the_table_alone():
    """What training holds for the backward pass: cos and sin; with learned angles q and k too, as attention does."""
    rotation, _ = make_rotation(tokens=6)
    qkv = torch.randn(8, 6, 3, 3, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        vr.rotate_qkv(qkv, rotation)
    assert kept
    assert all(tensor.numel() <= rotation.cos.numel() for tensor in kept)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_compiled_and_exported_graphs_hold_no_complex_numbers(pairing):
    """Failure class 7."""

    class Turn(torch.nn.Module):
        def forward(self, x, cos, sin):
            return vr.rotate(x, vr.Rotation(cos, sin, pairing), overwrite=True)

    rotation, angle = make_rotation(pairing=pairing)
    x = torch.randn(2, 3, 6, 8)
    seen = []

    def backend(graph, inputs):
        seen.extend(node.meta.get("example_value") for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(Turn(), fullgraph=True, backend=backend)
    assert_close(compiled(x, rotation.cos, rotation.sin), rotate_by_loop(x, angle, pairing).float())
    exported = torch.export.export(Turn(), (x, rotation.cos, rotation.sin))
    seen.extend(node.meta.get("val") for node in exported.graph.nodes)
    tensors = [value for value in seen if isinstance(value, torch.Tensor)]
    assert len(tensors) > 6
    assert not any(value.is_complex() for value in tensors)
    assert_close(exported.module()(x, rotation.cos, rotation.sin), vr.rotate(x, rotation))


@pytest.mark.parametrize("head_dim", [4, 8, 64])
def test_pairing_permutation_is_exact(head_dim):
    angle = torch.randn(1, 5, head_dim // 2)
    x = torch.randn(2, 3, 5, head_dim)
    for source in PAIRINGS:
        for target in PAIRINGS:
            p = vr.pairing_permutation(head_dim, source, target)
            by_target = vr.rotate(x[..., p], vr.Rotation(angle.cos(), angle.sin(), target))
            by_source = vr.rotate(x, vr.Rotation(angle.cos(), angle.sin(), source))[..., p]
            assert_close(by_target, by_source, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_in_memory(pairing, dtype):
    """Views that cannot be read as complex numbers in place: odd offsets, odd strides, transposed, expanded."""
    rotation, _ = make_rotation(heads=3, pairing=pairing)
    wide = torch.randn(2, 3, 6, 19).to(dtype)
    flat = torch.randn(2 * 3 * 6 * 8 + 1).to(dtype)
    views = {
        "odd offset": wide[..., 1:9],
        "odd rows": wide[..., :8],
        "every second channel": wide[..., 2:18:2],
        "contiguous at an odd offset": flat[1:].view(2, 3, 6, 8),
        "transposed": torch.randn(2, 3, 8, 6).to(dtype).transpose(-1, -2),
        "expanded": torch.randn(1, 1, 1, 8).to(dtype).expand(2, 3, 6, 8),
    }
    for name, view in views.items():
        expected = vr.rotate(view.clone(memory_format=torch.contiguous_format), rotation)
        turned = vr.rotate(view, rotation)
        assert turned.shape == expected.shape, name
        assert_close(turned, expected)
    packed = torch.randn(2, 6, 3, 3, 9).to(dtype)[..., 1:]
    for got, expected in zip(
        vr.rotate_qkv(packed, rotation), vr.rotate_qkv(packed.contiguous(), rotation), strict=True
    ):
        assert_close(got, expected)


def test_meta_and_empty_tensors():
    rotation, _ = make_rotation()
    assert vr.rotate(torch.empty(0, 3, 6, 8), rotation).shape == (0, 3, 6, 8)
    meta = vr.Rotation(rotation.cos.to("meta"), rotation.sin.to("meta"), "interleaved")
    assert vr.rotate(torch.empty(2, 3, 6, 8, device="meta"), meta).shape == (2, 3, 6, 8)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((2, 6, 24), r"\(2, 6, 24\).*head_dim 8"),  # channels of all heads in one axis
        ((6, 8), "split the channels into heads"),
        ((2, 3, 5, 8), "5 tokens.*6 tokens"),
        ((2, 4, 6, 8), "4 heads.*3 heads.*num_heads=4"),
        ((2, 6, 3, 8), r"transpose\(-3, -2\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(shape, words):
    """Failure classes 8 and 9: nothing broadcasts by accident; both shapes are named."""
    rotation, _ = make_rotation(heads=3)
    with pytest.raises(ValueError, match=words):
        vr.rotate(torch.randn(shape), rotation)


def test_other_bad_input_is_refused():
    rotation, angle = make_rotation(batch=3)
    with pytest.raises(ValueError, match="batch of 3"):
        vr.rotate(torch.randn(2, 1, 6, 8), rotation)
    with pytest.raises(ValueError, match="interleaved, half"):
        vr.Rotation(angle.cos(), angle.sin(), "pairs")
    with pytest.raises(ValueError, match=r"batch, tokens, 3, heads, head_dim"):
        vr.rotate_qkv(torch.randn(2, 6, 72), rotation)
    with pytest.raises(ValueError, match="must be even"):
        vr.pairing_permutation(9, "half", "interleaved")


def test_attend_is_softmax_attention():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    mask = torch.rand(5, 5) > 0.3
    mask.fill_diagonal_(True)
    bias = torch.randn(4, 5, 5)
    scores = q @ k.transpose(-2, -1) * 0.2 + bias
    expected = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
    assert_close(vr.attend(q, k, v, bias=bias, mask=mask, scale=0.2), expected, atol=1e-5, rtol=1e-5)
    causal = (q @ k.transpose(-2, -1) / math.sqrt(8)).masked_fill(~torch.ones(5, 5).tril().bool(), -math.inf)
    assert_close(vr.attend(q, k, v, is_causal=True), causal.softmax(-1) @ v, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="mask is boolean"):
        vr.attend(q, k, v, mask=bias)
    with pytest.raises(ValueError, match="is_causal"):
        vr.attend(q, k, v, mask=mask, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_numbers_that_are_not_real_are_refused(dtype):
    rotation, _ = make_rotation(heads=3)
    with pytest.raises(ValueError, match=r"dtype.*floating point"):
        vr.rotate(torch.ones(2, 3, 6, 8, dtype=dtype), rotation)
    with pytest.raises(ValueError, match=r"dtype.*floating point"):
        vr.rotate_qkv(torch.ones(2, 6, 3, 3, 8, dtype=dtype), rotation)


def test_a_rotation_follows_tables_that_are_replaced():
    rotation, angle = make_rotation(heads=3)
    x = torch.randn(2, 3, 6, 8)
    rotation.sin = -rotation.sin
    assert_close(vr.rotate(x, rotation), rotate_by_loop(x, -angle, "interleaved").float())
    rotation, angle = make_rotation(heads=3)
    rotation.pairing = "half"
    assert_close(vr.rotate(x, rotation), rotate_by_loop(x, angle, "half").float())


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_either_table_may_be_learned_alone(pairing):
    _, angle = make_rotation(heads=3)
    for learned in (0, 1):
        tables = [angle.cos(), angle.sin()]
        tables[learned].requires_grad_(True)
        turned = vr.rotate(torch.randn(2, 3, 6, 8), vr.Rotation(*tables, pairing))
        (gradient,) = torch.autograd.grad((turned**3).sum(), tables[learned])
        q, _, _ = vr.rotate_qkv(torch.randn(2, 6, 3, 3, 8), vr.Rotation(*tables, pairing))
        (packed,) = torch.autograd.grad((q**3).sum(), tables[learned])
        assert gradient.abs().sum() > 0
        assert packed.abs().sum() > 0


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwrite_declines_memory_that_is_shared_or_frozen(pairing, dtype):
    rotation, _ = make_rotation(pairing=pairing)
    with torch.inference_mode():
        frozen = torch.randn(1, 2, 6, 8).to(dtype)
    views = {
        "overlapping": torch.randn(40).to(dtype).as_strided((1, 2, 6, 8), (0, 8, 4, 1)),
        "expanded": torch.randn(1, 1, 1, 8).to(dtype).expand(2, 3, 6, 8),
        "inference": frozen,
    }
    for name, view in views.items():
        expected = vr.rotate(view.clone(), rotation)
        assert_close(vr.rotate(view, rotation, overwrite=True), expected, msg=name)
    packed = torch.randn(1, 6, 1, 1, 8).to(dtype).expand(2, 6, 3, 2, 8)
    q, _, _ = vr.rotate_qkv(packed, rotation, overwrite=True)
    assert_close(q, vr.rotate(packed[:, :, 0].transpose(1, 2), rotation))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_many_gradients_at_once_and_second_ones_forward(pairing):
    """Batched gradients (vectorised Jacobians) and Hessian-vector products as forward over reverse."""
    rotation, _ = make_rotation(pairing=pairing)
    x = torch.randn(1, 6, 3, 1, 8)

    def head(x):
        q, k, v = vr.rotate_qkv(x, rotation)
        return (q * k).sum((0, 1, 3)) + v.sum()

    each = torch.autograd.functional.jacobian(head, x)
    assert_close(torch.autograd.functional.jacobian(head, x, vectorize=True), each)
    loss = lambda x: (head(x) ** 2).sum()  # noqa: E731
    _, product = torch.func.jvp(torch.func.grad(loss), (x,), (x,))
    _, expected = torch.autograd.functional.hvp(loss, x, x)
    assert_close(product, expected, rtol=1e-4, atol=1e-3)
