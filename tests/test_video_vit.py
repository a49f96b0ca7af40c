"""Video transformers against a second formulation, a token and a pair at a time, and the image models they are of."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ResPostBlock
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.encodings import ENCODINGS
from vision_rope.relative import RelativeEncoding
from vision_rope.rope_presets import PRESETS
from vision_rope.video.tubelets import place_steps

HEAD_DIM, HEADS = 16, 3
TINY: dict[str, Any] = {
    "img_size": (16, 24),
    "patch_size": 8,
    "embed_dim": HEAD_DIM * HEADS,
    "depth": 2,
    "num_heads": HEADS,
    "num_classes": 5,
}
THREE_AXES = [name for name in PRESETS if vr.preset(name, head_dim=HEAD_DIM).axes == 3]
TWO_AXES = [name for name in PRESETS if vr.preset(name, head_dim=HEAD_DIM).axes == 2]
RELATIVE = [
    name for name, row in ENCODINGS.items() if isinstance(row.build, type) and issubclass(row.build, RelativeEncoding)
]


@torch.no_grad()
def randomise(model: Any, seed: int = 1) -> Any:
    """Weights that let every layer matter: timm begins with zero biases, layers of time with zero output."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name == "position.learned_frequencies":
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise / math.sqrt(parameter[0].numel()))
        else:
            parameter.copy_(noise * 0.1 + (1.0 if "norm" in name or "gamma" in name else 0.0))
    return model.eval()


def build(position: Any = "qwen2-vl", tubelet: int = 2, num_frames: int = 6, **options: Any) -> Any:
    """A video model of 3 steps, 2 rows and 3 columns."""
    if options.get("causal"):
        options = {"global_pool": "avg", **options}
    size = (tubelet, 8, 8)
    return randomise(
        vr.video_vit("vit_tiny_patch16_224", num_frames, size, position, **{**TINY, "reg_tokens": 1, **options})
    )


def clips(frames: int = 6, rows: int = 2, columns: int = 3, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, frames, rows * 8, columns * 8, generator=torch.Generator().manual_seed(2))


# ---- a second formulation: float64, explicit positions, a head, a token and a pair at a time


def owners(preset: str) -> list[tuple[str, float]]:
    """Of each pair of a head of 16 channels the axis it turns with, and how fast; design page, by hand."""
    half = HEAD_DIM // 2
    if preset in ("qwen2-vl", "qwen3-vl", "videorope"):
        base = 5e6 if preset == "qwen3-vl" else 1e6
        axes = {"qwen2-vl": "tthhhwww", "qwen3-vl": "thwthwtt", "videorope": "hwhwhwtt"}[preset]
        return [(axis, base ** (-pair / half)) for pair, axis in enumerate(axes)]
    if preset == "v-jepa2":
        return [(axis, 1e4 ** (-pair / 2)) for axis in "thw" for pair in range(2)] + [("t", 0.0)] * 2
    assert preset == "axial-3d"
    return [(axis, 100 ** (-pair / n)) for axis, n in (("t", 2), ("h", 3), ("w", 3)) for pair in range(n)]


