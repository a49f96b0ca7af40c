"""Memory attention: numbers of SAM 2 and of the installed Ultralytics, a second formulation, and all ways to run it."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.memory import folded
from vision_rope.memory.attention import MemoryAttention, MemoryEntry, RopeAttention
from vision_rope.memory.folded import MemoryPart, average_memory
from vision_rope.video.sam2 import ultralytics_module

Grid = tuple[int, int]
DIM, MEMORY_DIM = 32, 8


@pytest.fixture(params=[False, True], ids=["values", "folded"])
def is_folded(request, monkeypatch) -> Iterator[bool]:
    """Runs a test with gradients, where values are attended to, and without, where the memory is averaged."""
    calls = []

    def count(*args):
        calls.append(1)
        return average_memory(*args)

    monkeypatch.setattr("vision_rope.memory.rope_attention.average_memory", count)
    with torch.set_grad_enabled(not request.param):
        yield request.param
    assert bool(calls) == request.param


def small_attention(depth: int = 2, num_heads: int = 1, **options) -> MemoryAttention:
    attention = MemoryAttention(DIM, MEMORY_DIM, depth=depth, mlp_dim=48, num_heads=num_heads, **options).eval()
    for layer in attention.layers:  # attention that is not flat, or rotations would hardly matter
        for projection in (layer.self_attn.q_proj, layer.cross_attn_image.q_proj):
            nn.init.normal_(projection.weight)
    return attention


def count(grid: Grid) -> int:
    return grid[0] * grid[1]


def frame(grid: Grid, batch: int = 1, **more) -> MemoryEntry:
    return MemoryEntry(torch.randn(batch, count(grid), MEMORY_DIM), grid, torch.randn(count(grid), MEMORY_DIM), **more)


def weights_of(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix("w."): value for key, value in vectors.items() if key.startswith("w.")}


# --- numbers of SAM 2 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [(8, 8), (12, 16), (16, 12), (7, 5)])
def test_golden_angles(golden, grid):
    expected = golden(f"axial_cis_d32_w{grid[1]}_h{grid[0]}")["sam2"]
    rotation = MemoryAttention(32, 8, depth=1).rope.grid_rotations(*grid)[0]
    assert_close(torch.stack((rotation.cos[0], rotation.sin[0]), dim=-1), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "grid", "num_heads"),
    [
        ("rope_self_h1", (8, 8), 1),
        ("rope_self_h2_ds2", (8, 8), 2),
        ("rope_self_h1_nonsquare_w16h12", (12, 16), 1),
        ("rope_cross_8x8_f0_p4", (8, 8), 1),
        ("rope_cross_8x8_f1_p0", (8, 8), 1),
        ("rope_cross_8x8_f3_p8", (8, 8), 1),
        ("rope_cross_w16h12_f2_p4", (12, 16), 1),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_golden_attention(golden, name, grid, num_heads, grad):
    vectors = golden(name)
    weights = weights_of(vectors)
    internal_dim, dim = weights["q_proj.weight"].shape
    kv_dim = weights["k_proj.weight"].shape[1]
    attention = RopeAttention(dim, num_heads=num_heads, kv_dim=kv_dim, internal_dim=internal_dim)
    attention.load_state_dict(weights)
    rotation = vr.preset("sam2", head_dim=internal_dim // num_heads).grid_rotations(*grid)[0]
    pointers = int(vectors.get("in.num_k_exclude_rope", 0))
    turned = vectors["in.k"].shape[1] - pointers
    with torch.set_grad_enabled(grad):
        out = attention.read(
            vectors["in.q"], rotation, [MemoryPart(vectors["in.v"], vectors["in.k"], rotation, turned)]
        )
    assert_close(out, vectors["out.sam2"], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("memattn_8x8_f1_p0", (8, 8)),
        ("memattn_8x8_f3_p8", (8, 8)),
        ("memattn_8x8_f7_p16", (8, 8)),
        ("memattn_w16h12_f2_p4", (12, 16)),
    ],
)
def test_golden_memory_attention(golden, is_folded, name, grid):
    vectors = golden(name)
    attention = MemoryAttention(32, 8, depth=2, mlp_dim=64).eval()
    attention.load_state_dict(weights_of(vectors))
    inputs = {key: vectors[f"in.{key}"].transpose(0, 1) for key in ("curr", "memory", "curr_pos", "memory_pos")}
    out = attention(
        inputs["curr"],
        inputs["memory"],
        grid=grid,
        tokens_pos=inputs["curr_pos"],
        memory_pos=inputs["memory_pos"],
        num_pointer_tokens=int(vectors["in.num_obj_ptr_tokens"]),
    )
    assert_close(out.transpose(0, 1), vectors["out.sam2"], atol=2e-5, rtol=0)


@pytest.fixture
def ultralytics_memory():
    """Builder of Ultralytics' memory attention: (num_heads) -> module."""
    pytest.importorskip("ultralytics")
    blocks = ultralytics_module("models.sam.modules.blocks")
    memory = ultralytics_module("models.sam.modules.memory_attention")

    def build(num_heads: int = 1) -> nn.Module:
        layer = memory.MemoryAttentionLayer(
            d_model=DIM,
            dim_feedforward=48,
            self_attn=blocks.RoPEAttention(embedding_dim=DIM, num_heads=num_heads),
            cross_attn=blocks.RoPEAttention(
                embedding_dim=DIM, num_heads=num_heads, kv_in_dim=MEMORY_DIM, rope_k_repeat=True
            ),
        )
        return memory.MemoryAttention(DIM, pos_enc_at_input=True, layer=layer, num_layers=2).eval()

    return build


