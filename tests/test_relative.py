"""Relative encodings against the papers' formulas, a pair of tokens at a time in float64, and against transformers."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.encodings import ENCODINGS, build_encoding
from vision_rope.relative import RelativeEncoding, RelativeTerms, offsets_between
from vision_rope.relative_encodings import T5, ALiBi, DeBERTa, Shaw, TransformerXL, alibi_slopes, t5_bucket

HEADS, HEAD_DIM, DEPTH = 2, 8, 2
DIM = HEADS * HEAD_DIM
RELATIVE = [
    name for name, row in ENCODINGS.items() if isinstance(row.build, type) and issubclass(row.build, RelativeEncoding)
]
LEARNED = [name for name in RELATIVE if name != "alibi"]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in RELATIVE),
    ("shaw", {"clip": 2}),
    ("shaw", {"value_term": False}),
    ("deberta", {"clip": 2}),
    ("t5", {"num_buckets": 8, "max_distance": 6}),
    ("t5", {"num_buckets": 32, "max_distance": 128}),
    ("transformer-xl", {"base": 20.0}),
    ("alibi", {"distance": "manhattan"}),
]


def build(name: str, size: tuple[int, ...] = (4, 4), num_heads: int = HEADS, **options: Any) -> Any:
    """With parameters large enough to matter."""
    encoding = build_encoding(
        name,
        options,
        axes=len(size),
        size=size,
        embed_dim=DIM,
        num_heads=num_heads,
        head_dim=HEAD_DIM,
        depth=DEPTH,
    )
    assert isinstance(encoding, RelativeEncoding)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(std=0.5)
    return encoding


def draw_qkv(tokens: int, batch: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, batch, HEADS, tokens, HEAD_DIM, dtype=dtype).unbind(0)
    return q, k, v


def attend_by(terms: RelativeTerms, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Scores before the softmax, and answers."""
    scale = HEAD_DIM**-0.5 * terms.attention_scale
    scores = scale * q @ k.transpose(-2, -1) + terms.score_bias(q, k, scale)
    weights = scores.softmax(-1)
    return scores, weights @ v if terms.values is None else weights @ v + terms.value_term(weights)


# ---- the formulas, a pair at a time

Pair = tuple[Tensor, Tensor, int, int, tuple[int, ...]]  # q_i, k_j, layer, head, offsets of the key from the query


def starts(widths: list[int]) -> list[int]:
    return [sum(widths[:axis]) for axis in range(len(widths))]


def score_shaw(encoding: Any, q: Tensor, k: Tensor, layer: int, head: int, offset: tuple[int, ...]) -> Tensor:
    key = k.clone()
    for axis, (at, clip, start) in enumerate(_shaw_rows(encoding, offset)):
        assert axis < len(offset)
        key = key + encoding.keys[layer, start + max(-clip, min(clip, at)) + clip]
    return q @ key / math.sqrt(HEAD_DIM)


