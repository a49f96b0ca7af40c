"""SAM 2 models with this package's memory attention: same masks as before on squares, right on rectangles."""

from __future__ import annotations

import copy
import itertools
import pickle
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.memory.attention import MemoryAttention
from vision_rope.video.sam2 import build_sam2, ultralytics_module

DIM, MEMORY_DIM = 32, 8


class PeerAttention(nn.Module):
    """What SAM 2's attention has, without its arithmetic, which is replaced."""

    def __init__(self, kv_dim: int, num_heads: int, theta: float) -> None:
        super().__init__()
        self.num_heads, self.dropout_p = num_heads, 0.1
        self.q_proj, self.out_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k_proj, self.v_proj = nn.Linear(kv_dim, DIM), nn.Linear(kv_dim, DIM)
        self.compute_cis = partial(dict, dim=DIM // num_heads, theta=theta)


class PeerLayer(nn.Module):
    def __init__(self, num_heads: int, theta: float) -> None:
        super().__init__()
        self.self_attn = PeerAttention(DIM, num_heads, theta)
        self.cross_attn_image = PeerAttention(MEMORY_DIM, num_heads, theta)
        self.linear1, self.linear2 = nn.Linear(DIM, 48), nn.Linear(48, DIM)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(DIM), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.dropout, self.dropout1, self.dropout2, self.dropout3 = (nn.Dropout(0.2) for _ in range(4))
        self.activation = nn.functional.relu
        self.pos_enc_at_attn = self.pos_enc_at_cross_attn_queries = False
        self.pos_enc_at_cross_attn_keys = True


class PeerMemoryAttention(nn.Module):
    def __init__(self, num_heads: int, theta: float) -> None:
        super().__init__()
        self.d_model = DIM
        self.layers = nn.ModuleList(PeerLayer(num_heads, theta) for _ in range(2))
        self.norm = nn.LayerNorm(DIM, eps=1e-4)
        self.pos_enc_at_input = self.batch_first = True


class PromptEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image_embedding_size = [4, 4]
        self.no_mask_embed = nn.Embedding(1, 4)


class Peer(nn.Module):
    """A model with SAM 2's names and its way to call memory attention."""

    def __init__(self, num_heads: int = 1, theta: float = 10000.0) -> None:
        super().__init__()
        self.memory_attention: Any = PeerMemoryAttention(num_heads, theta)
        self.sam_prompt_encoder = PromptEncoder()
        self.inside = lambda: None

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "inside"}

    def _prepare_memory_conditioned_features(
        self, frame_idx: int, is_init_cond_frame: bool, vision_feats: list[Tensor], feat_sizes: list, output_dict: dict
    ) -> Tensor:
        if frame_idx == 1:
            self.inside()
        return self.memory_attention(curr=vision_feats, curr_pos=vision_feats, **output_dict)