def turns_of(model: Any, grid: tuple[int, int, int], times: Sequence[float]) -> Callable[[int, int, int], list[float]]:
    """(layer, head, patch) -> the angle of each pair."""
    name, (_, rows, columns) = model.position_name, grid

    def turns(layer: int, head: int, patch: int) -> list[float]:
        t, h, w = times[patch // (rows * columns)], float(patch // columns % rows), float(patch % columns)
        if name == "videorope":
            t = 2 * t
            h, w = t + h - (rows - 1) // 2, t + w - (columns - 1) // 2
        if name in ("none", "learned"):
            return [0.0] * (HEAD_DIM // 2)
        if name in ("mixed-3d", "rope-vit-mixed"):
            place = (t, h, w)[-model.position.axes :]
            own = model.position.frequencies[layer, head].detach().double()
            return [sum(float(f) * x for f, x in zip(own[:, p], place, strict=True)) for p in range(HEAD_DIM // 2)]
        if name == "rope-vit-axial":
            quarter = HEAD_DIM // 4
            return [at * 100 ** (-i / quarter) for at in (w, h) for i in range(quarter)]
        return [{"t": t, "h": h, "w": w}[axis] * frequency for axis, frequency in owners(name)]

    return turns


def turn(x: Tensor, angles: list[float], pairing: str) -> Tensor:
    pairs = torch.arange(len(angles))
    a, b = (2 * pairs, 2 * pairs + 1) if pairing == "interleaved" else (pairs, pairs + len(angles))
    angle = torch.tensor(angles, dtype=torch.float64)
    out = torch.empty_like(x)
    out[a] = x[a] * angle.cos() - x[b] * angle.sin()
    out[b] = x[a] * angle.sin() + x[b] * angle.cos()
    return out


def attention(layer: Any, x: Tensor, angles: Callable[[int, int], list[float]], sees: Any, pairing: str) -> Tensor:
    """One clip's tokens (tokens, dim) -> what each sees, in front of the output layer: (tokens, dim)."""
    q, k, v = layer.qkv(x).reshape(len(x), 3, HEADS, HEAD_DIM).unbind(1)
    out = torch.zeros(len(x), HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(HEADS):
        turned = [torch.stack([turn(one[i, head], angles(head, i), pairing) for i in range(len(x))]) for one in (q, k)]
        for i in range(len(x)):
            seen = [j for j in range(len(x)) if sees(i, j)]
            scores = turned[1][seen] @ turned[0][i] * HEAD_DIM**-0.5
            out[i, head] = scores.softmax(0) @ v[seen, head]
    return out.flatten(1)


@torch.no_grad()
def reference(model: Any, clip: Tensor, times: Sequence[float] | None = None) -> Tensor:
    """Tokens behind the last norm of one clip (channels, frames, height, width), in float64."""
    model = copy.deepcopy(model).double()
    tubelet = model.patch_embed.tubelet[0]
    channels, frames, height, width = clip.shape
    grid = (frames // tubelet, height // 8, width // 8)
    steps, places = grid[0], grid[1] * grid[2]
    x = clip.double().reshape(channels, steps, tubelet, grid[1], 8, grid[2], 8).permute(1, 3, 5, 0, 2, 4, 6)
    proj = model.patch_embed.proj
    x = x.reshape(steps * places, -1) @ proj.weight.flatten(1).T + proj.bias
    if model.position_name == "learned":
        space = model.pos_embed[0, model.num_prefix_tokens :]
        x = x + space.repeat(steps, 1) + model.pos_embed_time[0].repeat_interleave(places, 0)
    prefix = torch.cat((model.cls_token[0], model.reg_token[0]))
    if model.position_name == "learned":
        prefix = prefix + model.pos_embed[0, : len(prefix)]
    n = len(prefix)
    x = torch.cat((prefix, x))
    turns = turns_of(model, grid, list(range(steps)) if times is None else times)
    pairing = "interleaved" if not hasattr(model.position, "pairing") else model.position.pairing
    step = [0] * n + [i // places for i in range(steps * places)]
    place = [None] * n + [i % places for i in range(steps * places)]
    for index, block in enumerate(model.blocks):

        def angles(head: int, token: int, index: int = index) -> list[float]:
            return [0.0] * (HEAD_DIM // 2) if token < n else turns(index, head, token - n)

        if model.space_time == "factorised":

            def over_time(i: int, j: int) -> bool:
                return i == j if min(i, j) < n else place[i] == place[j] and (not model.causal or step[j] <= step[i])

            y = attention(block.attn_time, block.norm_time(x), angles, over_time, pairing)
            x = torch.cat((x[:n], x[n:] + block.attn_time.proj(y)[n:]))
            normed, out = block.norm1(x), torch.zeros_like(x)
            for t in range(steps):
                own = [*range(n), *(i for i in range(n, len(x)) if step[i] == t)]
                y = attention(
                    block.attn, normed[own], lambda h, i, a=angles, own=own: a(h, own[i]), lambda i, j: True, pairing
                )
                out[own[n:]] = y[n:]
                if model.causal:
                    out[:n] += y[:n] if t == 0 else 0
                else:
                    out[:n] += y[:n] / steps
            x = x + block.attn.proj(out)
        else:

            def sees(i: int, j: int) -> bool:
                return not model.causal or step[j] <= step[i]

            x = x + block.attn.proj(attention(block.attn, block.norm1(x), angles, sees, pairing))
        x = x + block.mlp(block.norm2(x))
    return model.norm(x)


def agree(model: Any, x: Tensor, times: Any = None, **arguments: Any) -> None:
    with torch.no_grad():
        tokens = model.forward_features(x, **arguments)
    for index, clip in enumerate(x):
        own = None if times is None else times[index]
        assert_close(tokens[index].double(), reference(model, clip, own), atol=1e-5, rtol=1e-5)


# Every position in plain joint attention, the representatives in all others; the rest of the product is slow.
REPRESENTATIVES = ("qwen2-vl", "mixed-3d", "learned")
LOOPS = [
    pytest.param(
        position,
        attention,
        causal,
        marks=() if (attention, causal) == ("joint", False) or position in REPRESENTATIVES else pytest.mark.slow,
    )
    for position, attention, causal in itertools.product(
        [*THREE_AXES, "rope-vit-axial", "rope-vit-mixed", "learned", "none"], ("joint", "factorised"), (False, True)
    )
]


@pytest.mark.parametrize(("position", "attention", "causal"), LOOPS)
def test_tokens_are_those_of_plain_loops(position: str, attention: str, causal: bool) -> None:
    """Positions, rotations, who sees whom and the averaged prefix, in whole models."""
    depth = 2 if position in REPRESENTATIVES else 1
    agree(build(position, attention=attention, causal=causal, depth=depth), clips(batch=1))


@pytest.mark.parametrize("position", ["qwen3-vl", "videorope", "mixed-3d"])
@pytest.mark.parametrize("attention", ["joint", "factorised"])
def test_time_in_seconds(position: str, attention: str) -> None:
    """Fractions are kept, and each clip has its own."""
    seconds = torch.tensor([[3.0, 3.1, 3.5, 3.6, 5.0, 9.0], [0.0, 1.0, 1.5, 1.75, 2.0, 7.0]])
    times = [[0.0, 1.25, 5.0], [0.0, 3.75, 5.0]]
    model = build(position, attention=attention, depth=1, positions_per_second=2.5)
    agree(model, clips(), times, seconds=seconds)
    with torch.no_grad():
        shared = model(clips(), seconds[0])
        assert_close(shared, model(clips(), seconds[:1].expand(2, -1)), atol=1e-6, rtol=1e-6)
        assert_close(shared, model(clips(), (seconds[0] + 100).tolist()), atol=1e-4, rtol=1e-4)
        # A step a position is what counting steps gives.
        counted = build(position, attention=attention, depth=1)
        counted.load_state_dict(model.state_dict())
        assert_close(model(clips(), torch.arange(6) / 5), counted(clips()), atol=1e-5, rtol=1e-5)
        assert torch.equal(counted(clips(), torch.full((2, 6), torch.nan)), counted(clips()))


@pytest.mark.parametrize("tubelet", [1, 3])
def test_other_tubelets_frames_and_sizes(tubelet: int) -> None:
    model = build("qwen2-vl", tubelet, depth=1)
    assert model.train_grid == (6 // tubelet, 2, 3)
    assert model.patch_embed.tubelet == (tubelet, 8, 8)
    assert tuple(model.patch_embed.patch_size) == (8, 8)
    for steps, rows, columns in ((1, 3, 2), (4, 1, 4)):
        x = clips(steps * tubelet, rows, columns, batch=1)
        assert model.embed_patches(x).shape == (1, steps, rows, columns, 48)
        agree(model, x)
    assert model(clips(batch=0)).shape == (0, 5)


# ---- the peers' own numbers


def rotation_of(model: Any, x: Tensor) -> vr.Rotation:
    """What the first block is given, without the prefix."""
    seen: list[Any] = []
    handle = model.blocks[0].register_forward_pre_hook(
        lambda block, args, kwargs: seen.append(kwargs["rope"]), with_kwargs=True
    )
    with torch.no_grad():
        model(x)
    handle.remove()
    return seen[0].take(slice(model.num_prefix_tokens, None))


def test_v_jepa2_rotates_a_grid_as_its_file_says(golden: Any) -> None:
    vectors = golden("vjepa2_3d")
    model = build("v-jepa2", embed_dim=64, num_heads=1)
    turned = vr.rotate(vectors["x"], rotation_of(model, clips(4, 3, 4)))
    assert_close(turned, vectors["out_fixed_ref"], atol=2e-5, rtol=1e-5)


def test_qwen2_vl_scores_a_video_as_transformers_does(golden: Any) -> None:
    """The file's video of 3 x 2 x 2 tokens stands behind text and an image: scores know offsets alone."""
    vectors = golden("qwen2vl_mrope")
    video = slice(11, 23)
    rotation = rotation_of(build("qwen2-vl", embed_dim=128, num_heads=1), clips(6, 2, 2))
    turned, wanted = vr.rotate(vectors["x"][..., video, :], rotation), vectors["x_out"][..., video, :]
    assert_close(turned @ turned.mT, wanted @ wanted.mT, atol=1e-4, rtol=1e-4)
    steps = vectors["position_ids"][0, video].unique()
    assert steps.tolist() == [8, 9, 10]


@pytest.mark.parametrize("position", ["qwen2-vl", "videorope"])
def test_a_video_alone_has_the_positions_of_its_scheme(position: str) -> None:
    wanted = vr.multimodal_positions([vr.Video(3, 2, 3)], position)
    assert torch.equal(vr.preset(position, head_dim=16).positions(3, 2, 3), wanted)
    rotation, rope = rotation_of(build(position), clips()), vr.preset(position, head_dim=16)
    assert_close(rotation.cos, rope(wanted).cos, atol=2e-6, rtol=0)
    assert_close(rotation.sin, rope(wanted).sin, atol=2e-6, rtol=0)


def test_an_image_with_qwen3_vl_is_timms_mrope() -> None:
    options = {"depth": 2, "embed_dim": 48, "num_heads": 2, "num_classes": 3, "img_size": 64}
    own = {"rope_type": "mrope", "rope_grid_indexing": "ij"}
    theirs = randomise(timm.create_model("vit_small_patch16_rope_224", dynamic_img_size=True, **options, **own))
    axis = theirs.rope.axis.tolist()
    sections = tuple(axis.count(one) for one in range(3))
    ours = vr.create_model(
        "vit_small_patch16_rope_224",
        "qwen3-vl",
        keep_absolute=theirs.pos_embed is not None,
        position_options={"base": float(theirs.rope.temperature), "sections": sections},
        **options,
        **own,
    ).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 48, 80)
    assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


# ---- the image model that it was


def still(images: Tensor, tubelet: int) -> Tensor:
    return images[:, :, None].repeat(1, 1, tubelet, 1, 1)


@pytest.mark.parametrize(
    ("position", "tubelet"),
    [*((position, 2) for position in (*THREE_AXES, *TWO_AXES, "learned", "none")), ("qwen2-vl", 3), ("learned", 3)],
)
def test_a_still_image_is_the_image_models(position: str, tubelet: int) -> None:
    """One step of time 0, whatever the preset; attention over time begins as nothing."""
    theirs = randomise(timm.create_model("vit_tiny_patch16_224", **TINY))
    image = vr.create_model("vit_tiny_patch16_224", position, **TINY).eval()
    image.load_state_dict(theirs.state_dict(), strict=False)
    for attention in ("joint", "factorised"):
        video: Any = vr.video_vit(
            "vit_tiny_patch16_224", 2 * tubelet, (tubelet, 8, 8), position, attention=attention, **TINY
        ).eval()
        if image.state_dict().keys() & {"position.learned_frequencies"}:
            video.load_state_dict(image.state_dict())
        else:
            video.load_state_dict(theirs.state_dict(), strict=position == "learned")
        for rows, columns in ((2, 3), (4, 2)):
            images = torch.randn(2, 3, rows * 8, columns * 8)
            assert_close(video(still(images, tubelet)), image(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["joint", "factorised"])
def test_steps_of_a_converted_model_without_time_are_images(attention: str) -> None:
    """With factorised attention each step is an image by itself at first; the prefix is their average."""
    video = vr.video_vit(
        "vit_tiny_patch16_224", 4, (1, 8, 8), "rope-vit-axial", attention=attention, **{**TINY, "depth": 1}
    ).eval()
    image = vr.create_model("vit_tiny_patch16_224", "rope-vit-axial", **{**TINY, "depth": 1}).eval()
    weights = {key: value for key, value in video.state_dict().items() if "time" not in key}
    weights["patch_embed.proj.weight"] = weights["patch_embed.proj.weight"].squeeze(2)
    image.load_state_dict(weights)
    x = clips(4)
    by_image = image.forward_features(x.transpose(1, 2).flatten(0, 1))[:, 1:].unflatten(0, (2, 4)).flatten(1, 2)
    equal = torch.allclose(video.forward_features(x)[:, 1:], by_image, atol=1e-5)
    assert equal == (attention == "factorised")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224"])
@pytest.mark.parametrize("attention", ["joint", "factorised"])
def test_weights_of_images_and_videos_load(name: str, attention: str) -> None:
    options = {**TINY, "img_size": (16, 24)}
    theirs = randomise(timm.create_model(name, **options))
    video: Any = vr.video_vit(copy.deepcopy(theirs), 4, (2, 8, 8), "learned", attention=attention)
    added = {key for key in video.state_dict() if key not in theirs.state_dict()}
    assert all(".attn_time." in key or ".norm_time." in key or key == "pos_embed_time" for key in added)
    for key, value in theirs.state_dict().items():
        if key == "patch_embed.proj.weight":
            assert_close(video.state_dict()[key].sum(2), value)
        else:
            assert torch.equal(video.state_dict()[key], value), key
    other: Any = vr.video_vit(name, 4, (2, 8, 8), "learned", attention=attention, **options)
    randomise(other)
    other.load_state_dict(theirs.state_dict())  # strict, though it says nothing of time
    for key, value in video.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key
    randomise(video)
    other.load_state_dict(video.state_dict())
    x = clips(4, 3, 3)
    assert torch.equal(other.eval()(x), video(x))
    held = nn.ModuleDict({"encoder": other})
    held.load_state_dict({f"encoder.{key}": value for key, value in theirs.state_dict().items()})
    assert torch.equal(other.blocks[1].mlp.fc1.weight, theirs.blocks[1].mlp.fc1.weight)
    wrong = dict(theirs.state_dict(), cls_token=torch.zeros(1, 1, 7))
    with pytest.raises(RuntimeError, match="cls_token"):
        other.load_state_dict(wrong)


def test_weights_of_images_are_copied_to_the_layers_of_time() -> None:
    """With assign=True too, where tensors of the file become the parameters, and on the meta device."""
    theirs = timm.create_model("vit_tiny_patch16_224", **TINY)
    with torch.device("meta"):
        video: Any = vr.video_vit("vit_tiny_patch16_224", 4, (2, 8, 8), "learned", attention="factorised", **TINY)
    video.load_state_dict(theirs.state_dict(), assign=True)
    parameters = dict(video.named_parameters())
    assert not any(parameter.is_meta for parameter in parameters.values())
    assert len({parameter.data_ptr() for parameter in parameters.values()}) == len(parameters)


def test_a_model_is_converted_in_place_and_stays_of_its_class() -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", **TINY)
    weight = theirs.blocks[0].attn.qkv.weight
    video = vr.video_vit(theirs, 4, (2, 8, 8), keep_absolute=True)
    assert video is theirs
    assert isinstance(video, timm.models.vision_transformer.VisionTransformer)
    assert video.blocks[0].attn.qkv.weight is weight
    assert torch.equal(video.patch_embed.proj.weight[:, :, 0], video.patch_embed.proj.weight[:, :, 1])
    kept = randomise(video)(clips(4))
    with torch.no_grad():
        video.pos_embed.zero_()
    assert not torch.allclose(video(clips(4)), kept, atol=1e-3)


def test_learned_embeddings_are_resampled() -> None:
    """Space as timm resamples it, time linearly between the centres of steps."""
    model = build("learned", num_frames=4)
    with torch.no_grad():
        model.pos_embed.zero_()
        model.pos_embed_time.copy_(torch.tensor([0.0, 8.0])[None, :, None].expand(1, 2, 48))
    embedding = model._absolute_embedding((4, 2, 3))[0, 2:].unflatten(0, (4, 6))
    assert_close(embedding[:, 3, 5], torch.tensor([0.0, 2.0, 6.0, 8.0]))
    assert model(clips(8, 3, 4)).shape == (2, 5)
    x = clips(4, 3, 4)
    wanted = model(x)
    model.set_input_size((24, 32))
    assert model.pos_embed.shape[1] == 2 + 12
    assert_close(model(x), wanted, atol=1e-5, rtol=1e-5)


# ---- encodings of scores


def test_relative_encodings_have_three_axes() -> None:
    """ALiBi by hand: scores fall with the distance in time and space."""
    model = build("alibi", depth=1)
    terms = model.position(vr.grid_positions(3, 2, 3), (3, 2, 3), 2)[0].bias[0]
    positions = vr.grid_positions(3, 2, 3)
    assert_close(terms[:, 2:, 2:], -torch.cdist(positions, positions) * -terms[:, 2, 3][:, None, None])
    for position in [*RELATIVE, "sinusoidal"]:
        for causal in (False, True):
            model = build(position, causal=causal)
            x = clips(8, 3, 2)
            one_by_one = torch.cat([model(x[:1]), model(x[1:])])
            assert_close(model(x), one_by_one, atol=1e-5, rtol=1e-5)
            moved = model(torch.cat((x[:, :, 2:], x[:, :, :2]), dim=2))
            assert not torch.allclose(moved, model(x), atol=1e-3)


# ---- seeing no future


@pytest.mark.parametrize(
    ("position", "attention"),
    [*itertools.product(("qwen3-vl", "learned"), ("joint", "factorised")), ("t5", "joint")],
)
def test_causal_models_see_no_later_step(position: str, attention: str) -> None:
    model = build(position, attention=attention, causal=True)
    x = clips()
    other = x.clone()
    other[:, :, 4:] = torch.randn(2, 3, 2, 16, 24)
    before, after = (model.forward_features(one) for one in (x, other))
    assert torch.equal(before[:, : 2 + 12], after[:, : 2 + 12])
    assert not torch.allclose(before[:, 14:], after[:, 14:], atol=1e-2)


@pytest.mark.parametrize(
    ("position", "causal"), [("qwen2-vl", False), ("qwen2-vl", True), ("rope-vit-axial", True), ("shaw", True)]
)
def test_tubelets_that_are_left_out(position: str, causal: bool) -> None:
    """Places count in the whole grid, in any order and in each clip its own."""
    model = build(position, causal=causal)
    patches = model.embed_patches(clips())
    every = torch.stack([torch.randperm(18), torch.randperm(18)])
    whole = model.forward_patches(patches)
    shuffled = model.forward_patches(patches, kept=every)
    assert_close(shuffled[:, :2], whole[:, :2], atol=1e-5, rtol=1e-5)
    by_place = torch.empty_like(whole[:, 2:]).scatter(1, every[..., None].expand(-1, -1, 48), shuffled[:, 2:])
    assert_close(by_place, whole[:, 2:], atol=1e-5, rtol=1e-5)
    some = torch.tensor([[0, 1, 4, 5], [0, 1, 2, 4]])
    cut = model.forward_patches(patches, kept=some)
    # Those of the first step alone: a clip of one step with as many.
    first = model.forward_patches(patches[:, :1], kept=some)
    assert_close(cut, first, atol=1e-5, rtol=1e-5)
    if position == "qwen2-vl":
        timed = build(position, causal=causal, positions_per_second=2.0)
        seconds = torch.rand(2, 6).cumsum(1)
        timed_whole = timed.forward_patches(patches, seconds=seconds)
        timed_every = timed.forward_patches(patches, kept=torch.arange(18).expand(2, -1), seconds=seconds)
        assert_close(timed_every, timed_whole, atol=1e-5, rtol=1e-5)


def test_patch_dropout_keeps_positions() -> None:
    model = build("qwen3-vl", patch_drop_rate=0.5).train()
    x = clips()
    torch.manual_seed(3)
    dropped = model.forward_features(x)
    torch.manual_seed(3)
    _, kept = model.patch_drop(torch.zeros(2, 20, 48))
    plain = build("qwen3-vl")
    assert_close(dropped, plain.forward_patches(plain.embed_patches(x), kept=kept), atol=1e-5, rtol=1e-5)


# ---- longer than trained


@pytest.mark.parametrize("method", ["interpolate", "ntk", "yarn"])
@pytest.mark.parametrize("position", THREE_AXES)
def test_more_frames_extend_time_alone(position: str, method: str) -> None:
    if position == "mixed-3d" and method != "interpolate":
        with pytest.raises(ValueError, match="means nothing for mixed-3d"):
            vr.set_extension(build(position), method)
        return
    model = vr.set_extension(build(position, depth=1), method)
    x = clips(12)
    rotation = rotation_of(model, x)
    rope = vr.extend(model.position, method, train_size=(3, 2, 3), size=(6, 2, 3))
    wanted = rope(rope.positions(6, 2, 3))
    assert_close(rotation.cos, wanted.cos, atol=1e-5, rtol=0)
    changed = rope.frequencies[0, 0] != model.position.frequencies[0, 0]
    assert changed[0].any()
    assert not changed[1:].any()
    assert torch.equal(model(clips()), vr.set_extension(model, "none")(clips()))
    other = vr.set_extension(model, method, train_size=(6, 2, 3))(x)
    assert torch.equal(other, vr.set_extension(model, "none")(x))


@pytest.mark.parametrize("attention", ["joint", "factorised"])
@pytest.mark.parametrize("kept", [False, True])
def test_longer_gaps_extend_time(attention: str, kept: bool) -> None:
    """The length of time is its last position and one more, of each clip its own: with yarn's temperature, too."""
    if kept and attention == "factorised":
        with pytest.raises(ValueError, match="no tubelets can be left out"):
            build(attention=attention).forward_patches(torch.zeros(1, 1, 2, 3, 48), kept=torch.zeros(1, 2).long())
        return
    model = build("qwen2-vl", attention=attention, positions_per_second=2.0)
    plain = copy.deepcopy(model)
    vr.set_extension(model, "yarn", train_size=(5, 2, 3))
    seconds = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 2.5], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]])  # last at 4 and at 16
    patches = model.embed_patches(clips())
    places = {"kept": torch.arange(18).expand(2, -1)} if kept else {}

    def one(model: Any, index: int) -> Tensor:
        part = {key: value[:1] for key, value in places.items()}
        return model.forward_patches(patches[index : index + 1], seconds=seconds[index], **part)

    both = model.forward_patches(patches, seconds=seconds, **places)
    assert_close(both, torch.cat([one(model, 0), one(model, 1)]), atol=1e-5, rtol=1e-5)
    assert_close(both[:1], one(plain, 0), atol=1e-5, rtol=1e-5)
    plain.position = vr.extend(plain.position, "yarn", train_size=(5, 2, 3), size=(17, 2, 3))
    assert_close(both[1:], one(plain, 1), atol=1e-5, rtol=1e-5)
    none = {key: value[:0] for key, value in places.items()}
    assert model.forward_patches(patches[:0], seconds=seconds[:0], **none).shape == (0, *both.shape[1:])


# ---- what else timm models do


def test_intermediates_are_maps_of_space_and_time() -> None:
    model = build("qwen2-vl")
    x = clips(4, 3, 2)
    tokens, maps = model.forward_intermediates(x, norm=True)
    assert [tuple(one.shape) for one in maps] == [(2, 48, 2, 3, 2)] * 2
    assert torch.equal(tokens, model.forward_features(x))
    assert torch.equal(maps[-1].flatten(2).mT, tokens[:, 2:])
    with pytest.raises(ValueError, match="causal=True"):
        model.forward_intermediates(x, is_causal=True)
    timed = build("qwen2-vl", positions_per_second=2.0, causal=True)
    own = timed.forward_intermediates(x, seconds=[0, 1, 2, 3], output_fmt="NLC", intermediates_only=True, norm=True)
    assert torch.equal(own[-1], timed.forward_features(x, [0, 1, 2, 3])[:, 2:])


@pytest.mark.parametrize(
    ("position", "attention"),
    [*itertools.product(("mixed-3d", "learned"), ("joint", "factorised")), ("shaw", "joint")],
)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_reach_everything_and_checkpointing_keeps_them(position: str, attention: str, causal: bool) -> None:
    model = build(position, attention=attention, causal=causal, drop_path_rate=0.2).train()
    found = []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(4)
        model(clips()).square().sum().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        model.zero_grad()
    for name, gradient in found[0].items():
        assert gradient is not None, name
        # No key of a bias, and the prefix reaches no averaged patch behind the last block.
        assert gradient.abs().sum() > 0, name
        assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-4)


def test_copies_files_casts_and_another_head() -> None:
    model = build("mixed-3d", attention="factorised", causal=True)
    x = clips()
    wanted = model(x)
    assert torch.equal(copy.deepcopy(model)(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), wanted)
    frequencies = model.position.frequencies.clone()
    half = copy.deepcopy(model).bfloat16()
    assert torch.equal(half.position.frequencies, frequencies)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert_close(half(x.bfloat16()).float(), wanted, atol=0.15, rtol=0.1)
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)
    with pytest.raises(ValueError, match="global_pool='avg'"):
        model.reset_classifier(7, "token")
    assert vr.convert_pairing(build("qwen2-vl"), "interleaved").position.pairing == "interleaved"


@pytest.mark.parametrize("attention", ["joint", "factorised"])
def test_another_pairing_changes_nothing(attention: str) -> None:
    model = build("qwen3-vl", attention=attention)
    wanted = model(clips())
    assert_close(vr.convert_pairing(model, "interleaved")(clips()), wanted, atol=1e-5, rtol=1e-5)


def test_optimizers_leave_time_and_frequencies_undecayed() -> None:
    assert "pos_embed_time" in build("learned").no_weight_decay()
    assert "position.learned_frequencies" in build("mixed-3d").no_weight_decay()
    model = build("learned")
    groups = param_groups_layer_decay(model, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay())
    scales = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert scales[id(model.pos_embed_time)] == scales[id(model.pos_embed)]


def test_rotations_of_a_grid_are_kept_and_nothing_stays_in_the_state() -> None:
    """Law 4 for clips: other grids with as many tokens, and the same again."""
    model = build("axial-3d")
    keys = set(model.state_dict())
    first = model(clips(6, 2, 3))
    model(clips(4, 3, 3))
    model(clips(4, 9, 1))
    assert torch.equal(model(clips(6, 2, 3)), first)
    assert set(model.state_dict()) == keys
    fresh = build("axial-3d")
    assert torch.equal(fresh(clips(4, 9, 1)), model(clips(4, 9, 1)))


@pytest.mark.parametrize("name", ["naflexvit_base_patch16_gap", "samvit_base_patch16", "beitv2_base_patch16_224"])
@pytest.mark.parametrize("position", ["qwen3-vl", "mixed-3d"])
def test_image_families_take_presets_of_three_axes(name: str, position: str) -> None:
    """An image is a video of one step at time 0: rows and columns by themselves give the same."""
    options: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 3}
    if name.startswith("sam"):
        options |= {"img_size": 64, "global_attn_indexes": (1,), "window_size": 2, "neck_chans": 8}
    elif name.startswith("beit"):
        options |= {"img_size": 64}
    model = vr.create_model(name, position, **options).eval()
    flat, rope = copy.deepcopy(model), model.position
    learned = None if rope.ladders is not None else lambda: rope.frequencies.detach()[:, :, 1:]
    ladders = None if rope.ladders is None else rope.ladders[1:]
    flat.position = vr.Rope(
        head_dim=16, axes=2, depth=2, pairing=rope.pairing, ladders=ladders, initial_frequencies=learned
    )
    x = torch.randn(2, 3, 64, 64)
    assert_close(model(x), flat(x), atol=1e-5, rtol=1e-5)
    if name.startswith("naflex"):
        coord = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).flatten(0, 1)
        patches = torch.randn(2, 12, 3 * 16 * 16)
        batch = {"patches": patches, "patch_coord": coord.expand(2, -1, -1)}
        batch["patch_valid"] = torch.ones(2, 12, dtype=torch.bool)
        assert_close(model(batch), flat(batch), atol=1e-5, rtol=1e-5)


def test_centred_rows_and_columns_keep_their_distance_in_a_video() -> None:
    """A preset of two axes is extended by rows and columns of train_size."""
    model = vr.set_extension(build("dinov3"), "pitch", train_size=(3, 1, 1))
    rope = vr.extend(model.position, "pitch", train_size=(1, 1), size=(2, 3))
    wanted = rope(rope.positions(2, 3)).cos.repeat(1, 3, 1)
    assert_close(rotation_of(model, clips()).cos, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("position", ["qwen3-vl", "videorope", "mixed-3d"])
def test_images_of_three_axes_are_packed_and_attended_linearly(position: str) -> None:
    model = randomise(vr.create_model("vit_tiny_patch16_224", position, **TINY))
    images = [torch.randn(3, 16, 24), torch.randn(3, 32, 8)]
    one_by_one = torch.cat([model(image[None]) for image in images])
    assert_close(vr.forward_packed(model, images), one_by_one, atol=1e-5, rtol=1e-5)
    linear = randomise(vr.create_model("vit_tiny_patch16_224", position, attention="linear", **TINY))
    assert not torch.allclose(linear(images[0][None]), linear(images[0][None].flip(-1)), atol=1e-3)


def test_image_models_of_three_axes_are_extended_in_space() -> None:
    model = randomise(vr.create_model("vit_tiny_patch16_224", "qwen3-vl", **TINY))
    x = torch.randn(1, 3, 32, 48)
    plain = model(x)
    vr.set_extension(model, "interpolate")
    rope = vr.extend(model.position, "interpolate", train_size=(1, 2, 3), size=(1, 4, 6))
    extended = model(x)
    assert not torch.allclose(extended, plain, atol=1e-3)
    vr.set_extension(model, "none").position = rope
    assert_close(model(x), extended, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="train_size"):
        vr.set_extension(model, "ntk", train_size=(1, 2, 3))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("position", "options"),
    [
        ("mixed-3d", {"attention": "factorised"}),
        ("videorope", {"causal": True, "positions_per_second": 2.0}),
    ],
)
def test_whole_models_compile(position: str, options: dict[str, Any]) -> None:
    """Failure class 7: one graph, no complex number in it, the gradients of the plain model."""
    model = build(position, depth=1, **options)
    x, seconds = clips(), torch.arange(6) / 3 if "positions_per_second" in options else None
    wanted = model(x, seconds)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, seconds), wanted, atol=1e-5, rtol=1e-5)
    wanted.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled(x, seconds).sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[name], atol=1e-4, rtol=1e-4)


