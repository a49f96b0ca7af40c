"""Streams of causal video models: the tokens of the whole clip, a tubelet at a time, at the cost of one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.video.stream import StreamState

TINY: dict[str, Any] = {"img_size": (16, 24), "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
PREFIX, PLACES, STEPS = 3, 6, 4
THREE_AXES = [name for name in vr.presets() if vr.preset(name, head_dim=16).axes == 3]


@torch.no_grad()
def build(position: str = "qwen3-vl", **options: Any) -> Any:
    """A causal model of 4 steps of 2 x 3 patches whose every layer matters."""
    options = {"global_pool": "avg", "reg_tokens": 2, "num_classes": 5, "causal": True, **options}
    model = vr.video_vit("vit_tiny_patch16_224", 2 * STEPS, (2, 8, 8), position, **TINY, **options)
    for name, parameter in model.named_parameters():
        if name != "position.learned_frequencies":
            scale = 1 / math.sqrt(parameter[0].numel()) if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn(parameter.shape) * scale + ("norm" in name and parameter.ndim == 1))
    return model.eval()


def clips(steps: int = STEPS, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 2 * steps, 16, 24, generator=torch.Generator().manual_seed(2))


def stream(model: Any, x: Tensor, seconds: Any = None, **options: Any) -> tuple[list[StreamState], list[Tensor]]:
    """The states before and after every step, and the tokens of every step."""
    states, tokens = [model.start_stream(**options)], []
    with torch.no_grad():
        for start in range(0, x.shape[2], 2):
            own = None if seconds is None else seconds[..., start : start + 2]
            state, step = model.step(states[-1], x[:, :, start : start + 2], own)
            states.append(state)
            tokens.append(step)
    return states, tokens


def test_a_state_is_shown_without_its_tensors() -> None:
    states, _ = stream(build(), clips(1), max_steps=3)
    assert repr(states[1]) == "StreamState(steps=1, shape=(2, 2, 3), length=4, max_steps=3)"


def whole(model: Any, x: Tensor, seconds: Any = None) -> Tensor:
    with torch.no_grad():
        return model.forward_features(x, seconds)


@pytest.mark.parametrize("attention", ["joint", "factorised"])
@pytest.mark.parametrize("position", [*THREE_AXES, "rope-vit-mixed", "learned", "sinusoidal", "none"])
def test_a_stream_is_the_whole_clip(position: str, attention: str) -> None:
    model = build(position, attention=attention)
    _, tokens = stream(model, clips())
    assert [step.shape[1] for step in tokens] == [PREFIX + PLACES, PLACES, PLACES, PLACES]
    assert_close(torch.cat(tokens, dim=1), whole(model, clips()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["joint", "factorised"])
@pytest.mark.parametrize("options", [{"class_token": False, "reg_tokens": 0}, {"qk_norm": True, "init_values": 0.5}])
def test_other_models_stream(options: dict[str, Any], attention: str) -> None:
    model = build(attention=attention, **options)
    assert_close(torch.cat(stream(model, clips())[1], dim=1), whole(model, clips()), atol=1e-5, rtol=1e-5)


def test_eva_streams() -> None:
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "global_pool": "avg"}
    for attention in ("joint", "factorised"):
        model: Any = vr.video_vit("eva02_tiny_patch14_224", 4, (2, 8, 8), causal=True, attention=attention, **options)
        x = torch.randn(1, 3, 6, 16, 24)
        assert_close(torch.cat(stream(model.eval(), x)[1], dim=1), whole(model, x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["joint", "factorised"])
@pytest.mark.parametrize("position", ["videorope", "mixed-3d"])
def test_time_in_seconds(position: str, attention: str) -> None:
    """Each clip's own times, shared ones, and a form that changes on the way."""
    model = build(position, attention=attention, positions_per_second=1.5)
    seconds = 10 + torch.rand(2, 8).cumsum(1)
    tokens = torch.cat(stream(model, clips(), seconds)[1], dim=1)
    assert_close(tokens, whole(model, clips(), seconds), atol=1e-5, rtol=1e-5)
    tokens = torch.cat(stream(model, clips(), seconds[0])[1], dim=1)
    assert_close(tokens, whole(model, clips(), seconds[0]), atol=1e-5, rtol=1e-5)
    state, first = model.step(model.start_stream(), clips()[:, :, :2], seconds[:1, :2].expand(2, -1))
    _, second = model.step(state, clips()[:, :, 2:4], seconds[0, 2:4].tolist())
    wanted = whole(model, clips()[:, :, :4], seconds[0, :4])
    assert_close(torch.cat((first, second), dim=1), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["joint", "factorised"])