def read(model: Any, grid: tuple[int, int], seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randn(grid[0] * grid[1], 2, DIM, generator=draw)
    memory = torch.randn(2 * grid[0] * grid[1] + 4, 2, MEMORY_DIM, generator=draw)
    stored = {"memory": memory, "memory_pos": 0.5 * memory, "num_obj_ptr_tokens": 4}
    return model._prepare_memory_conditioned_features(
        1, False, [tokens], feat_sizes=[(99, 99), grid], output_dict=stored
    )


def own(peer: Any, num_heads: int = 1, base: float = 10000.0) -> MemoryAttention:
    attention = MemoryAttention(DIM, MEMORY_DIM, depth=2, mlp_dim=48, num_heads=num_heads, base=base)
    attention.norm = nn.LayerNorm(DIM, eps=1e-4)
    attention.load_state_dict(peer.memory_attention.state_dict())
    return attention.eval()


def read_alone(attention: MemoryAttention, grid: tuple[int, int], seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randn(grid[0] * grid[1], 2, DIM, generator=draw).transpose(0, 1)
    memory = torch.randn(2 * grid[0] * grid[1] + 4, 2, MEMORY_DIM, generator=draw).transpose(0, 1)
    out = attention(tokens, memory, grid=grid, tokens_pos=tokens, memory_pos=0.5 * memory, num_pointer_tokens=4)
    return out.transpose(0, 1)


@pytest.mark.parametrize(("num_heads", "base"), [(1, 10000.0), (2, 500.0)])
def test_grid_of_the_frame_reaches_the_attention(num_heads, base):
    """Failure class 34, and failure class 2: grids of one number of tokens, one of them the model's own."""
    peer = Peer(num_heads, base).eval()
    expected = own(peer, num_heads, base)
    model = vr.replace_memory_attention(peer)
    assert model is peer
    outs = {}
    for grid in ((4, 4), (2, 8), (8, 2), (16, 1), (3, 5)):
        outs[grid] = read(model, grid)
        assert_close(outs[grid], read_alone(expected, grid), atol=1e-6, rtol=0)
    assert (outs[2, 8] - outs[4, 4]).abs().max() > 1e-3
    assert (outs[2, 8] - outs[8, 2]).abs().max() > 1e-3


def test_parameters_names_and_modes_stay():
    peer = Peer()
    peer.memory_attention.layers[0].linear1.requires_grad_(False)
    peer.memory_attention.layers[1].norm2.bfloat16()
    before, keys, trainable = dict(peer.named_parameters()), list(peer.state_dict()), _trainable(peer)
    seen = []
    peer.memory_attention.layers[1].linear2.register_forward_hook(lambda *args: seen.append(1))
    assert peer.training
    model = vr.replace_memory_attention(peer)
    assert isinstance(model.memory_attention, vr.MemoryAttention)
    assert isinstance(model, Peer)
    assert sorted(model.state_dict()) == sorted(keys)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert _trainable(model) == trainable
    assert model.memory_attention.training
    assert model.memory_attention.d_model == DIM
    layer = model.memory_attention.layers[1]
    assert (layer.dropout.p, layer.self_attn.dropout, layer.cross_attn_image.dropout) == (0.2, 0.1, 0.1)
    layer.norm2.float()
    read(model.eval(), (2, 3))
    assert seen == [1]
    attention = model.memory_attention
    assert vr.replace_memory_attention(model).memory_attention is attention
    assert type(model).__mro__.count(Peer) == 1


def _trainable(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def test_copies_and_files():
    model = vr.replace_memory_attention(Peer().eval())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again.inside = lambda: None
        assert torch.equal(read(again, (3, 5)), read(model, (3, 5)))
        assert again.memory_attention._prompt_encoder[0] is again.sam_prompt_encoder
        assert again.memory_attention is not model.memory_attention
        # Copies are independent of the original.
        again.sam_prompt_encoder.image_embedding_size = [3, 5]
        with torch.no_grad():
            again.memory_attention.norm.weight.zero_()
        assert read(model, (3, 5)).abs().max() > 0.1
        assert model.sam_prompt_encoder.image_embedding_size == [4, 4]


def test_call_outside_of_the_model():
    """A grid that is given, or the model's own; never one that is guessed from the number of tokens."""
    model = vr.replace_memory_attention(Peer().eval())
    attention = model.memory_attention
    tokens, memory = torch.randn(16, 1, DIM), torch.randn(32, 1, MEMORY_DIM)
    own_grid = attention(tokens, memory, tokens, memory)
    assert torch.equal(attention([tokens], memory, [tokens], memory, 0), own_grid)
    assert torch.equal(attention(tokens, memory, tokens, memory, 0, grid=(4, 4)), own_grid)
    assert (attention(tokens, memory, tokens, memory, grid=(2, 8)) - own_grid).abs().max() > 1e-3
    model.sam_prompt_encoder.image_embedding_size = (2, 8)
    assert torch.equal(attention(tokens, memory), attention(tokens, memory, grid=(2, 8)))
    with pytest.raises(ValueError, match=r"curr has 9 tokens and the model's own grid is \(2, 8\); give the grid"):
        attention(tokens[:9], memory[:18])
    with pytest.raises(ValueError, match="curr has 2 tensors"):
        attention([tokens, tokens], memory)


def test_the_grid_ends_with_the_call():
    """After a frame, and after a frame that failed, nothing of its grid is left."""
    model = vr.replace_memory_attention(Peer().eval())
    expected = model.memory_attention(tokens := torch.randn(16, 1, DIM), memory := torch.randn(16, 1, MEMORY_DIM))
    read(model, (2, 8))
    assert torch.equal(model.memory_attention(tokens, memory), expected)
    model.inside = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        read(model, (2, 8))
    assert torch.equal(model.memory_attention(tokens, memory), expected)


def test_threads_do_not_disturb_each_other():
    """Two threads are inside the model at once, each with a frame of another grid."""
    model = vr.replace_memory_attention(Peer().eval())
    grids = [(2, 8), (8, 2)]
    expected = [read(model, grid) for grid in grids]
    barrier = threading.Barrier(2, timeout=30)
    model.inside = barrier.wait
    found: dict[int, Tensor] = {}
    workers = [
        threading.Thread(target=lambda place: found.update({place: read(model, grids[place])}), args=(place,))
        for place in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for place in range(2):
        assert_close(found[place], expected[place], atol=1e-6, rtol=0)


@pytest.mark.integration
def test_compiled_attention_sees_the_grid():
    """Failure class 2: compiled as Meta compiles it for videos, two grids of one number of tokens."""
    torch._dynamo.reset()
    model = vr.replace_memory_attention(Peer().eval())
    grids = [(2, 8), (8, 2)]
    expected = [read(model, grid) for grid in grids]
    model.memory_attention.forward = torch.compile(model.memory_attention.forward, fullgraph=True, backend="eager")
    for grid, out in zip(grids, expected, strict=True):
        assert_close(read(model, grid), out, atol=1e-5, rtol=0)
    torch._dynamo.reset()


def _set(path: str, value: Any) -> Any:
    def change(peer: Any) -> None:
        *parents, name = path.split(".")
        setattr(peer.get_submodule(".".join(parents)), name, value)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("memory_attention.pos_enc_at_input", False), "memory_attention.pos_enc_at_input is False; .*=True"),
        (_set("memory_attention.batch_first", False), "batch_first is False"),
        (_set("memory_attention.layers.1.pos_enc_at_attn", True), r"layers.1.pos_enc_at_attn is True; .*=False"),
        (
            _set("memory_attention.layers.0.pos_enc_at_cross_attn_queries", True),
            "pos_enc_at_cross_attn_queries is True",
        ),
        (_set("memory_attention.layers.0.pos_enc_at_cross_attn_keys", False), "pos_enc_at_cross_attn_keys is False"),
        (_set("memory_attention.layers.1.activation", nn.functional.gelu), r"layers.1.activation is .*gelu.*relu"),
        (_set("memory_attention.layers.0.dropout2", nn.Dropout(0.3)), r"layers.0 drops .* \[0.2, 0.3\]"),
        (
            _set("memory_attention.layers.1.self_attn.compute_cis", partial(dict, dim=DIM, theta=100.0)),
            "they must share one",
        ),
        (_set("memory_attention.layers.1.self_attn.compute_cis", None), "they must share one"),
    ],
)
def test_other_memory_attention_is_refused(change, message):
    peer = Peer()
    change(peer)
    attention = peer.memory_attention
    with pytest.raises(ValueError, match=message):
        vr.replace_memory_attention(peer)
    assert peer.memory_attention is attention
    assert type(peer) is Peer


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"model is a Linear without memory_attention, .*SAM\('sam2.1_t.pt'\).model"):
        vr.replace_memory_attention(nn.Linear(2, 2))


