"""`vision-rope benchmark rotate`: turning queries and keys, from packed qkv to attention, and building tables."""

from __future__ import annotations

import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import vision_rope
from vision_rope.benchmark.peers import Problem, Turn, clone, installed_peers, ours
from vision_rope.benchmark.timing import Case
from vision_rope.rotation import Pairing

OURS = "vision_rope"
OURS_HALF = "vision_rope half"


@dataclass(frozen=True)
class Shape:
    """Queries of one size: a batch of images with prefix tokens in front of a grid."""

    batch: int
    heads: int
    grid: tuple[int, int]
    prefix: int
    head_dim: int

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]


SHAPES = {
    "S1": Shape(8, 6, (14, 14), 1, 64),  # ViT-S at 224 px
    "S2": Shape(2, 12, (32, 32), 5, 64),  # ViT-B with registers at 512 px
    "S3": Shape(1, 1, (64, 64), 0, 256),  # SAM 2's memory attention
    "S4": Shape(1, 16, (64, 128), 0, 128),  # a video
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The packed way of one ViT-S layer, at 224 and 448 px; tables of grids from 224 to 1024 px.
FRONT_GRIDS = (14, 28)
TABLE_GRIDS = (14, 28, 64)
TABLES = ("rope-vit-axial", "dinov3", "rope-vit-mixed")
FRONT = Shape(4, 6, (14, 14), 1, 64)
DEPTH = 12


def rotate_cases(
    sections: Sequence[str], shapes: Sequence[str], dtypes: Sequence[str], device: torch.device
) -> list[Callable[[], Case]]:
    """The cases of the chosen sections, as functions, so that each is built when its turn comes.

    Compiling takes minutes a shape, so the compiled sections leave out the two largest unless they are chosen alone.
    """
    cases: list[Callable[[], Case]] = []
    said: set[str] = set()
    for section in sections:
        if section in _ROTATIONS:
            for label in shapes:
                if section.startswith("compiled") and len(shapes) == len(SHAPES) and label in ("S3", "S4"):
                    continue
                cases += [partial(_rotation_case, section, label, dtype, device, said) for dtype in dtypes]
        elif section == "qkv":
            cases += [partial(_front_case, side, device, learned=False) for side in FRONT_GRIDS]
        elif section == "learned":
            cases += [partial(_front_case, side, device, learned=True) for side in FRONT_GRIDS]
        elif section == "tables":
            cases += [partial(_table_case, name, side, device) for side in TABLE_GRIDS for name in TABLES]
    return cases


def problem_of(shape: Shape, device: torch.device) -> Problem:
    """Angles of SAM 2's embedding on the shape's grid."""
    rope = vision_rope.preset("sam2", head_dim=shape.head_dim)
    positions = vision_rope.with_prefix(rope.positions(*shape.grid), shape.prefix).double()
    return Problem((positions @ rope.frequencies[0, 0].double()).to(device), shape.prefix)


def error_of(turn: Turn, pairing: Pairing, problem: Problem, shape: Shape, dtype: torch.dtype) -> float:
    """Largest absolute difference between a library's queries and a rotation in float64."""
    q = _draw(shape, dtype, problem.angles.device)
    first, second = _pairs(q.double(), pairing)
    cos, sin = problem.angles.cos(), problem.angles.sin()
    with torch.no_grad():
        turned, _ = turn(q.clone(), q.clone())
    got = _pairs(turned.double(), pairing)
    wanted = (first * cos - second * sin, first * sin + second * cos)
    return max((a - b).abs().max().item() for a, b in zip(got, wanted, strict=True))


def _pairs(x: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    return (x[..., ::2], x[..., 1::2]) if pairing == "interleaved" else x.chunk(2, dim=-1)  # type: ignore[return-value]


def _draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    size = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)


def _rotation_case(section: str, label: str, dtype_name: str, device: torch.device, said: set[str]) -> Case:
    """One of the sections in _ROTATIONS: turning separate queries and keys.

    A library that is installed and fails is left out, with one line on stderr that `said` keeps from being repeated.
    """
    shape, dtype = SHAPES[label], DTYPES[dtype_name]
    problem = problem_of(shape, device)
    q, k = _draw(shape, dtype, device), _draw(shape, dtype, device)
    build = _ROTATIONS[section]
    runs: dict[str, Callable[[], Any]] = {}
    errors: dict[str, float] = {}

    def add(name: str, pairing: Pairing, prepare: Callable[..., Turn]) -> None:
        turn = prepare(problem, pairing)
        if section.startswith("compiled"):
            turn = _compiled(turn)
        error = error_of(turn, pairing, problem, shape, dtype)
        run = build(turn, q, k)
        run()  # the gradient may fail where the value does not
        errors[name], runs[name] = error, run

    add(OURS, "interleaved", partial(ours, overwrite=section == "overwrite"))
    add(OURS_HALF, "half", ours)
    for name, (pairing, prepare) in installed_peers().items():
        try:
            add(name, pairing, prepare)
        except Exception as error:  # whatever another library raises
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
            line = f"{name} is left out where it fails: {reason}"
            if line not in said:
                print(line, file=sys.stderr)
            said.add(line)
    if section == "overwrite":
        floor, target = "copy_", (torch.empty_like(q), torch.empty_like(k))
        runs[floor] = lambda: (target[0].copy_(q), target[1].copy_(k))
    else:
        floor = "clone"
        runs[floor] = build(clone(problem), q, k)
    # In compiled mode halves are the fast pairing, which convert_pairing gives to any model.
    first = OURS_HALF if section.startswith("compiled") else OURS
    # Counting memory on a CPU switches compiled code off.
    unit = None if section.startswith("compiled") and device.type == "cpu" else 2 * q.numel() * q.element_size()
    return Case(section, label, dtype_name, runs, first, floor, errors, unit)


def _forward(turn: Turn, q: Tensor, k: Tensor) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return turn(q, k)

    return run


def _backward(turn: Turn, q: Tensor, k: Tensor) -> Callable[[], Any]:
    q, k = q.clone().requires_grad_(True), k.clone().requires_grad_(True)
    grads = (torch.ones_like(q), torch.ones_like(k))
    return lambda: torch.autograd.grad(turn(q, k), (q, k), grads)


def _compiled(turn: Turn) -> Turn:
    def call(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return turn(q, k)

    # dynamo counts recompilations by code object: a shared one would let the ninth library run uncompiled in silence.
    code = call.__code__.replace()
    own = types.FunctionType(code, call.__globals__, call.__name__, call.__defaults__, call.__closure__)
    return torch.compile(own, dynamic=False)


_ROTATIONS: dict[str, Callable[[Turn, Tensor, Tensor], Callable[[], Any]]] = {
    "forward": _forward,
    "overwrite": _forward,
    "backward": _backward,
    "compiled": _forward,
    "compiled-backward": _backward,
}
SECTIONS = {
    "forward": "queries and keys, eager, no gradient",
    "overwrite": "the same, where ours may write over its input",
    "backward": "queries and keys, eager, forward and backward",
    "compiled": "queries and keys under torch.compile, no gradient",
    "compiled-backward": "queries and keys under torch.compile, forward and backward",
    "qkv": "packed qkv of a ViT-S layer to q, k, v, forward and backward",
    "learned": f"the same for {DEPTH} layers with learned frequencies, tables included",
    "tables": "cos and sin of a grid that was not met before, and of one that was",
}
DEFAULT_SECTIONS = tuple(name for name in SECTIONS if name != "compiled-backward")


def _front_case(side: int, device: torch.device, *, learned: bool) -> Case:
    """Packed qkv -> q, k, v and back: of one layer, or of a model's layers with their learned tables."""
    from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingMixed, apply_rot_embed_cat

    batch, heads, dim = FRONT.batch, FRONT.heads, FRONT.head_dim
    tokens, layers = side * side + 1, DEPTH if learned else 1
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(batch, tokens, 3 * heads * dim, generator=draw).to(device).requires_grad_(True)
    grads = tuple(torch.randn(batch, heads, tokens, dim, generator=draw).to(device) for _ in range(3))
    name = "rope-vit-mixed" if learned else "rope-vit-axial"
    rope = vision_rope.preset(name, head_dim=dim, num_heads=heads, depth=layers).to(device)
    if learned:
        peer = RotaryEmbeddingMixed(heads * dim, depth=layers, num_heads=heads).to(device)
    else:
        peer = RotaryEmbeddingCat(dim, in_pixels=False, temperature=100.0, grid_indexing="xy").to(device)
    fixed = None if learned else peer.get_embed([side, side])

    def packed() -> Tensor:
        return qkv.unflatten(-1, (3, heads, dim))

    def back(outputs: list[Tensor]) -> Any:
        inputs = [qkv, *rope.parameters(), *peer.parameters()]
        return torch.autograd.grad(outputs, inputs, grads * layers, allow_unused=True)

    def run_ours() -> Any:
        rotations = rope.grid_rotations(side, side, num_prefix_tokens=1, device=device)
        return back([part for rotation in rotations for part in vision_rope.rotate_qkv(packed(), rotation)])

    def run_without() -> Any:
        return back([part for _ in range(layers) for part in packed().permute(2, 0, 3, 1, 4).unbind(0)])

    def turn_by_timm(x: Tensor, table: Tensor) -> Tensor:
        return torch.cat((x[:, :, :1], apply_rot_embed_cat(x[:, :, 1:], table)), dim=2)

    def run_timm() -> Any:
        tables = [fixed] if fixed is not None else peer.get_embed([side, side])
        outputs = []
        for table in tables:
            q, k, v = packed().permute(2, 0, 3, 1, 4).unbind(0)
            outputs += [turn_by_timm(q, table), turn_by_timm(k, table), v]
        return back(outputs)

    runs = {OURS: run_ours, "timm": run_timm, "no position": run_without}
    return Case("learned" if learned else "qkv", f"{tokens} tokens", "fp32", runs, OURS, "no position")


def _timm_table(name: str) -> Any:
    """timm's counterpart of one of our presets in TABLES."""
    from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed

    heads, dim = FRONT.heads, FRONT.head_dim
    if name == "rope-vit-axial":
        return RotaryEmbeddingCat(dim, in_pixels=False, temperature=100.0, grid_indexing="xy")
    if name == "dinov3":
        return RotaryEmbeddingDinoV3(dim)
    return RotaryEmbeddingMixed(heads * dim, depth=DEPTH, num_heads=heads)


def _table_case(name: str, side: int, device: torch.device) -> Case:
    """Building the tables of one forward pass, of a new grid and of a repeated one."""
    peer = _timm_table(name).to(device)
    rope = vision_rope.preset(name, head_dim=FRONT.head_dim, num_heads=FRONT.heads, depth=DEPTH).to(device)

    @torch.no_grad()
    def repeated() -> Any:
        return rope.grid_rotations(side, side, num_prefix_tokens=1, device=device)

    @torch.no_grad()
    def new() -> Any:
        rope.forget()
        return repeated()

    @torch.no_grad()
    def timm() -> Any:
        return peer.get_embed([side, side])

    runs = {OURS: new, f"{OURS}, repeated": repeated, "timm": timm}
    return Case("tables", f"{name}, {side} x {side}", "fp32", runs, OURS)
