"""What the memory of a SAM 2 model stores and reads: by hand, against SAM 2's own call, and against Ultralytics."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import vision_rope as vr
from vision_rope.memory import MemoryAttention, MemoryBank, MemoryEncoder, StoredFrame, StoredPointer, VideoMemory
from vision_rope.memory.sine import sine_1d, sine_2d
from vision_rope.video.sam2 import ultralytics_module

DIM, MEMORY_DIM = 32, 8


def tiny_memory(version="2.1"):
    attention = vr.MemoryAttention(DIM, MEMORY_DIM, depth=2, mlp_dim=48)
    memory = vr.VideoMemory(attention, vr.MemoryEncoder(DIM, MEMORY_DIM), version=version).eval()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return memory


def make_frame(number, grid=(2, 3), batch=1, **options):
    return StoredFrame(number, torch.randn(batch, grid[0] * grid[1], MEMORY_DIM), grid, **options)


def make_pointer(number, batch=1, **options):
    return StoredPointer(number, torch.randn(batch, DIM), **options)


# --- entries that memory attention reads -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.0", "2.1"])
def test_pointer_tokens_by_hand(version):
    """Four tokens of 8 channels a pointer, pointer after pointer; 2.1 adds their ages to keys and 2.0 does not."""
    memory = tiny_memory(version)
    bank = vr.MemoryBank()
    for number in (0, 3, 4):
        bank = bank.add_pointer(make_pointer(number, batch=2, prompted=number == 0))
    (entry,) = memory.read_entries(bank, 5)
    assert entry.grid is None
    assert entry.age is None
    pointers = [bank.pointers[index].pointer for index in (0, 2, 1)]
    for place, pointer in enumerate(pointers):
        for part in range(4):
            assert_close(entry.features[:, 4 * place + part], pointer[:, 8 * part : 8 * part + 8])
    if version == "2.0":
        assert entry.position is None
        return
    for place, age in enumerate((5, 1, 2)):
        w = memory.state_dict()
        encoded = sine_1d(torch.tensor([age / 15]), DIM) @ w["obj_ptr_tpos_proj.weight"].T
        for part in range(4):
            assert_close(entry.position[4 * place + part], encoded[0] + w["obj_ptr_tpos_proj.bias"])


def run_video(memory, num_frames, policy=None, grid=(2, 3), batch=2, prompts=(0, 11), **options):
    """Banks before each frame, and the history that they were made of."""
    bank, banks, history = vr.MemoryBank(policy or vr.MemoryPolicy()), [], []
    for number in range(num_frames):
        banks.append(bank)
        features = torch.randn(1, DIM, *grid)
        logits = torch.randn(batch, 1, 16 * grid[0], 16 * grid[1])
        score, token, prompted = torch.randn(batch, 1), torch.randn(batch, DIM), number in prompts
        bank = memory.store_frame(bank, number, features, logits, object_score=score, prompted=prompted, **options)
        bank = memory.store_pointer(bank, number, token, score, prompted=prompted)
        history.append((bank.frames[-1], bank.pointers[-1]))
    return banks, history


@pytest.mark.parametrize("version", ["2.0", "2.1"])
@pytest.mark.parametrize("prepare", [False, True])
def test_a_loop_of_30_frames_reads_what_sam2_reads(version, prepare):
    """Entries of the bank, keys prepared or not, against `MemoryAttention.forward` on memory laid out by hand."""
    memory, grid = tiny_memory(version), (2, 3)
    with torch.no_grad():
        banks, history = run_video(memory, 30, prepare=prepare)
        spatial = sine_2d(*grid, MEMORY_DIM)
        ages = memory.maskmem_tpos_enc[:, 0, 0]
        for number, bank in enumerate(banks):
            tokens, tokens_pos = torch.randn(2, 6, DIM), sine_2d(*grid, DIM)
            out = memory(tokens, bank, number, grid=grid, tokens_pos=tokens_pos)
            if number == 0:
                assert_close(out, tokens + memory.no_mem_embed)
                continue
            prompted = [n for n in (0, 11) if n < number]
            tracked = [n for n in range(number) if n not in prompted]
            frames = [(n, ages[6]) for n in prompted]
            frames += [(n, ages[number - n - 1]) for n in tracked if n >= number - 6]
            pointers = [(n, number - n) for n in prompted] + [
                (n, number - n) for n in tracked[::-1] if n >= number - 15
            ]
            parts = [history[n][0].features for n, _ in frames]
            places = [(spatial + age).expand(2, -1, -1) for _, age in frames]
            for n, age in pointers:
                parts.append(history[n][1].pointer.reshape(2, 4, MEMORY_DIM))
                place = torch.zeros(1, MEMORY_DIM)
                if version == "2.1":
                    place = memory.obj_ptr_tpos_proj(sine_1d(torch.tensor([age / 15]), DIM))
                places.append(place.expand(2, 4, -1))
            expected = memory.memory_attention(
                tokens,
                torch.cat(parts, dim=1),
                grid=grid,
                tokens_pos=tokens_pos,
                memory_pos=torch.cat(places, dim=1),
                num_pointer_tokens=4 * len(pointers),
            )
            assert_close(out, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("policy", ["sam2", "stride", "closest"])
@pytest.mark.parametrize("version", ["2.0", "2.1"])
def test_memory_equals_that_of_ultralytics(version, policy, reverse):
    """Their choice of frames, ages, pointers and order, without the pruning of their predictor; 2.0 as SAM 2 has it."""
    pytest.importorskip("ultralytics")
    memory, num_frames = tiny_memory(version), 30
    policies = {"sam2": {}, "stride": {"stride": 3}, "closest": {"max_prompted": 2}}
    policy = vr.MemoryPolicy(**policies[policy])
    # To track backwards is to count the other way.
    sign = -1 if reverse else 1
    peer = SimpleNamespace(
        training=False,
        hidden_dim=DIM,
        mem_dim=MEMORY_DIM,
        num_maskmem=7,
        max_cond_frames_in_attn=policy.max_prompted or -1,
        memory_temporal_stride_for_eval=policy.stride,
        maskmem_tpos_enc=memory.maskmem_tpos_enc,
        use_obj_ptrs_in_encoder=True,
        max_obj_ptrs_in_encoder=16,
        only_obj_ptrs_in_the_past_for_eval=True,
        use_signed_tpos_enc_to_obj_ptrs=version == "2.1",
        add_tpos_enc_to_obj_ptrs=version == "2.1",
        proj_tpos_enc_in_obj_ptrs=version == "2.1",
        obj_ptr_tpos_proj=memory.obj_ptr_tpos_proj,
    )
    seen = {}

    def look(curr, curr_pos, memory, memory_pos, num_obj_ptr_tokens):
        seen.update(memory=memory, memory_pos=memory_pos, num_pointers=num_obj_ptr_tokens)
        return curr[0]

    peer.memory_attention = look
    prepare = ultralytics_module("models.sam.modules.sam").SAM2Model._prepare_memory_conditioned_features
    prompts = (29, 20, 17) if reverse else (0, 9, 12)
    outputs = {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}
    bank = vr.MemoryBank(policy)
    position = sine_2d(2, 3, MEMORY_DIM).T.reshape(1, MEMORY_DIM, 2, 3).expand(2, -1, -1, -1)
    tokens = torch.zeros(6, 2, DIM)
    for step in range(num_frames):
        number = num_frames - 1 - step if reverse else step
        if step:
            prepare(peer, number, False, [tokens], [tokens], [(2, 3)], outputs, num_frames, reverse)
            entries = memory.read_entries(bank, sign * number)
            features = torch.cat([entry.features for entry in entries], dim=1)
            zeros = torch.zeros(1, MEMORY_DIM)
            positions = [
                (zeros if entry.position is None else entry.position) + (zeros if entry.age is None else entry.age)
                for entry in entries
            ]
            positions = torch.cat([p.expand(len(e.features[0]), -1) for e, p in zip(entries, positions, strict=True)])
            order, expected = order_of(features, seen["memory"].transpose(0, 1))
            assert_close(features[:, order], expected, rtol=0, atol=0)
            assert_close(positions[order], seen["memory_pos"][:, 0], atol=1e-5, rtol=1e-5)
            assert len(entries[-1].features[0]) == seen["num_pointers"]
            assert entries[-1].grid is None
        prompted = number in prompts
        frame, pointer = make_frame(sign * number, batch=2, prompted=prompted), make_pointer(sign * number, batch=2)
        pointer = replace(pointer, prompted=prompted)
        bank = bank.add_frame(frame).add_pointer(pointer)
        kind = "cond_frame_outputs" if prompted else "non_cond_frame_outputs"
        outputs[kind][number] = {
            "maskmem_features": frame.features.mT.reshape(2, MEMORY_DIM, 2, 3),
            "maskmem_pos_enc": [position],
            "obj_ptr": pointer.pointer,
        }


def order_of(features, expected):
    """The same tokens in the order of the peer, which depends on when frames were prompted; every token is another."""
    assert features.shape == expected.shape
    distances = torch.cdist(expected[0], features[0], compute_mode="donot_use_mm_for_euclid_dist")
    order = distances.argmin(dim=1)
    assert len(order.unique()) == len(order)
    return order, expected


def test_a_video_of_frames_with_grids_of_their_own():
    memory = tiny_memory()
    with torch.no_grad():
        bank = vr.MemoryBank()
        for number, grid in enumerate([(2, 3), (1, 6), (3, 2)]):
            features, logits = torch.randn(1, DIM, *grid), torch.randn(1, 1, 16 * grid[0], 16 * grid[1])
            bank = memory.store_frame(bank, number, features, logits, prompted=number == 0)
        entries = memory.read_entries(bank, 3)
        assert [entry.grid for entry in entries] == [(2, 3), (1, 6), (3, 2)]
        assert memory(torch.randn(1, 8, DIM), bank, 3, grid=(2, 4)).isfinite().all()


def test_more_frames_than_there_are_ages_are_refused():
    with pytest.raises(ValueError, match=r"num_recent is 7; 7 ages"):
        tiny_memory().read_entries(vr.MemoryBank(vr.MemoryPolicy(num_recent=7)), 0)


def test_num_bytes_counts_everything():
    memory = tiny_memory()
    with torch.no_grad():
        score = torch.ones(2, 1)
        features, logits = torch.randn(2, DIM, 2, 3), torch.randn(2, 1, 32, 48)
        bank = memory.store_frame(vr.MemoryBank(), 0, features, logits, object_score=score, dtype=torch.bfloat16)
        bank = memory.prepare_keys(memory.store_pointer(bank, 0, torch.randn(2, DIM), score))
    keys = 2 * (2 * 6 * DIM) * 4
    assert bank.num_bytes() == 2 * 6 * MEMORY_DIM * 2 + keys + 2 * 4 + 2 * DIM * 4
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in bank.tensors()}
    assert sum(storages.values()) == bank.num_bytes()


# --- prepared keys ---------------------------------------------------------------------------------------------------


def store(memory, bank, number=0, **options):
    features, logits = torch.randn(1, DIM, 2, 3), torch.randn(1, 1, 32, 48)
    return memory.store_frame(bank, number, features, logits, prompted=True, **{"prepare": True, **options})


def test_no_keys_while_gradients_are_on():
    memory = tiny_memory()
    assert store(memory, vr.MemoryBank()).frames[0].keys is None
    with torch.no_grad():
        bank = store(memory, vr.MemoryBank())
        assert store(memory, vr.MemoryBank(), prepare=False).frames[0].keys is None
        assert memory.read_entries(bank, 1)[0].keys is not None
    # Stored without gradients and read with them: weights of the keys must get theirs.
    assert memory.read_entries(bank, 1)[0].keys is None
    memory(torch.randn(1, 6, DIM), bank, 1, grid=(2, 3)).sum().backward()
    assert memory.memory_attention.layers[0].cross_attn_image.k_proj.weight.grad.abs().sum() > 0
    assert memory.prepare_keys(bank).frames[0].keys is None


def test_gradients_reach_every_weight_through_the_bank():
    memory = tiny_memory()
    features, logits = torch.randn(1, DIM, 2, 3), torch.randn(1, 1, 32, 48)
    bank = memory.store_frame(vr.MemoryBank(), 0, features, logits, prompted=True, object_score=-torch.ones(1, 1))
    bank = memory.store_frame(bank, 1, features, logits)
    for number, score in enumerate((1.0, -1.0)):
        bank = memory.store_pointer(bank, number, torch.randn(1, DIM), torch.tensor([score]), prompted=number == 0)
    tokens = torch.randn(1, 6, DIM)
    out = memory(tokens, bank, 2, grid=(2, 3)) + memory(tokens, vr.MemoryBank(), 0, grid=(2, 3))
    out.square().sum().backward()
    missing = [name for name, p in memory.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert missing == ["no_mem_pos_enc"]


def change_step(memory):
    with torch.no_grad():
        memory.memory_attention.layers[1].cross_attn_image.k_proj.bias.add_(1.0)


def change_load(memory):
    memory.load_state_dict({key: value + 0.1 for key, value in memory.state_dict().items()})


def change_assign(memory):
    memory.load_state_dict({key: value + 0.1 for key, value in memory.state_dict().items()}, assign=True)


def change_dtype(memory):
    memory.double()


@pytest.mark.parametrize("change", [change_step, change_load, change_assign, change_dtype])
def test_keys_of_other_weights_are_not_used(change):
    memory = tiny_memory()
    with torch.no_grad():
        bank = store(memory, vr.MemoryBank())
        assert memory.read_entries(bank, 1)[0].keys is not None
        change(memory)
        assert memory.read_entries(bank, 1)[0].keys is None
        again = memory.prepare_keys(bank)
        tokens = torch.randn(1, 6, DIM)
        out = [memory(tokens, b, 1, grid=(2, 3)) for b in (bank, again)]
        assert memory.read_entries(again, 1)[0].keys is not None
        assert_close(out[0], out[1], atol=1e-5, rtol=1e-5)


def test_a_correction_replaces_the_frame():
    """A click on a tracked frame: its memory is another one, without the old keys, and it stays from then on."""
    memory = tiny_memory()
    bank = vr.MemoryBank()
    with torch.no_grad():
        for number in range(4):
            features, logits = torch.randn(1, DIM, 2, 3), torch.randn(1, 1, 32, 48)
            bank = memory.store_frame(bank, number, features, logits, prompted=number == 0, prepare=True)
    assert all(frame.keys is not None for frame in bank.frames)
    corrected = bank.add_frame(make_frame(2, prompted=True))
    assert [frame.number for frame in corrected.frames] == [0, 1, 2, 3]
    assert [frame.keys is None for frame in corrected.frames] == [False, False, True, False]
    assert corrected.select_frames(4)[:2] == [(corrected.frames[0], 6), (corrected.frames[2], 6)]
    assert not bank.frames[2].prompted
    for number in range(4, 30):
        corrected = corrected.add_frame(make_frame(number))
    assert [frame.number for frame in corrected.frames][:2] == [0, 2]


def test_keys_of_other_memory_are_not_used():
    memory = tiny_memory()
    with torch.no_grad():
        (frame,) = store(memory, vr.MemoryBank()).frames
        for changed in (replace(frame, features=frame.features.clone()), replace(frame, grid=(3, 2))):
            assert memory.read_entries(vr.MemoryBank(frames=(changed,)), 1)[0].keys is None
        frame.features.mul_(2.0)
        assert memory.read_entries(vr.MemoryBank(frames=(frame,)), 1)[0].keys is None


def test_inference_mode_and_copies():
    memory = tiny_memory()
    tokens = torch.randn(1, 6, DIM)
    with torch.inference_mode():
        bank = store(memory, vr.MemoryBank())
        expected = memory(tokens, bank, 1, grid=(2, 3))
        assert memory.read_entries(bank, 1)[0].keys is not None
        for other in (copy.deepcopy(bank), pickle.loads(pickle.dumps(bank))):
            assert_close(memory(tokens, other, 1, grid=(2, 3)), expected, atol=1e-5, rtol=1e-5)


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("prepare", [False, True])
def test_memory_in_another_type_than_the_weights(stored, weights, prepare):
    """Failure class 42: memory is cast to the weights when it is read, keys are made of the memory as it is stored."""
    memory = tiny_memory()
    tokens = torch.randn(2, 6, DIM)
    with torch.no_grad():
        banks, history = run_video(memory, 9, dtype=stored, prepare=False)
        bank = replace(banks[-1], frames=tuple(replace(f, features=f.features.float()) for f in banks[-1].frames))
        expected = memory(tokens, bank, 8, grid=(2, 3))
        assert history[0][0].features.dtype == stored
        memory.to(weights)
        bank = memory.prepare_keys(banks[-1]) if prepare else banks[-1]
        out = memory(tokens.to(stored), bank, 8, grid=(2, 3), tokens_pos=torch.zeros(6, DIM))
    assert out.dtype == weights
    exact = weights == stored == torch.float32
    tolerance = 1e-5 if exact else 0.1
    assert float((out - expected).norm() / expected.norm()) < tolerance


def test_under_autocast():
    memory = tiny_memory()
    tokens = torch.randn(2, 6, DIM)
    with torch.no_grad():
        banks, _ = run_video(memory, 9)
        expected = memory(tokens, banks[-1], 8, grid=(2, 3))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed, _ = run_video(memory, 3)
            assert memory(tokens, mixed[-1], 3, grid=(2, 3)).isfinite().all()
            out = memory(tokens, banks[-1], 8, grid=(2, 3))
        assert memory(tokens, mixed[-1], 3, grid=(2, 3)).isfinite().all()
    assert float((out - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("how", ["fused step", "data", "load", "inference"])
def test_keys_of_other_weights_are_not_read(how):
    """However the weights changed: not every way counts its changes."""
    memory = VideoMemory(MemoryAttention(32, 8, 2, 64, dropout=0.0), MemoryEncoder(32, 8))
    generator = torch.Generator().manual_seed(0)
    frame, masks, tokens = (torch.randn(s, generator=generator) for s in ((1, 32, 3, 5), (1, 1, 48, 80), (1, 15, 32)))
    with torch.inference_mode() if how == "inference" else torch.no_grad():
        if how == "inference":
            memory = copy.deepcopy(memory)
        bank = memory.store_frame(MemoryBank(), 0, frame, masks, prompted=True, prepare=True)
        assert memory.read_entries(bank, 1)[0].keys is not None
        if how == "inference":
            for parameter in memory.parameters():
                parameter.mul_(1.5)
    if how == "fused step":
        optimizer = torch.optim.AdamW(memory.parameters(), lr=0.1, fused=True)
        memory(tokens, bank, 1, grid=(3, 5)).square().sum().backward()
        optimizer.step()
    elif how == "data":
        for parameter in memory.parameters():
            parameter.data.mul_(0.5)
    elif how == "load":
        memory.load_state_dict({name: 2 * value for name, value in memory.state_dict().items()})
    with torch.inference_mode() if how == "inference" else torch.no_grad():
        assert memory.read_entries(bank, 1)[0].keys is None
        fresh = memory.prepare_keys(bank)
        assert memory.read_entries(fresh, 1)[0].keys is not None
        wanted = memory(tokens, fresh, 1, grid=(3, 5))
        torch.testing.assert_close(memory(tokens, bank, 1, grid=(3, 5)), wanted, atol=1e-5, rtol=1e-5)