# --- Ultralytics ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sharpen(model: Any) -> None:
    """Make a SAM 2 with random weights one whose attention is not flat and whose object is always there."""
    model.sam_mask_decoder.pred_obj_score_head.layers[-1].bias.fill_(10.0)
    for layer in model.memory_attention.layers:
        for attention in (layer.self_attn, layer.cross_attn_image):
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight.mul_(3.0)


@pytest.fixture(scope="module")
def sam2() -> nn.Module:
    """An untouched SAM 2.1 tiny with random weights whose attention is not flat and whose object is always there."""
    pytest.importorskip("ultralytics")
    torch.manual_seed(0)
    model = build_sam2("sam2.1_t").eval()
    model.set_binarize(True)  # as its video predictor does with a model that it builds
    sharpen(model)
    return model


@pytest.mark.integration
def test_same_masks_on_a_video(sam2, shared_data):
    """Ultralytics' own predictor on a real video, two objects: untouched, replaced, and with another base."""
    predict = ultralytics_module("models.sam.predict")
    video = shared_data / "videos_nomask" / "nasa_13013.mp4"

    class Predictor(predict.SAM2VideoPredictor):
        def inference(self, *args: Any, **kwargs: Any) -> Any:
            out = super().inference(*args, **kwargs)
            self.logits.append(out[0].clone())
            return out

    def track(model: nn.Module) -> tuple[Tensor, Tensor]:
        predictor = Predictor(overrides={"imgsz": 128, "device": "cpu", "save": False, "verbose": False, "conf": 0.0})
        predictor.logits = []
        predictor.setup_model(model, verbose=False)
        results = predictor(source=str(video), bboxes=[[100, 40, 220, 150], [20, 20, 90, 160]], stream=True)
        masks = torch.stack([result.masks.data.clone() for result in itertools.islice(results, 10)])
        return torch.stack(predictor.logits), masks

    logits, masks = track(sam2)
    replaced = vr.replace_memory_attention(copy.deepcopy(sam2))
    own_logits, own_masks = track(replaced)
    assert logits.shape[:2] == masks.shape[:2] == (10, 2)
    filled = masks.flatten(2).float().mean(dim=-1)
    assert ((filled > 0.002) & (filled < 0.98)).all(), filled
    assert_close(own_logits, logits, atol=1e-5, rtol=0)
    assert torch.equal(own_logits > 0, logits > 0)
    # Scaled to the size of the video, a few of a million pixels lie within rounding errors of the threshold.
    assert (own_masks != masks).float().mean() < 1e-4
    # The masks depend on the memory: another rotation changes them.
    replaced.memory_attention.rope = vr.preset("sam2", head_dim=256, base=100.0)
    other_logits, other_masks = track(replaced)
    assert (other_logits[1:] - logits[1:]).flatten(1).abs().amax(dim=1).min() > 1e-3
    assert (other_masks != masks)[1:].float().mean() > 1e-3