@pytest.mark.integration
@pytest.mark.parametrize("num_heads", [1, 2])
def test_equals_ultralytics_at_random_square_sizes(ultralytics_memory, num_heads):
    theirs, draw = ultralytics_memory(num_heads), random.Random(num_heads)
    ours = small_attention(num_heads=num_heads)
    theirs.load_state_dict(ours.state_dict())
    for _ in range(6):
        side, frames, pointers, batch = (draw.randint(*span) for span in ((2, 14), (1, 4), (0, 9), (1, 3)))
        x, x_pos = torch.randn(2, batch, side**2, DIM)
        memory, memory_pos = torch.randn(2, batch, frames * side**2 + pointers, MEMORY_DIM)
        swapped = [tensor.transpose(0, 1) for tensor in (x, memory, x_pos, memory_pos)]
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                out = ours(
                    x, memory, grid=(side, side), tokens_pos=x_pos, memory_pos=memory_pos, num_pointer_tokens=pointers
                )
                expected = theirs(*swapped, num_obj_ptr_tokens=pointers).transpose(0, 1)
            assert_close(out, expected, atol=2e-5, rtol=0)


@pytest.mark.integration
def test_state_dict_is_that_of_ultralytics():
    pytest.importorskip("ultralytics")
    memory = ultralytics_module("models.sam.modules.memory_attention")
    theirs = memory.MemoryAttention(256, pos_enc_at_input=True, layer=memory.MemoryAttentionLayer(), num_layers=4)
    ours = MemoryAttention().state_dict()
    assert {key: x.shape for key, x in theirs.state_dict().items()} == {key: x.shape for key, x in ours.items()}


def test_state_dict_has_the_names_of_sam2():
    leaves = [f"{kind}.{name}_proj" for kind in ("self_attn", "cross_attn_image") for name in ("q", "k", "v", "out")]
    leaves += ["linear1", "linear2", "norm1", "norm2", "norm3"]
    modules = ["norm", *(f"layers.{layer}.{leaf}" for layer in range(4) for leaf in leaves)]
    with torch.device("meta"):
        state = MemoryAttention().state_dict()
    assert set(state) == {f"{module}.{name}" for module in modules for name in ("weight", "bias")}
    assert state["layers.3.cross_attn_image.k_proj.weight"].shape == (256, 64)
    assert state["layers.3.linear1.weight"].shape == (2048, 256)


# --- grids ------------------------------------------------------------------------------------------------------------


def test_every_grid_has_its_own_angles():
    """Failure class 34: all 4,032 grids up to 64 x 64 that are not square."""
    rope = MemoryAttention(8, 4, depth=1).rope
    frequencies = [10000.0 ** (-4 * i / 8) for i in range(2)]
    table = np.zeros((64, 64, 4))
    for row in range(64):
        for column in range(64):
            table[row, column] = [column * f for f in frequencies] + [row * f for f in frequencies]
    cos, sin = (torch.from_numpy(part.astype(np.float32)) for part in (np.cos(table), np.sin(table)))
    grids = [(rows, columns) for rows in range(1, 65) for columns in range(1, 65) if rows != columns]
    assert len(grids) == 4032
    random.Random(0).shuffle(grids)
    wrong = []
    for rows, columns in grids:
        rotation = rope.grid_rotations(rows, columns)[0]
        errors = [
            (found[0] - table[:rows, :columns].reshape(-1, 4)).abs().max().item()
            for found, table in ((rotation.cos, cos), (rotation.sin, sin))
        ]
        if max(errors) > 1e-6:
            wrong.append((rows, columns))
    assert not wrong