def _shaw_rows(encoding: Any, offset: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return list(zip(offset, encoding.clips, starts([2 * clip + 1 for clip in encoding.clips]), strict=True))


def value_shaw(encoding: Any, layer: int, offset: tuple[int, ...]) -> Tensor | float:
    if encoding.values is None:
        return 0.0
    rows = [start + max(-clip, min(clip, at)) + clip for at, clip, start in _shaw_rows(encoding, offset)]
    return torch.stack([encoding.values[layer, row] for row in rows]).sum(0)


def score_transformer_xl(encoding: Any, q: Tensor, k: Tensor, layer: int, head: int, offset: tuple[int, ...]) -> Tensor:
    """The paper's R is one vector of sinusoids, here with a part an axis; W_kR is one matrix."""
    part = DIM // len(offset)
    sinusoids = []
    for at in offset:
        angles = [-at * encoding.base ** (-2 * i / part) for i in range(part // 2)]
        sinusoids += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    matrix = encoding.projection[layer].flatten(0, 1)
    r = (torch.tensor(sinusoids, dtype=torch.float64) @ matrix)[head * HEAD_DIM : (head + 1) * HEAD_DIM]
    u, v = encoding.content_query[layer, head], encoding.position_query[layer, head]
    return (q @ k + q @ r + u @ k + v @ r) / math.sqrt(HEAD_DIM)


def score_t5(encoding: Any, q: Tensor, k: Tensor, layer: int, head: int, offset: tuple[int, ...]) -> Tensor:
    score = q @ k / math.sqrt(HEAD_DIM)
    for axis, at in enumerate(offset):
        bucket = bucket_by_words(at, encoding.num_buckets, encoding.max_distances[axis])
        score = score + encoding.biases[head, axis * encoding.num_buckets + bucket]
    return score


def bucket_by_words(offset: int, num_buckets: int, max_distance: int) -> int:
    half = num_buckets // 2
    distance, exact = abs(offset), half // 2
    bucket = min(distance, max_distance)
    if bucket >= exact and max_distance > exact:
        # The largest bucket whose first distance, exact * (max_distance / exact) ** (steps / exact), is not beyond.
        steps = [
            s for s in range(half - exact) if exact * (max_distance / exact) ** (s / (half - exact)) < bucket + 1e-6
        ]
        bucket = exact + max(steps)
    return bucket + (half if offset > 0 else 0)


def score_deberta(encoding: Any, q: Tensor, k: Tensor, layer: int, head: int, offset: tuple[int, ...]) -> Tensor:
    """Equations 2 to 4 of the paper, delta(i, j) with i - j."""

    def delta(difference: int, clip: int) -> int:
        return 0 if difference <= -clip else 2 * clip - 1 if difference >= clip else difference + clip

    channels = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    score = q @ k
    for at, clip, start in zip(offset, encoding.clips, starts([2 * c for c in encoding.clips]), strict=True):
        key = encoding.embeddings[start + delta(-at, clip)] @ encoding.key_projection[layer]
        query = encoding.embeddings[start + delta(at, clip)] @ encoding.query_projection[layer]
        score = score + q @ key[channels] + k @ query[channels]
    return score / math.sqrt(3 * HEAD_DIM)


def score_alibi(encoding: Any, q: Tensor, k: Tensor, layer: int, head: int, offset: tuple[int, ...]) -> Tensor:
    distance = math.hypot(*offset) if encoding.distance == "euclidean" else sum(abs(at) for at in offset)
    return q @ k / math.sqrt(HEAD_DIM) - 2 ** (-8 * (head + 1) / HEADS) * distance


SCORES: dict[type, Callable[..., Tensor]] = {
    Shaw: score_shaw,
    TransformerXL: score_transformer_xl,
    T5: score_t5,
    DeBERTa: score_deberta,
    ALiBi: score_alibi,
}


def attend_by_loops(
    encoding: Any, positions: list[tuple[int, ...] | None], layer: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """One picture; None is the position of a prefix token."""
    tokens = len(positions)
    scores = torch.zeros(HEADS, tokens, tokens, dtype=torch.float64)
    out = torch.zeros(HEADS, tokens, HEAD_DIM, dtype=torch.float64)
    for head, i in itertools.product(range(HEADS), range(tokens)):
        offsets: list[tuple[int, ...] | None] = []
        for j in range(tokens):
            here, there = positions[i], positions[j]
            offset = None if here is None or there is None else tuple(b - a for a, b in zip(here, there, strict=True))
            offsets.append(offset)
            if offset is None:
                factor = 3 if isinstance(encoding, DeBERTa) else 1
                scores[head, i, j] = q[head, i] @ k[head, j] / math.sqrt(factor * HEAD_DIM)
            else:
                scores[head, i, j] = SCORES[type(encoding)](encoding, q[head, i], k[head, j], layer, head, offset)
        for weight, offset, value in zip(scores[head, i].softmax(-1), offsets, v[head], strict=True):
            with_value = isinstance(encoding, Shaw) and offset is not None
            out[head, i] += weight * (value + value_shaw(encoding, layer, offset) if with_value else value)  # type: ignore[arg-type]
    return scores, out


@torch.no_grad()
@pytest.mark.parametrize(("grid", "num_prefix"), [((5,), 0), ((5,), 1), ((2, 3), 0), ((5, 2), 2), ((2, 1, 3), 0)])
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_attention_is_the_papers_formula(name, options, grid, num_prefix):
    """Failure classes 1 and 10: rows are not columns, prefix tokens have no offset."""
    if name == "transformer-xl" and len(grid) == 3:
        pytest.skip("three axes do not divide these channels")
    # Trained on a smaller grid in part, so that offsets are clipped.
    encoding = build(name, (3,) * len(grid), **options).double()
    positions = vr.grid_positions(*grid)
    batch = 2 if grid == (2, 3) else 1
    q, k, v = draw_qkv(len(positions) + num_prefix, batch)
    layers = encoding(positions, grid, num_prefix)
    assert len(layers) == DEPTH
    places = [*[None] * num_prefix, *itertools.product(*(range(length) for length in grid))]
    for layer, terms in enumerate(layers):
        scores, out = attend_by(terms, q, k, v)
        for sample in range(batch):
            wanted = attend_by_loops(encoding, places, layer, q[sample], k[sample], v[sample])
            # ALiBi's distances and slopes are float32.
            assert_close(scores[sample], wanted[0], rtol=0, atol=1e-6 if name == "alibi" else 1e-12)
            assert_close(out[sample], wanted[1], rtol=0, atol=1e-6 if name == "alibi" else 1e-12)


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_positions_of_kept_patches(name, options):
    """Failure class 19: any subset in any order, another one for each picture, gets its part of the whole."""
    encoding, grid = build(name, (3, 4), **options), (4, 6)
    positions = vr.grid_positions(*grid)
    kept = torch.stack([torch.randperm(24)[:7] for _ in range(3)])
    q, k, v = (part[:1].expand(3, -1, -1, -1) for part in draw_qkv(26, dtype=torch.float32))
    places = torch.cat((torch.arange(2).expand(3, -1), kept + 2), dim=1)

    def keep(x: Tensor) -> Tensor:
        return x.gather(2, places[:, None, :, None].expand(-1, HEADS, -1, HEAD_DIM))

    for whole, part in zip(encoding(positions, grid, 2), encoding(positions[kept], grid, 2), strict=True):
        scores, _ = attend_by(whole, q, k, v)
        wanted = torch.stack([scores[b][:, places[b]][:, :, places[b]] for b in range(3)])
        got, _ = attend_by(part, keep(q), keep(k), keep(v))
        assert_close(got, wanted, rtol=0, atol=1e-5)
        if whole.values is not None:
            weights = torch.zeros(3, HEADS, 26, 26)
            few = torch.rand(3, HEADS, 9, 9)
            for b in range(3):
                weights[b][:, places[b][:, None], places[b]] = few[b]
            assert_close(part.value_term(few), keep(whole.value_term(weights)), rtol=0, atol=1e-5)


def test_offsets():
    positions = vr.grid_positions(2, 3)
    offsets = offsets_between(positions, (2, 3), num_prefix=1)
    assert [at.tolist() for at in offsets.values] == [[-1, 0, 1], [-2, -1, 0, 1, 2]]
    assert offsets.rows.shape == (2, 1, 7, 7)
    every = torch.cat((torch.tensor([0]), *offsets.values))
    for axis, (i, j) in itertools.product(range(2), itertools.product(range(6), repeat=2)):
        row = int(offsets.rows[axis, 0, i + 1, j + 1])
        assert every[row] == positions[j, axis] - positions[i, axis]
        assert (1, 4)[axis] <= row < (4, 9)[axis]
    assert not offsets.rows[:, :, 0].any()
    assert not offsets.rows[:, :, :, 0].any()
    with pytest.raises(ValueError, match=r"positions have shape \(6, 2\) and the grid \(6,\)"):
        offsets_between(positions, (6,))
    for name in RELATIVE:
        with pytest.raises(ValueError, match="positions have shape"):
            build(name)(positions, (6,))


# ---- peers


def test_golden_t5_buckets(golden):
    stored = golden("other_positional")
    offsets = stored["t5_rel"]
    assert torch.equal(t5_bucket(offsets), stored["t5_bucket_bidir"])
    assert torch.equal(t5_bucket(offsets), stored["xt_t5_bucket_bidir"])
    assert torch.equal(t5_bucket(offsets, bidirectional=False), stored["t5_bucket_causal"])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 20), (8, 16), (64, 1000), (4, 3)])
def test_t5_buckets_are_transformers(num_buckets, max_distance, bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = torch.arange(-1500, 1501)
    wanted = t5.T5Attention._relative_position_bucket(offsets, bidirectional, num_buckets, max_distance)
    assert torch.equal(t5_bucket(offsets, num_buckets, max_distance, bidirectional), wanted)
    if bidirectional:
        assert wanted.tolist() == [bucket_by_words(int(at), num_buckets, max_distance) for at in offsets]


def test_t5_buckets_without_widening_ones_are_clipped_distances():
    assert t5_bucket(torch.tensor([-9, -5, -1, 0, 1, 5, 9]), 32, 5).tolist() == [5, 5, 1, 0, 17, 21, 21]
    for bad, words in (((6, 128), "num_buckets is 6"), ((32, 0), "max_distance is 0")):
        with pytest.raises(ValueError, match=words):
            t5_bucket(torch.arange(3), *bad)
    with pytest.raises(ValueError, match="multiple of 2"):
        t5_bucket(torch.arange(3), 3, bidirectional=False)


def test_golden_alibi(golden):
    stored = golden("other_positional")
    for num_heads in (8, 12):
        slopes = alibi_slopes(num_heads)
        assert_close(slopes, stored[f"alibi_slopes_xt_{num_heads}"].float(), rtol=1e-6, atol=0)
        assert_close(slopes[:, None, None] * torch.arange(6), stored[f"alibi_bloom_{num_heads}"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 11, 16, 24])
def test_alibi_is_blooms(num_heads):
    """BLOOM adds slope * position of the key, which is the distance but for a constant a query that softmax ignores."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 7), num_heads, torch.float32)
    bias = build("alibi", (7,), num_heads=num_heads)(vr.grid_positions(7), (7,))[0].bias[0]
    causal = torch.full((7, 7), -math.inf).triu(1)
    assert_close((bias + causal).softmax(-1), (theirs + causal).softmax(-1), rtol=1e-6, atol=1e-7)


def test_alibi_of_patches_is_symmetric_and_knows_directions_apart_by_distance():
    bias = build("alibi")(vr.grid_positions(3, 4), (3, 4))[0].bias
    assert torch.equal(bias, bias.transpose(-2, -1))
    assert_close(bias[0, 0, 0, 5], -(2.0**-4) * torch.tensor(2.0).sqrt(), rtol=1e-6, atol=0)  # one down, one right
    bias = build("alibi", distance="manhattan")(vr.grid_positions(3, 4), (3, 4))[0].bias
    assert bias[0, 0, 0, 5] == -(2.0**-4) * 2


def test_transformer_xl_is_xlnets_with_its_relative_shift():
    """transformers no longer has Transformer-XL; XLNet's attention is the same, with the identity of the shift."""
    xlnet = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    n = 7
    theirs = xlnet.XLNetRelativeAttention(
        xlnet.XLNetConfig(vocab_size=10, d_model=DIM, n_head=HEADS, d_inner=8, n_layer=1, dropout=0.0)
    ).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
    ours = TransformerXL(1, DIM, HEADS, HEAD_DIM, 1).double()
    with torch.no_grad():
        ours.projection[0, 0].copy_(theirs.r.flatten(1))
        ours.content_query[0].copy_(theirs.r_w_bias)
        ours.position_query[0].copy_(theirs.r_r_bias)
    q, k, v = draw_qkv(n, batch=1)
    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = torch.arange(n, -n, -1, dtype=torch.float64)[:, None] * frequencies
    sinusoids = torch.cat((angles.sin(), angles.cos()), dim=-1)[:, None]
    k_r = torch.einsum("ibh,hnd->ibnd", sinusoids, theirs.r)
    first = [part.permute(2, 0, 1, 3) for part in (q, k, v)]
    wanted = theirs.rel_attn_core(*first, k_r).permute(1, 2, 0, 3)
    _, out = attend_by(ours(vr.grid_positions(n), (n,))[0], q, k, v)
    assert_close(out, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("clip", [3, 8])
def test_deberta_is_transformers(clip):
    """Term by term, since the released code reads the second term's embeddings in the opposite order of the paper."""
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    n = 7
    q, k, _ = draw_qkv(n, batch=1)
    for term, mine in (("c2p", "keys"), ("p2c", "queries")):
        config = deberta.DebertaV2Config(
            hidden_size=DIM,
            num_attention_heads=HEADS,
            relative_attention=True,
            pos_att_type=[term],
            max_relative_positions=clip,
            share_att_key=False,
            hidden_dropout_prob=0.0,
        )
        theirs = deberta.DisentangledSelfAttention(config).double()
        ours = DeBERTa((n,), DIM, HEADS, HEAD_DIM, 1, clip=clip).double()
        with torch.no_grad():
            linear = theirs.pos_key_proj if term == "c2p" else theirs.pos_query_proj
            linear.bias.zero_()
            (ours.key_projection if term == "c2p" else ours.query_projection)[0].copy_(linear.weight.T)
            terms = ours(vr.grid_positions(n), (n,))[0]
            relative = torch.arange(n)[:, None] - torch.arange(n)
            relative = relative if term == "c2p" else -relative
            wanted = theirs.disentangled_attention_bias(q[0], k[0], relative[None], ours.embeddings, 3)
        alone = RelativeTerms(terms.rows, **{mine: getattr(terms, mine)})
        got = alone.score_bias(q, k, HEAD_DIM**-0.5 * terms.attention_scale)
        assert_close(got[0], wanted, rtol=1e-7, atol=1e-12)  # their scale is float32


# ---- the contract of a row


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_shapes_dtypes_and_gradients(name, options):
    encoding = build(name, **options)
    grid = (5, 7)  # not the trained one
    q, k, v = (part.requires_grad_() for part in draw_qkv(36, dtype=torch.float32))
    loss = torch.zeros(())
    for terms in encoding(vr.grid_positions(*grid), grid, 1):
        scores, out = attend_by(terms, q, k, v)
        assert scores.shape == (2, HEADS, 36, 36)
        assert out.shape == q.shape
        assert scores.dtype == out.dtype == torch.float32
        loss = loss + out.square().sum()
    loss.backward()
    assert all(part.grad.isfinite().all() for part in (q, k, v))
    for key, parameter in encoding.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.any(), key


@pytest.mark.parametrize("name", RELATIVE)
def test_gradients_are_those_of_finite_differences(name):
    encoding = build(name, (2, 3)).double()
    q, k, v = draw_qkv(7, batch=1)
    parameters = dict(encoding.named_parameters())

    def loss(q: Tensor, k: Tensor, *values: Tensor) -> Tensor:
        layers = torch.func.functional_call(
            encoding, dict(zip(parameters, values, strict=True)), (positions, (2, 3), 1)
        )
        return torch.stack([attend_by(terms, q, k, v)[1] for terms in layers]).sum((0, 1))

    positions = vr.grid_positions(2, 3)
    inputs = [part.clone().requires_grad_() for part in (q, k, *(p.detach() for p in parameters.values()))]
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


@pytest.mark.parametrize("name", RELATIVE)
def test_every_trained_row_and_no_other_is_read_at_larger_sizes(name):
    """Clips and buckets follow the grid of training, so that a larger grid meets nothing that was never trained."""
    encoding = build(name, (4, 6))

    def used(grid: tuple[int, int]) -> dict[str, Tensor]:
        encoding.zero_grad()
        q, k, v = draw_qkv(grid[0] * grid[1], dtype=torch.float32)
        sum(attend_by(t, q, k, v)[1].square().sum() for t in encoding(vr.grid_positions(*grid), grid)).backward()
        return {key: parameter.grad != 0 for key, parameter in encoding.named_parameters()}

    if name == "alibi":
        return
    trained, larger = used((4, 6)), used((9, 8))
    for key, rows in larger.items():
        assert torch.equal(rows & trained[key], rows), key
    if name in ("shaw", "deberta"):
        assert all(rows.all() for rows in trained.values())


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_state_goes_round_trip_and_copies_are_their_own(name, options):
    encoding, other = build(name, **options), build(name, **options)
    grid, positions = (3, 5), vr.grid_positions(3, 5)
    q, k, v = draw_qkv(15, dtype=torch.float32)

    def run(encoding: Any) -> Tensor:
        return torch.stack([attend_by(terms, q, k, v)[1] for terms in encoding(positions, grid)])

    wanted = run(encoding)
    assert torch.equal(run(other), wanted) == (name == "alibi")
    other.load_state_dict(encoding.state_dict())
    twins = [other, copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))]
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(1)
    assert all(torch.equal(run(twin), wanted) for twin in twins)
    saved = io.BytesIO()
    torch.save(encoding.state_dict(), saved)
    saved.seek(0)
    other.load_state_dict(torch.load(saved))
    assert torch.equal(run(other), run(encoding))


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_meta_then_memory_then_reset(name, options):
    """Failure class 6: reset_parameters makes every number anew, in the range of a fresh module."""
    with torch.device("meta"):
        encoding = build_encoding(
            name,
            options,
            axes=2,
            size=(4, 4),
            embed_dim=DIM,
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            depth=DEPTH,
        )
    assert all(parameter.is_meta for parameter in encoding.parameters())
    encoding.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(math.nan)
    encoding.reset_parameters()
    for key, parameter in encoding.named_parameters():
        assert parameter.isfinite().all()
        wanted = DIM**-0.5 if name == "deberta" and "projection" in key else 0.02
        assert wanted / 2 < parameter.std() < wanted * 1.5
        assert parameter.abs().max() < 10 * wanted


@pytest.mark.parametrize("name", RELATIVE)
def test_low_precision_does_not_reach_distances(name):
    """Failure class 4: two encodings with the same weights in bfloat16, one of them moved there and back."""
    grid, positions = (70, 2), vr.grid_positions(70, 2)
    exact = build(name)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    low = copy.deepcopy(exact).bfloat16()
    q, k, v = draw_qkv(140, batch=1, dtype=torch.float32)
    for wide, narrow in zip(exact(positions, grid), low(positions, grid), strict=True):
        wanted, _ = attend_by(wide, q, k, v)
        got = narrow.score_bias(q.bfloat16(), k.bfloat16(), HEAD_DIM**-0.5 * narrow.attention_scale)
        alone = wide.score_bias(q, k, HEAD_DIM**-0.5 * wide.attention_scale)
        # Rounding of the last bit of bfloat16 in products; a distance rounded to 8 bits would be off by whole rows.
        assert_close(got.float(), alone, rtol=0.03, atol=0.05)
        assert wanted.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for wide, mixed in zip(exact(positions, grid), exact(positions, grid), strict=True):
            if wide.bias is not None:
                assert torch.equal(mixed.bias, exact(positions, grid)[0].bias)
                assert mixed.bias.dtype == torch.float32


@pytest.mark.parametrize("name", RELATIVE)
def test_two_configurations_in_one_process(name):
    grid, positions = (3, 5), vr.grid_positions(3, 5)
    q, k, v = draw_qkv(15, dtype=torch.float32)
    options = {"shaw": {"clip": 1}, "t5": {"max_distance": 1}, "deberta": {"clip": 1}}
    other = {"transformer-xl": {"base": 3.0}, "alibi": {"distance": "manhattan"}, **options}[name]
    one = build(name, (5, 5))
    before = [attend_by(terms, q, k, v)[1] for terms in one(positions, grid)]
    changed = [attend_by(terms, q, k, v)[1] for terms in build(name, (5, 5), **other)(positions, grid)]
    after = [attend_by(terms, q, k, v)[1] for terms in one(positions, grid)]
    assert not any(torch.equal(a, b) for a, b in zip(before, changed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_defaults_are_those_of_the_training_grid():
    assert Shaw((4, 7), HEAD_DIM, 1).clips == (3, 6)
    assert DeBERTa((1, 7), DIM, HEADS, HEAD_DIM, 1, clip=5).clips == (5, 5)
    assert Shaw((1, 7), HEAD_DIM, 1).clips == (1, 6)
    assert T5((4, 7), HEADS, 1).max_distances == (3, 6)
    assert T5((1, 7), HEADS, 1, max_distance=128).max_distances == (128, 128)
    for bad in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="clip is"):
            Shaw((4, 7), HEAD_DIM, 1, clip=bad)
    with pytest.raises(ValueError, match="embed_dim is 6; sinusoids need a multiple of 4"):
        TransformerXL(2, 6, 1, 6, 1)


# ---- in a model


def model_of(name: str, **options: Any) -> Any:
    """Blocks of which timm's own layers keep the numbers; two prefix tokens."""
    model = vr.create_model(
        "vit_tiny_patch16_224",
        name,
        position_options=options,
        depth=DEPTH,
        embed_dim=DIM,
        num_heads=HEADS,
        num_classes=5,
        img_size=(48, 64),
        reg_tokens=1,
        attn_drop_rate=0.0,
    )
    with torch.no_grad():
        for parameter in model.position.parameters():
            parameter.normal_(std=0.5)
    return model.eval()


def attention_calls(model: Any, images: Tensor, **arguments: Any) -> list[tuple[Any, Tensor, Tensor]]:
    calls: list[tuple[Any, Tensor, Tensor]] = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda layer, inputs, output: calls.append((layer, inputs[0], output)))
    with torch.no_grad():
        model.forward_features(images, **arguments)
    return calls


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_models_attention_is_the_papers_formula(name, options, fused):
    """At a grid that was never trained, with a mask, a bias, and causal order too."""
    model = model_of(name, **options)
    for block in model.blocks:
        block.attn.fused_attn = fused
    grid = (1, 5)
    images = torch.randn(1, 3, 16, 80)
    places = [None, None, *itertools.product(range(1), range(5))]
    encoding = copy.deepcopy(model.position).double()
    boolean = torch.rand(7, 7) > 0.3
    boolean.fill_diagonal_(True)
    numbers = torch.randn(7, 7)
    for arguments in ({}, {"attn_mask": boolean}, {"attn_mask": numbers}, {"is_causal": True}):
        model = copy.deepcopy(model)
        for layer, (attention, x, out) in enumerate(attention_calls(model, images, **arguments)):
            exact = copy.deepcopy(attention).double()
            q, k, v = exact.qkv(x.double()).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4).unbind(0)
            with torch.no_grad():
                scores, answers = attend_by_loops(encoding, places, layer, q[0], k[0], v[0])
                if arguments:
                    mask = arguments.get("attn_mask", torch.ones(7, 7, dtype=torch.bool).tril())
                    added = mask if mask.dtype != torch.bool else torch.zeros(7, 7).masked_fill(~mask, -math.inf)
                    weights = (scores + added).softmax(-1)
                    answers = weights @ v[0]
                    terms = encoding(vr.grid_positions(*grid), grid, 2)[layer]
                    if terms.values is not None:  # held against the loop without a mask
                        answers = answers + terms.value_term(weights[None])[0]
                wanted = exact.proj(answers.transpose(0, 1).flatten(1))
            assert_close(out[0].double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_causal_mask_with_another_mask_is_refused(name):
    with pytest.raises(ValueError, match="is_causal cannot be combined with attn_mask"):
        model_of(name).forward_features(torch.randn(1, 3, 48, 64), attn_mask=torch.zeros(14, 14), is_causal=True)


@pytest.mark.parametrize("name", RELATIVE)
def test_dropout_of_weights_reaches_the_value_term(name):
    model = model_of(name).train()
    images = torch.randn(1, 3, 48, 64)
    quiet = model(images)
    for block in model.blocks:
        block.attn.attn_drop.p = 0.5
    assert not torch.allclose(model(images), quiet)
    for block in model.blocks:
        block.attn.attn_drop.p = 1.0
    calls = attention_calls(model, images)
    assert all(torch.equal(out, layer.proj.bias.expand_as(out)) for layer, _, out in calls)


@pytest.mark.parametrize("name", RELATIVE)
def test_no_term_stays_in_a_module(name):
    """State is an argument."""
    model = model_of(name)
    before = {key: set(vars(module)) for key, module in model.named_modules()}
    model(torch.randn(1, 3, 64, 32))
    for key, module in model.named_modules():
        assert set(vars(module)) == before[key]
        assert not any(isinstance(value, RelativeTerms | Tensor) for value in vars(module).values())
        assert not module._buffers or key == ""


@pytest.mark.parametrize("name", RELATIVE)
def test_encodings_are_not_decayed_and_survive_pruning(name):
    model = model_of(name)
    names = {f"position.{key}" for key, _ in model.position.named_parameters()}
    assert names <= model.no_weight_decay()
    assert bool(names) == (name != "alibi")
    images = torch.randn(1, 3, 48, 64)
    wanted = model.forward_intermediates(images, indices=[0], intermediates_only=True)[0]
    model.prune_intermediate_layers([0])
    assert torch.equal(model.forward_intermediates(images, indices=[0], intermediates_only=True)[0], wanted)
    model.blocks = nn.Sequential(*model.blocks, *copy.deepcopy(model.blocks), *copy.deepcopy(model.blocks))
    with pytest.raises(ValueError, match="3 blocks and its encoding layers for 2"):
        model(images)


@pytest.mark.parametrize("name", RELATIVE)
def test_a_freshly_converted_model_says_nearly_what_it_said(name):
    """Small first values: what was trained without the encoding isn't destroyed by it. ALiBi has no such start."""
    import timm

    theirs = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=5, img_size=64, pos_embed="none").eval()
    nn.init.trunc_normal_(theirs.head.weight, std=0.1)
    images = torch.randn(2, 3, 64, 64)
    before = theirs(images)
    after = vr.add_position(copy.deepcopy(theirs), name)(images)
    assert after.isfinite().all()
    difference = (after - before).norm() / before.norm()
    assert 0 < difference < (1.0 if name == "alibi" else 0.3)