# ---- what cannot be


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build(num_frames=5), "num_frames is 5; it must be a positive multiple of the tubelet's 2 frames"),
        (lambda: build(num_frames=0), "num_frames is 0"),
        (lambda: build(num_frames=True), "num_frames is True"),
        (lambda: build(num_frames="16"), "num_frames is '16'"),
        (
            lambda: vr.video_vit("vit_tiny_patch16_224", tubelet=(2, 14, 14)),
            r"tubelet is \(2, 14, 14\) and .* 16 x 16 pixels; give tubelet=\(2, 16, 16\), or build .* patch_size",
        ),
        (lambda: vr.video_vit("vit_tiny_patch16_224", tubelet=2), "tubelet is 2; it is .* positive whole numbers"),
        (lambda: vr.video_vit("vit_tiny_patch16_224", tubelet=(0, 16, 16)), r"tubelet is \(0, 16, 16\)"),
        (lambda: build(causal="no"), "causal is 'no'; it must be True or False"),
        (lambda: build(attention="divided"), "attention is 'divided'; choose one of joint, factorised"),
        (lambda: build("t5", attention="factorised"), "'t5' .* choose attention='joint'"),
        (lambda: build(attention="factorised", patch_drop_rate=0.5), "patch_drop_rate=0"),
        (lambda: build(attention="factorised", block_fn=ResPostBlock), "blocks are ResPostBlock; .* Block, EvaBlock"),
        (lambda: build(causal=True, global_pool="token"), "blind to what follows; .* global_pool='avg'"),
        (
            lambda: vr.video_vit("deit_tiny_distilled_patch16_224", causal=True, depth=1),
            "distillation tokens, which see the first step alone; .* global_pool='avg'",
        ),
        (lambda: build(positions_per_second=0), "positions_per_second is 0; it must be a positive number"),
        (lambda: build(positions_per_second=math.nan), "positions_per_second is nan"),
        (lambda: build(positions_per_second="2"), "positions_per_second is '2'"),
        (lambda: build("learned", positions_per_second=2.0), "no effect with position 'learned'"),
        (lambda: build("dinov3", positions_per_second=2.0), "no effect with position 'dinov3'"),
        (lambda: build("roformer"), "has axes 1 and the model needs 2 or 3"),
        (lambda: build("qwen-vl"), "position is 'qwen-vl'.*did you mean"),
        (lambda: build(position_options={"bas": 1}), "no option 'bas'.*did you mean 'base'"),
        (lambda: vr.video_vit("vit_tiny"), "name is 'vit_tiny', which is no timm model"),
        (lambda: vr.video_vit(build(), 4, (2, 8, 8)), "has the position encoding 'qwen2-vl' already"),
        (lambda: vr.add_position(build(), "none"), "has the position encoding 'qwen2-vl' already"),
        (lambda: vr.video_vit(nn.Linear(2, 2)), "model is a Linear; video_vit supports timm's VisionTransformer"),
        (
            lambda: vr.video_vit(timm.create_model("vit_tiny_patch16_224", depth=1), num_classes=3, pretrained=True),
            "num_classes, pretrained would have no effect",
        ),
        (lambda: build(embed_dim=50, num_heads=5, position="sinusoidal"), "multiple of 6"),
        (lambda: vr.set_extension(build(), "ntk", (2, 3)), r"train_size \(2, 3\) has 2 axes"),
        (lambda: vr.set_extension(build(), "ntk", (3, 16, 24)), "looks like pixels"),
        (lambda: vr.set_extension(build(positions_per_second=1.0), "ntk"), "give train_size="),
        (lambda: vr.set_extension(build("learned"), "ntk"), "ntk means nothing for the position encoding 'learned'"),
        (lambda: build().set_input_size((32, 48), patch_size=16), r"belong to its tubelets of \(2, 8, 8\)"),
        (lambda: vr.timm_state_dict(build("qwen2-vl")), "a model of videos"),
        (lambda: vr.forward_packed(build(), [torch.zeros(3, 16, 24)]), "a model of videos"),
        (lambda: build()(torch.zeros(2, 3, 16, 24)), r"clips have shape \(2, 3, 16, 24\); .* an image is a still clip"),
        (lambda: build()(torch.zeros(3, 4, 16, 24)), r"one clip needs a batch: clip\[None\]$"),
        (lambda: vr.create_model("vit_tiny_patch16_224", num_frames=4), "num_frames is 4, .* for videos: video_vit$"),
        (lambda: build()(torch.zeros(2, 6, 3, 16, 24)), "channels come before frames"),
        (lambda: build()(torch.zeros(2, 3, 0, 16, 24)), "clips have no frames"),
        (lambda: build()(torch.zeros(2, 3, 1, 16, 24)), "clips have 1 frame, fewer than one tubelet"),
        (lambda: build()(torch.zeros(2, 3, 5, 16, 24)), "5 frames, .* give 4 or 6"),
        (lambda: build()(torch.zeros(2, 3, 4, 16, 20)), "width 20, which patches of 8 pixels do not divide"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (None, "seconds are missing, and positions_per_second is 2.0"),
        (torch.arange(5), r"seconds have shape \(5,\) and the clips 2 x 6 frames"),
        (torch.zeros(3, 6), r"seconds have shape \(3, 6\)"),
        (torch.tensor([0, 1, 2, 2, 3, 4]), "seconds do not increase: frame 3 has 2 after 2"),
        (torch.stack([torch.arange(6), -torch.arange(6)]), "seconds do not increase: frame 1 has -1 after 0"),
        (torch.tensor([0, 1, math.inf, 3, 4, 5]), "seconds hold inf; they must be finite"),
        (torch.tensor([0, 1, math.nan, 3, 4, 5]), "seconds hold nan"),
    ],
)
def test_seconds_that_cannot_be(seconds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(positions_per_second=2.0)(clips(), seconds)


def test_steps_are_placed_in_float64() -> None:
    """An hour into a film, a frame lasts as long as at its beginning."""
    seconds = 3600 + torch.arange(8, dtype=torch.float64) / 30
    assert_close(place_steps(seconds, 8, 1, 2, 30.0), torch.tensor([0.0, 2.0, 4.0, 6.0]), atol=1e-5, rtol=0)


def test_refusals_leave_the_timm_model_as_it_was() -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", **TINY)
    before = copy.deepcopy(theirs)
    for options in (
        {"position": "roformer"},
        {"position": "qwen2-vl", "causal": True},
        {"position": "t5", "attention": "factorised"},
        {"position": "learned", "keep_absolute": True},
        {"num_frames": 3},
    ):
        with pytest.raises(ValueError, match=r"\w"):
            vr.video_vit(theirs, **{"num_frames": 4, "tubelet": (2, 8, 8), **options})
    assert type(theirs) is type(before)
    x = torch.randn(1, 3, 16, 24)
    assert torch.equal(theirs.eval()(x), before.eval()(x))