def test_old_states_stay_and_branch(attention: str) -> None:
    model = build(attention=attention)
    states, tokens = stream(model, clips())
    before = copy.deepcopy(states)
    other = torch.cat((clips()[:, :, :4], torch.randn(2, 3, 4, 16, 24)), dim=2)
    with torch.no_grad():
        state, third = model.step(states[2], other[:, :, 4:6])
        _, fourth = model.step(state, other[:, :, 6:8])
        again, same = model.step(states[2], clips()[:, :, 4:6])
    branched = torch.cat((*tokens[:2], third, fourth), dim=1)
    assert_close(branched, whole(model, other), atol=1e-5, rtol=1e-5)
    assert torch.equal(same, tokens[2])
    assert again is not states[3]
    for old, now in zip(before, states, strict=True):
        assert old.steps == now.steps
        for one, two in zip(tensors_of(old), tensors_of(now), strict=True):
            assert torch.equal(one, two)


def tensors_of(state: StreamState) -> list[Tensor]:
    return [part for layer in state.layers for kept in layer for part in kept]


@pytest.mark.parametrize("attention", ["joint", "factorised"])
@pytest.mark.parametrize("max_steps", [1, 3, 9])
def test_a_window_is_the_clip_under_its_mask(attention: str, max_steps: int) -> None:
    """Joint attention under an explicit mask; over time the same mask, place by place. What is kept stays small."""
    model = build("axial-3d", attention=attention)
    x = clips(6)
    states, tokens = stream(model, x, max_steps=max_steps)
    plain = build("axial-3d", causal=False, attention=attention)
    plain.load_state_dict(model.state_dict())
    step = torch.cat((torch.zeros(PREFIX), torch.arange(6).repeat_interleave(PLACES)))
    near = (step[:, None] >= step) & (step[:, None] - step < max_steps)
    near[:, :PREFIX] = True
    with torch.no_grad():
        embedded, positions = plain._place(plain.embed_patches(x))
        for block, position in zip(plain.blocks, positions, strict=True):
            if attention == "joint":
                embedded = block(embedded, attn_mask=near, rope=position)
            else:
                embedded = windowed(block, embedded, position, near)
        wanted = plain.norm(embedded)
    assert_close(torch.cat(tokens, dim=1), wanted, atol=1e-5, rtol=1e-5)
    kept = [sum(part.numel() for part in tensors_of(state)) for state in states]
    assert (kept[6] == kept[5]) == (max_steps < 6)