def turn_explicitly(x: Tensor, grid: Grid | None, num_heads: int) -> Tensor:
    """(batch, tokens, channels) -> (batch, heads, tokens, channels of a head), turned by complex numbers."""
    heads = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    if grid is None:
        return heads
    dim = heads.shape[-1]
    places = [(column, row) for row in range(grid[0]) for column in range(grid[1])]
    angles = [[place[axis] * 10000.0 ** (-4 * i / dim) for axis in (0, 1) for i in range(dim // 4)] for place in places]
    turns = torch.exp(1j * torch.tensor(angles, dtype=torch.float64))
    return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


def read_explicitly(attention: MemoryAttention, tokens: Tensor, entries: list[MemoryEntry], grid: Grid) -> Tensor:
    """Memory attention of a float64 module, object by object."""
    batch = max(tokens.shape[0], *(entry.features.shape[0] for entry in entries))
    outs = []
    for sample in range(batch):
        x = tokens[[sample % len(tokens)]]
        for layer in attention.layers:
            for kind, norm in ((layer.self_attn, layer.norm1), (layer.cross_attn_image, layer.norm2)):
                normed = norm(x)
                if kind is layer.self_attn:
                    memory, placed, grids = [normed], [normed], [grid]
                else:
                    memory = [entry.features[[sample % len(entry.features)]] for entry in entries]
                    placed = [
                        m + (0 if e.position is None else e.position) + (0 if e.age is None else e.age)
                        for m, e in zip(memory, entries, strict=True)
                    ]
                    grids = [entry.grid for entry in entries]
                q = turn_explicitly(kind.q_proj(normed), grid, kind.num_heads)
                k = torch.cat(
                    [turn_explicitly(kind.k_proj(p), g, kind.num_heads) for p, g in zip(placed, grids, strict=True)], 2
                )
                v = turn_explicitly(kind.v_proj(torch.cat(memory, 1)), None, kind.num_heads)
                weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
                x = x + kind.out_proj((weights @ v).transpose(1, 2).flatten(2))
            x = x + layer.linear2(layer.linear1(layer.norm3(x)).relu())
        outs.append(attention.norm(x))
    return torch.cat(outs)


@pytest.mark.parametrize("grid", [(6, 6), (3, 12), (9, 4), (1, 7)])
def test_read_equals_a_second_formulation(is_folded, grid):
    """Failure class 34: frames of other grids in one memory, each with its own age; pointers."""
    torch.set_default_dtype(torch.float64)
    try:
        attention = small_attention()
        entries = [
            frame(grid, age=torch.randn(MEMORY_DIM)),
            frame((2, 5), age=torch.randn(MEMORY_DIM)),
            frame((5, 2)),
            MemoryEntry(torch.randn(1, 4, MEMORY_DIM), None, torch.randn(4, MEMORY_DIM)),
            frame(grid[::-1], age=torch.randn(MEMORY_DIM)),
            frame(grid, age=torch.randn(MEMORY_DIM)),
        ]
        tokens = torch.randn(1, count(grid), DIM)
        out = attention.read(tokens, entries, grid=grid)
        assert_close(out, read_explicitly(attention, tokens, entries, grid), atol=2e-6, rtol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_two_heads_equal_a_second_formulation():
    torch.set_default_dtype(torch.float64)
    try:
        attention = small_attention(num_heads=2)
        entries = [frame((3, 4), age=torch.randn(MEMORY_DIM)), frame((2, 5), age=torch.randn(MEMORY_DIM))]
        tokens = torch.randn(1, 12, DIM)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                out = attention.read(tokens, entries, grid=(3, 4))
            assert_close(out, read_explicitly(attention, tokens, entries, (3, 4)), atol=2e-6, rtol=0)
    finally:
        torch.set_default_dtype(torch.float32)


# --- entries of a bank ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("grid", [(4, 4), (3, 7)])
def test_read_equals_one_memory(is_folded, is_prepared, grid):
    attention = small_attention()
    entries = [frame(grid, batch=2, age=torch.randn(MEMORY_DIM)) for _ in range(3)]
    pointers = MemoryEntry(torch.randn(2, 5, MEMORY_DIM), None, torch.randn(2, 5, MEMORY_DIM))
    tokens, tokens_pos = torch.randn(2, 2, count(grid), DIM)
    memory = torch.cat([entry.features for entry in (*entries, pointers)], dim=1)
    positions = [(entry.position + entry.age).expand_as(entry.features) for entry in entries]
    expected = attention(
        tokens,
        memory,
        grid=grid,
        tokens_pos=tokens_pos,
        memory_pos=torch.cat((*positions, pointers.position), dim=1),
        num_pointer_tokens=5,
    )
    if is_prepared:
        with torch.no_grad():
            entries = [_with_keys(attention, entry) for entry in entries]
            pointers = _with_keys(attention, pointers)
    out = attention.read(tokens, [*entries, pointers], grid=grid, tokens_pos=tokens_pos)
    assert_close(out, expected, atol=2e-5, rtol=0)
    # The order of entries means nothing.
    again = attention.read(tokens, [pointers, *entries[::-1]], grid=grid, tokens_pos=tokens_pos)
    assert_close(again, expected, atol=2e-5, rtol=0)


def _with_keys(attention: MemoryAttention, entry: MemoryEntry) -> MemoryEntry:
    return replace(entry, keys=attention.prepare_keys(entry))


def test_several_objects_equal_each_alone(is_folded):
    attention = small_attention()
    grid = (3, 5)
    entries = [
        frame(grid, batch=3, age=torch.randn(MEMORY_DIM)),
        frame((2, 2), batch=3),
        MemoryEntry(torch.randn(3, 4, MEMORY_DIM), None),
    ]
    tokens = torch.randn(1, 15, DIM)
    together = attention.read(tokens, entries, grid=grid)
    assert together.shape == (3, 15, DIM)
    for index in range(3):
        own = [replace(entry, features=entry.features[[index]]) for entry in entries]
        assert_close(together[[index]], attention.read(tokens, own, grid=grid), atol=2e-6, rtol=0)
    memory = torch.cat((entries[0].features, entries[2].features), dim=1)
    together = attention(tokens, memory, grid=grid, num_pointer_tokens=4)
    alone = [attention(tokens, memory[[index]], grid=grid, num_pointer_tokens=4) for index in range(3)]
    assert_close(together, torch.cat(alone), atol=2e-6, rtol=0)


# --- the average ------------------------------------------------------------------------------------------------------


def average_explicitly(q: Tensor, attention: RopeAttention, parts: list[MemoryPart], scale: float) -> Tensor:
    """Keys of each frame are made and turned by themselves, then one softmax over all."""
    batch = max(len(x) for x in (q, *(x for part in parts for x in part.tensors())))
    keys = []
    for part in parts:
        if part.keys is not None:
            keys.append(part.keys)
            continue
        frame = part.placed.shape[1] if part.rotation is None else part.rotation.cos.shape[-2]
        for start in range(0, part.turned, frame):
            made = attention.k_proj(part.placed[:, start : start + frame])
            keys.append(vr.rotate(made.unsqueeze(1), part.rotation).squeeze(1))
        keys.append(attention.k_proj(part.placed[:, part.turned :]))
    # Parts of a batch of 1 are the same for all samples.
    keys = torch.cat([k.expand(batch, -1, -1) for k in keys], dim=1).double()
    memory = torch.cat([part.memory.expand(batch, -1, -1) for part in parts], dim=1).double()
    return (scale * q.double() @ keys.mT).softmax(-1) @ memory


def draw_part(
    attention: RopeAttention, frames: int, grid: Grid, pointers: int, *, batch: int = 2, prepared: bool = False
) -> MemoryPart:
    rotation = vr.preset("sam2", head_dim=16).grid_rotations(*grid)[0]
    turned = frames * grid[0] * grid[1]
    memory, placed = torch.randn(2, turned + pointers, 4), torch.randn(batch, turned + pointers, 4)
    part = MemoryPart(memory, placed, rotation if turned else None, turned)
    return replace(part, keys=attention.make_keys(placed, part.rotation, turned)) if prepared else part


@pytest.mark.parametrize("queries", [7, 8, 9])
@pytest.mark.parametrize("scale", [0.1, 30.0])
@pytest.mark.parametrize("size", [1, 5, 6, 11, 12, 13, 24, 30, 31, 32, 100])
@torch.no_grad()
def test_average_at_the_borders_of_blocks(monkeypatch, size, queries, scale):
    """Frames of 6 and of 15 tokens, smaller and larger than a block; scores up to 1,000 would overflow exp."""
    monkeypatch.setattr(folded, "QUERIES", 8)
    monkeypatch.setattr(folded, "SCORES", 8 * size)
    attention = RopeAttention(16, kv_dim=4)
    parts = [
        draw_part(attention, 4, (2, 3), 6),
        draw_part(attention, 2, (5, 3), 1, batch=1),
        draw_part(attention, 1, (3, 2), 3, prepared=True),
        draw_part(attention, 0, (2, 3), 5),
    ]
    q = torch.randn(2, queries, 16)
    found = average_memory(q, parts, attention.make_keys, scale).double()
    expected = average_explicitly(q, attention, parts, scale)
    assert_close(found, expected, atol=1e-4 if scale > 1 else 1e-6, rtol=0)


@pytest.mark.parametrize(
    "order", [(0.01, 300.0), (300.0, 0.01), (0.01, -300.0, 0.01), (-300.0, -310.0), (-300.0, 300.0), (-60.0, -50.0)]
)
@torch.no_grad()
def test_average_of_harmless_and_large_scores(monkeypatch, order):
    """Scores whose exp leaves float32, or falls to its end, before and after others."""
    monkeypatch.setattr(folded, "SCORES", 5 * 8)
    attention = RopeAttention(16, kv_dim=4)
    q = torch.ones(1, 5, 16) / 16 + 0.01 * torch.randn(1, 5, 16)
    memory = [torch.randn(1, 20, 4) for _ in order]
    parts = [
        MemoryPart(m, m, keys=score + 0.1 * torch.randn(1, 20, 16)) for score, m in zip(order, memory, strict=True)
    ]
    found = average_memory(q, parts, attention.make_keys, 1.0).double()
    assert_close(found, average_explicitly(q, attention, parts, 1.0), atol=1e-4, rtol=0)


@torch.no_grad()
def test_average_of_a_frame_of_sam2():
    """Real block sizes: a little more keys than one block of 4,096 queries takes."""
    attention = RopeAttention(16, kv_dim=4)
    q, part = torch.randn(1, 4097, 16), draw_part(attention, 2, (27, 20), 4, batch=1)
    found = average_memory(q, [part], attention.make_keys, 0.25).double()
    assert_close(found[0], average_explicitly(q, attention, [part], 0.25)[0], atol=1e-5, rtol=0)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
def test_attention_weights_drop_in_training_alone(grad):
    """Dropped and scaled up, weights average to those of evaluation, and the rest of the layer drops nothing here."""
    attention = small_attention(depth=1, dropout=0.4)
    cross = attention.layers[0].cross_attn_image
    rotation = attention.rope.grid_rotations(2, 3)[0]
    x, memory = torch.randn(1, 6, DIM), torch.randn(1, 6, MEMORY_DIM)
    with torch.set_grad_enabled(grad):
        part = MemoryPart(memory, memory, rotation, 6)
        expected = cross.read(x, rotation, [part])
        assert torch.equal(cross.read(x, rotation, [part]), expected)
        cross.train()
        draws = torch.stack([cross.read(x, rotation, [part]).detach() for _ in range(1500)])
    spread = draws.std(dim=0)
    assert (spread > 1e-3).all()
    assert ((draws.mean(dim=0) - expected).abs() < 5 * spread / math.sqrt(len(draws))).all()
    attention.train()
    assert attention.layers[0].self_attn.dropout == 0.4
    assert attention.layers[0].dropout.p == 0.4


def test_gradients_equal_differences():
    torch.set_default_dtype(torch.float64)
    try:
        attention = MemoryAttention(8, 4, depth=1, mlp_dim=8).eval()
        inputs = [torch.randn(1, 6, 8), torch.randn(2, 4, 4), torch.randn(6, 4), torch.randn(4), torch.randn(2, 2, 4)]
        weight = attention.layers[0].cross_attn_image.k_proj.weight.detach().clone()

        def read(tokens, features, position, age, pointers, weight):
            entries = [
                MemoryEntry(features, (1, 4), None, age),
                MemoryEntry(position[None], (2, 3), position, age),
                MemoryEntry(pointers, None),
            ]
            arguments = {"entries": entries, "grid": (3, 2)}
            changed = {"m.layers.0.cross_attn_image.k_proj.weight": weight}
            return torch.func.functional_call(_Read(attention), changed, (tokens,), arguments)

        assert torch.autograd.gradcheck(read, [x.requires_grad_() for x in (*inputs, weight)])
    finally:
        torch.set_default_dtype(torch.float32)


class _Read(nn.Module):
    def __init__(self, attention: MemoryAttention) -> None:
        super().__init__()
        self.m = attention

    def forward(self, tokens: Tensor, entries: list[MemoryEntry], grid: Grid) -> Tensor:
        return self.m.read(tokens, entries, grid=grid)


def test_gradients_reach_ages_alone_and_do_not_need_them():
    """Ages are learned while the layers are frozen."""
    attention = small_attention().requires_grad_(False)
    age = torch.randn(MEMORY_DIM, requires_grad=True)
    entries = [frame((2, 3), age=age), frame((4, 2), age=age)]
    tokens = torch.randn(1, 6, DIM)
    out = attention.read(tokens, entries, grid=(2, 3))
    out.square().sum().backward()
    assert age.grad is not None
    assert age.grad.abs().max() > 0
    with torch.no_grad():
        assert_close(attention.read(tokens, entries, grid=(2, 3)), out, atol=2e-5, rtol=0)


# --- numbers, copies, compilers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_of_another_dtype_than_the_weights(dtype, memory_dtype):
    """Failure class 42."""
    attention = small_attention()
    grid = (3, 5)
    entries = [frame(grid, batch=2, age=torch.randn(MEMORY_DIM)), MemoryEntry(torch.randn(2, 4, MEMORY_DIM), None)]
    tokens = torch.randn(2, 15, DIM)

    def cast(entry: MemoryEntry, keys: bool = False) -> MemoryEntry:
        made = tuple(k.to(memory_dtype) for k in attention.prepare_keys(entry)) if keys else None
        return MemoryEntry(entry.features.to(memory_dtype), entry.grid, entry.position, entry.age, made)

    with torch.no_grad():
        expected = attention.read(tokens, entries, grid=grid)
        attention.to(dtype)
        for out in (
            attention.read(tokens.to(dtype), [cast(entry) for entry in entries], grid=grid),
            attention.read(tokens.to(dtype), [cast(entry, keys=True) for entry in entries], grid=grid),
        ):
            assert out.dtype == dtype
            tolerance = {torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 0.1}
            bound = max(tolerance[dtype], tolerance[memory_dtype])
            assert (out.float() - expected).abs().max() < bound
        memory = torch.cat([entry.features for entry in entries], dim=1).to(memory_dtype)
        assert attention(tokens.to(dtype), memory, grid=grid, num_pointer_tokens=4).dtype == dtype


def test_autocast():
    """Failure class 42: half precision by autocast, with keys that were prepared outside of it."""
    attention = small_attention()
    entries = [frame((3, 5), age=torch.randn(MEMORY_DIM)), frame((2, 4))]
    tokens = torch.randn(1, 15, DIM)
    with torch.no_grad():
        expected = attention.read(tokens, entries, grid=(3, 5))
        prepared = [_with_keys(attention, entries[0]), entries[1]]
        with torch.autocast("cpu", torch.bfloat16):
            out = attention.read(tokens.bfloat16(), prepared, grid=(3, 5))
    assert_close(out.float(), expected, atol=0.1, rtol=0)


def test_casts_and_copies_keep_angles():
    """Failure classes 4 and 6: bfloat16, deepcopy, pickle, and a module built without memory."""
    attention = small_attention()
    entries, tokens = [frame((3, 5), age=torch.randn(MEMORY_DIM))], torch.randn(1, 15, DIM)
    expected = attention.read(tokens, entries, grid=(3, 5))
    table = attention.rope.grid_rotations(5, 9)[0]
    cast = copy.deepcopy(attention).bfloat16().rope.grid_rotations(5, 9)[0]
    assert cast.cos.dtype == torch.float32
    assert torch.equal(cast.cos, table.cos)
    assert torch.equal(cast.sin, table.sin)
    file = io.BytesIO()
    torch.save(attention.state_dict(), file)
    file.seek(0)
    with torch.device("meta"):
        hollow = MemoryAttention(DIM, MEMORY_DIM, depth=2, mlp_dim=48).eval()
    hollow.to_empty(device="cpu").load_state_dict(torch.load(file))
    for same in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention)), hollow):
        assert torch.equal(same.read(tokens, entries, grid=(3, 5)), expected)


def refuse_complex(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        assert not (isinstance(value, Tensor) and value.is_complex()), node
    return graph


@pytest.mark.integration
@pytest.mark.parametrize("grad", [True, False])
def test_compiles_whole_without_complex_numbers(grad):
    """Failure class 7; and failure class 2, the same number of tokens on another grid."""
    torch._dynamo.reset()
    attention = small_attention(depth=1)
    forward = torch.compile(attention.forward, fullgraph=True, backend=refuse_complex)
    read = torch.compile(attention.read, fullgraph=True, backend=refuse_complex)
    with torch.set_grad_enabled(grad):
        for grid in ((3, 4), (4, 3)):
            tokens, memory = torch.randn(1, 12, DIM), torch.randn(1, 29, MEMORY_DIM)
            if grad:
                expected = attention(tokens, memory, grid=grid, num_pointer_tokens=5)
                out = forward(tokens, memory, grid=grid, num_pointer_tokens=5)
            else:
                entries = [frame(grid, age=torch.randn(MEMORY_DIM)), frame((2, 5)), MemoryEntry(memory, None)]
                expected = attention.read(tokens, entries, grid=grid)
                out = read(tokens, entries, grid=grid)
            assert_close(out, expected, atol=2e-5, rtol=0)
    torch._dynamo.reset()


class FixedMemory(nn.Module):
    """What is exported: a frame reads a fixed number of stored frames of its own grid, and pointers."""

    def __init__(self, attention: MemoryAttention, grid: Grid) -> None:
        super().__init__()
        self.attention = attention
        self.grid = grid

    def forward(self, tokens: Tensor, features: Tensor, position: Tensor, ages: Tensor, pointers: Tensor) -> Tensor:
        frames = zip(features.unbind(), ages.unbind(), strict=True)
        entries = [MemoryEntry(stored, self.grid, position, age) for stored, age in frames]
        return self.attention.read(tokens, [*entries, MemoryEntry(pointers, None)], grid=self.grid)


@pytest.mark.integration
@pytest.mark.parametrize("grid", [(4, 4), (3, 7)])
def test_onnx(grid, tmp_path):
    """Failure class 7: a square and a rectangular grid in another runtime."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = FixedMemory(small_attention(depth=1), grid).eval()
    shapes = [(1, count(grid), DIM), (2, 1, count(grid), MEMORY_DIM), (count(grid), MEMORY_DIM), (2, MEMORY_DIM)]
    inputs = [torch.randn(shape) for shape in (*shapes, (1, 4, MEMORY_DIM))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(model, tuple(inputs), tmp_path / "memory.onnx", dynamo=True, verbose=False)
    graph = onnx.load(tmp_path / "memory.onnx").graph
    kinds = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info)}
    assert kinds.isdisjoint({onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128})
    session = onnxruntime.InferenceSession(tmp_path / "memory.onnx", providers=["CPUExecutionProvider"])
    inputs = [torch.randn_like(x) for x in inputs]
    feeds = {value.name: x.numpy() for value, x in zip(session.get_inputs(), inputs, strict=True)}
    (out,) = session.run(None, feeds)
    assert_close(torch.from_numpy(out), model(*inputs).detach(), atol=1e-4, rtol=0)


# --- a backbone of timm -----------------------------------------------------------------------------------------------


def test_memory_of_a_timm_backbone():
    """Features of a frame, conditioned on the frame before, at another width; gradients reach everything."""
    backbone = vr.create_model(
        "vit_tiny_patch16_224", position="rope-vit-axial", embed_dim=48, depth=2, num_heads=3, num_classes=0
    )
    attention = vr.MemoryAttention(dim=32, memory_dim=8, depth=1, mlp_dim=48, dropout=0.0)
    narrow, store = nn.Linear(48, 32), nn.Linear(48, 8)
    grid = (2, 5)
    video = torch.randn(2, 2, 3, 16 * grid[0], 16 * grid[1])  # (batch, time, channels, height, width)

    def features(images: Tensor) -> Tensor:
        return backbone.forward_intermediates(images, indices=1, output_fmt="NLC", intermediates_only=True)[0]

    before, now = features(video[:, 0]), features(video[:, 1])
    assert now.shape == (2, 10, 48)
    out = attention.read(narrow(now), [MemoryEntry(store(before), grid)], grid=grid)
    out.square().mean().backward()
    assert out.shape == (2, 10, 32)
    for module in (backbone.blocks, backbone.patch_embed, attention, narrow, store):
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters() if p.ndim > 1)
    other = attention.read(narrow(now), [MemoryEntry(store(before), grid[::-1])], grid=grid)
    assert (other - out).abs().max() > 1e-4


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "memory", "options", "message"),
    [
        ((1, 11), (1, 24), {}, r"tokens has shape \(1, 11, 32\); a frame of the grid \(3, 4\) has \(batch, 12"),
        ((1, 12), (1, 23), {}, "memory has 23 tokens, 0 of them of pointers; the others must be whole frames"),
        ((1, 12), (1, 24), {"num_pointer_tokens": 1}, "1 of them of pointers"),
        ((1, 12), (1, 24), {"num_pointer_tokens": -12}, "-12 of them of pointers"),
        ((1, 12), (1, 24), {"num_pointer_tokens": 36}, "36 of them of pointers"),
        ((2, 12), (3, 24), {}, r"memory has shape \(3, 24, 8\) beside \(2, 12, 32\); .* the same batch"),
        ((1, 12), (1, 24), {"grid": (3, 4, 1)}, r"grid is \(3, 4, 1\); it must be \(rows, columns\)"),
    ],
)
def test_errors_of_a_call(tokens, memory, options, message):
    attention = small_attention(depth=1)
    with pytest.raises(ValueError, match=message):
        attention(torch.randn(*tokens, DIM), torch.randn(*memory, MEMORY_DIM), **{"grid": (3, 4), **options})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "entries is empty"),
        ([MemoryEntry(torch.randn(1, 11, MEMORY_DIM), (3, 4))], r"shape \(1, 11, 8\) and its grid is \(3, 4\)"),
        ([MemoryEntry(torch.randn(1, 24, MEMORY_DIM), (3, 4))], r"features must be \(batch, 12, memory_dim\)"),
        ([MemoryEntry(torch.randn(12, MEMORY_DIM), (3, 4))], r"features must be \(batch, 12, memory_dim\)"),
        ([MemoryEntry(torch.randn(12, MEMORY_DIM), None)], r"features must be \(batch, tokens, memory_dim\)"),
        ([MemoryEntry(torch.randn(3, 12, MEMORY_DIM), (3, 4))], r"beside \(2, 12, 32\)"),
        ([MemoryEntry(torch.randn(2, 3, MEMORY_DIM), None, age=torch.randn(MEMORY_DIM))], "without a grid has an age"),
    ],
)
def test_errors_of_entries(entries, message):
    attention = small_attention(depth=1)
    with pytest.raises(ValueError, match=message):
        attention.read(torch.randn(2, 12, DIM), entries, grid=(3, 4))


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_heads is 3 and must divide the 32 channels"):
        MemoryAttention(32, 8, num_heads=3)


@torch.no_grad()
def test_a_hook_on_a_projection_keeps_what_it_saw():
    attention = RopeAttention(32, kv_dim=8).eval()
    rotation = vr.preset("sam2", head_dim=32).grid_rotations(3, 5)[0]
    seen = []
    for layer in (attention.q_proj, attention.k_proj):
        layer.register_forward_hook(lambda module, inputs, output: seen.append((output, output.clone())))
    memory = torch.randn(1, 15, 8)
    attention.read(torch.randn(1, 15, 32), rotation, [MemoryPart(memory, memory, rotation, 15)])
    assert len(seen) == 2
    assert all(torch.equal(output, before) for output, before in seen)


@torch.no_grad()
def test_grids_from_files_are_lists():
    attention = vr.MemoryAttention(32, 8, 2, 64).eval()
    tokens, features = torch.randn(1, 15, 32), torch.randn(1, 15, 8)
    wanted = attention.read(tokens, [vr.MemoryEntry(features, (3, 5))], grid=(3, 5))
    torch.testing.assert_close(attention.read(tokens, [vr.MemoryEntry(features, [3, 5])], grid=[3, 5]), wanted)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, t, m: a(t, m[:, :0], grid=(3, 5)), "memory is empty"),
        (lambda a, t, m: a(t, m, grid=8), r"grid is 8; it must be \(rows, columns\)"),
        (lambda a, t, m: a(t[..., :30], m, grid=(3, 5)), r"tokens has shape \(1, 15, 30\); .* \(batch, 15, 32\)"),
        (lambda a, t, m: a(t, m, grid=(3, 5), tokens_pos=t[:, 1:]), "tokens_pos has shape"),
        (
            lambda a, t, m: a.read(t, [vr.MemoryEntry(m.expand(n, -1, -1), (3, 5)) for n in (2, 3)], grid=(3, 5)),
            r"an entry has shape \(2, 15, 8\) beside \(3, 15, 8\)",
        ),
    ],
)
def test_more_mistakes_are_one_sentence(call, message):
    attention = vr.MemoryAttention(32, 8, 2, 64).eval()
    with pytest.raises(ValueError, match=message):
        call(attention, torch.randn(1, 15, 32), torch.randn(1, 15, 8))


@pytest.mark.parametrize("name", ["k_proj.weight", "k_proj.bias", "v_proj.weight"])
def test_one_trained_weight_of_a_frozen_layer_gets_its_gradient(name):
    attention = small_attention(depth=1)
    attention.requires_grad_(False)
    weight = attention.get_parameter(f"layers.0.cross_attn_image.{name}").requires_grad_(True)
    out = attention.read(torch.randn(1, 6, DIM), [frame((2, 3))], grid=(2, 3))
    (gradient,) = torch.autograd.grad(out.square().sum(), weight)
    assert gradient.abs().sum() > 0


@torch.no_grad()
def test_a_hook_on_the_perceptron_keeps_what_it_saw():
    attention = small_attention(depth=1)
    seen = []
    attention.layers[0].linear1.register_forward_hook(lambda m, inputs, out: seen.append((out, out.clone())))
    attention.read(torch.randn(1, 6, DIM), [frame((2, 3))], grid=(2, 3))
    assert torch.equal(*seen[0])
    assert (seen[0][0] < 0).any()


@torch.no_grad()
@pytest.mark.parametrize("num_heads", [1, 2])
def test_prepared_keys_with_ages_equal_those_made_on_reading(num_heads):
    attention = small_attention(num_heads=num_heads)
    entries = [frame((3, 4), batch=2, age=torch.randn(MEMORY_DIM)) for _ in range(3)]
    tokens = torch.randn(2, 12, DIM)
    prepared = [_with_keys(attention, entry) for entry in entries]
    out = attention.read(tokens, prepared, grid=(3, 4))
    assert_close(out, attention.read(tokens, entries, grid=(3, 4)), atol=2e-5, rtol=0)