@pytest.mark.integration
@pytest.mark.parametrize("grid", [(16, 4), (36, 64)])
def test_rectangles(sam2, grid):
    """Failure class 34: right where the untouched model is silently wrong."""
    peer = copy.deepcopy(sam2)
    model = vr.replace_memory_attention(copy.deepcopy(sam2))
    alone = vr.MemoryAttention().eval()
    alone.load_state_dict(peer.memory_attention.state_dict())
    tokens, positions = torch.randn(2, grid[0] * grid[1], 1, 256)
    stored = {
        "maskmem_features": torch.randn(1, 64, *grid).half(),
        "maskmem_pos_enc": [torch.randn(1, 64, *grid)],
        "obj_ptr": torch.randn(1, 256),
    }
    frame = {
        "frame_idx": 1,
        "is_init_cond_frame": False,
        "current_vision_feats": [tokens],
        "current_vision_pos_embeds": [positions],
        "feat_sizes": [grid],
        "output_dict": {"cond_frame_outputs": {0: stored}, "non_cond_frame_outputs": {}},
        "num_frames": 2,
    }
    calls: list[dict[str, Any]] = []
    model.memory_attention.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        square = torch.randn(64, 1, 256), torch.randn(64, 1, 64)
        peer.memory_attention(square[0], square[1], square[0], square[1])  # a table for 8 x 8, which 16 x 4 finds
        wrong = peer._prepare_memory_conditioned_features(**frame)
        out = model._prepare_memory_conditioned_features(**frame)
        (call,) = calls
        expected = alone(
            tokens.transpose(0, 1),
            call["memory"].transpose(0, 1),
            grid=grid,
            tokens_pos=positions.transpose(0, 1),
            memory_pos=call["memory_pos"].transpose(0, 1),
            num_pointer_tokens=4,
        )
    assert_close(out, expected.transpose(1, 2).unflatten(2, grid), atol=1e-5, rtol=0)
    assert (out - wrong).abs().max() > 0.01


@pytest.mark.integration
def test_ultralytics_weights_stay(sam2):
    model = vr.replace_memory_attention(copy.deepcopy(sam2))
    state, before = model.state_dict(), sam2.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[key], before[key]) for key in before)
    assert model.memory_attention.layers[0].cross_attn_image.dropout == 0.0  # Ultralytics drops no attention weights
    sam2_again = build_sam2("sam2.1_t")
    sam2_again.load_state_dict(state)
    model.load_state_dict(sam2_again.state_dict())