def windowed(block: Any, x: Tensor, position: Any, near: Tensor) -> Tensor:
    """A factorised block with masks of all pairs of tokens, from the projections of its layers."""
    place = torch.arange(PLACES).repeat(x.shape[1] // PLACES)
    step = torch.arange(x.shape[1] // PLACES).repeat_interleave(PLACES)
    rotation, patches = position.space.position, x[:, PREFIX:]
    time = (place[:, None] == place) & near[PREFIX:, PREFIX:]
    own = rotation.take(slice(PREFIX, None))
    patches = patches + block.attn_time(block.norm_time(patches), attn_mask=time, rope=own)
    x = torch.cat((x[:, :PREFIX], patches), dim=1)
    seen = torch.ones(len(near), len(near), dtype=torch.bool)
    seen[PREFIX:, PREFIX:] = step[:, None] == step
    seen[:PREFIX, PREFIX:] = step == 0
    x = x + block.attn(block.norm1(x), attn_mask=seen, rope=rotation)
    return x + block.mlp(block.norm2(x))


@pytest.mark.parametrize("attention", ["joint", "factorised"])
def test_a_step_costs_one_step(attention: str) -> None:
    """Every layer sees the tokens of the step alone, however many came before."""
    model = build(attention=attention)
    seen: list[int] = []
    for module in model.blocks.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    stream(model, clips())
    counts = [seen[i : i + len(seen) // STEPS] for i in range(0, len(seen), len(seen) // STEPS)]
    assert {max(count) for count in counts[1:]} == {PLACES}
    assert max(counts[0]) == PREFIX + PLACES


@pytest.mark.parametrize("method", ["interpolate", "yarn"])
@pytest.mark.parametrize("attention", ["joint", "factorised"])
def test_extension_is_that_of_the_declared_length(attention: str, method: str) -> None:
    model = vr.set_extension(build("qwen2-vl", attention=attention), method)
    x = clips(7)
    extended = whole(model, x)
    assert_close(torch.cat(stream(model, x, length=7)[1], dim=1), extended, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(torch.cat(stream(model, x)[1], dim=1), extended, atol=1e-3)
    state = model.start_stream(length=7)
    with torch.no_grad():
        state, first = model.step(state, x[:, :, :2])
        vr.set_extension(model, "none")
        tokens = [first]
        for start in range(2, 14, 2):
            state, step = model.step(state, x[:, :, start : start + 2])
            tokens.append(step)
    assert_close(torch.cat(tokens, dim=1), extended, atol=1e-5, rtol=1e-5)


def test_extension_of_seconds() -> None:
    model = vr.set_extension(build("qwen2-vl", positions_per_second=2.0), "ntk", train_size=(4, 2, 3))
    seconds = torch.arange(8) * 1.0  # steps at 0, 4, 8, 12
    extended = whole(model, clips(), seconds)
    assert_close(torch.cat(stream(model, clips(), seconds, length=13)[1], dim=1), extended, atol=1e-5, rtol=1e-5)
    vr.set_extension(model, "none")
    plain = whole(model, clips(), seconds)
    vr.set_extension(model, "ntk", train_size=(4, 2, 3))
    assert_close(torch.cat(stream(model, clips(), seconds)[1], dim=1), plain, atol=1e-5, rtol=1e-5)


def test_learned_time_is_that_of_the_declared_length() -> None:
    model = build("learned")
    x = clips(6)
    assert_close(torch.cat(stream(model, x, length=6)[1], dim=1), whole(model, x), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"length 4 and this is step 5, .* start_stream the length"):
        stream(model, x)
    rotary = build("qwen2-vl")
    assert_close(torch.cat(stream(rotary, x)[1], dim=1), whole(rotary, x), atol=1e-5, rtol=1e-5)


def test_gradients_flow_through_a_stream() -> None:
    model = build("mixed-3d", attention="factorised")
    x = clips(2)
    model.forward_features(x).square().sum().backward()
    wanted = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    state, first = model.step(model.start_stream(), x[:, :, :2])
    _, second = model.step(state, x[:, :, 2:])
    torch.cat((first, second), dim=1).square().sum().backward()
    for name, gradient in wanted.items():
        assert_close(model.get_parameter(name).grad, gradient, atol=1e-3, rtol=1e-4)


def begun(model: Any, batch: int = 2) -> StreamState:
    seconds = None if model.positions_per_second is None else [0.0, 1.0]
    return model.step(model.start_stream(), clips(1, batch), seconds)[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build(causal=False).start_stream(), "causal is False: .* build the video model with causal=True"),
        (lambda: build("t5").start_stream(), "'t5' adds terms for pairs .* rotary encoding"),
        (lambda: build().start_stream(length=0), "length is 0; it must be a positive whole number"),
        (lambda: build().start_stream(max_steps=1.5), "max_steps is 1.5; it must be a positive whole number"),
        (lambda: build().step(None, clips(1)), "state is a NoneType; start with state = video.start_stream"),
        (
            lambda: (model := build()).train().step(model.start_stream(), clips(1)),
            r"in training mode, .* video.eval\(\) first",
        ),
        (lambda: (model := build()).step(model.start_stream(), clips(2)), "frames has 4 frames; .* one tubelet, 2"),
        (lambda: (model := build()).step(model.start_stream(), clips(1)[:, :, :1]), "fewer than one tubelet"),
        (
            lambda: (model := build()).step(begun(model), clips(1)[..., :16]),
            "frames are 2 clips of 2 x 2 patches and the stream began with 2 of 2 x 3",
        ),
        (lambda: (model := build()).step(begun(model), clips(1, 3)), "frames are 3 clips .* began with 2"),
        (lambda: build().step(begun(build(attention="factorised")), clips(1)), "state is of another model"),
        (lambda: build(attention="factorised").step(begun(build()), clips(1)), "state is of another model"),
        (
            lambda: (model := build(positions_per_second=2.0)).step(begun(model), clips(1), [0.5, 2.0]),
            "seconds begin at 0.5 and the step before ended at 1; a stream goes forward in time",
        ),
        (lambda: (model := build(positions_per_second=2.0)).step(begun(model), clips(1)), "seconds are missing"),
        (
            lambda: (model := build(positions_per_second=2.0)).step(begun(model), clips(1), [3.0, 2.0]),
            "seconds do not increase: frame 1 has 2 after 3",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
