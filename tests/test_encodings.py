"""The table of encodings RoPE is compared with, and the absolute one of its own: sinusoids."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from vision_rope.encodings import ENCODINGS, FROM_THE_MODEL, build_encoding
from vision_rope.sinusoidal import ORDERS, Sinusoidal


@pytest.mark.parametrize("grid", [(4, 6), (6, 4), (1, 9), (14, 14)])
def test_sinusoidal_equals_timm(grid):
    from timm.layers import build_sincos2d_pos_embed

    assert_close(Sinusoidal(16)(*grid), build_sincos2d_pos_embed(list(grid), dim=16), atol=2e-6, rtol=0)


def test_golden_sinusoidal(golden):
    stored = golden("other_positional")
    assert_close(Sinusoidal(16)(4, 6), stored["timm_sincos2d_4x6_dim16"], atol=2e-6, rtol=0)
    assert_close(Sinusoidal(32, axes=1)(11), stored["roformer_table_16x32"], atol=2e-6, rtol=0)
    simple = Sinusoidal(16, order="simple-vit")
    assert_close(simple(4, 6), stored["vitpytorch_sincos2d_4x6_dim16"], atol=2e-6, rtol=0)


def test_vaswanis_order_is_the_papers_formula():
    table = Sinusoidal(12, axes=1, order="vaswani")(9)
    for position in range(9):
        for i in range(6):
            angle = position / 10000 ** (2 * i / 12)
            assert table[position, 2 * i] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [(7,), (3, 5), (5, 3), (2, 3, 4)])
def test_orders_hold_the_same_kinds_of_numbers_an_axis_at_a_time(order, size):
    """Every channel belongs to one axis alone, each axis has as many, and rows are not columns."""
    table = Sinusoidal(24, base=10.0, axes=len(size), order=order)(*size).unflatten(0, size)
    moved = [[] for _ in size]
    for channel in range(24):
        for axis in range(len(size)):
            one = table[..., channel]
            if (one - one.narrow(axis, 0, 1)).abs().max() > 1e-6:
                moved[axis].append(channel)
    assert sorted(channel for channels in moved for channel in channels) == list(range(24))
    assert {len(channels) for channels in moved} == {24 // len(size)}
    assert torch.equal(table[(0,) * len(size)].sort().values, torch.tensor([0.0] * 12 + [1.0] * 12))


@pytest.mark.parametrize("name", ENCODINGS)
def test_rows_of_the_table(name):
    row = ENCODINGS[name]
    assert row.summary
    assert row.unseen_sizes
    assert not set(row.options()) & set(FROM_THE_MODEL)
    model: dict[str, Any] = {"axes": 2, "size": (4, 4), "embed_dim": 16, "num_heads": 2, "head_dim": 8, "depth": 2}
    module = build_encoding(name, {}, **model)
    assert (module is None) == (row.build is None)
    with pytest.raises(ValueError, match=f"position '{name}' has no option 'bse'"):
        build_encoding(name, {"bse": 1}, **model)
    for key in model:
        with pytest.raises(ValueError, match=f"no option '{key}'"):
            build_encoding(name, {key: 2}, **model)


def test_sinusoidal_has_no_state_and_no_cast_changes_it():
    encoding = Sinusoidal(32, base=100.0)
    before = encoding(5, 3)
    assert not encoding.state_dict()
    assert torch.equal(copy.deepcopy(encoding).bfloat16()(5, 3), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encoding(5, 3), before)
    assert not torch.allclose(Sinusoidal(32)(5, 3), before)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="embed_dim is 6"):
        Sinusoidal(6)
    with pytest.raises(ValueError, match="base is 0"):
        Sinusoidal(8, base=0.0)
    with pytest.raises(ValueError, match="embed_dim is 7"):
        Sinusoidal(7, axes=1)
    with pytest.raises(ValueError, match="axes is 0"):
        Sinusoidal(8, axes=0)
    with pytest.raises(ValueError, match="order is 'tmm'"):
        Sinusoidal(8, order="tmm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 8 channels"):
        Sinusoidal(4, order="simple-vit")
    with pytest.raises(ValueError, match=r"the grid \(3,\) has 1 axes and this encoding 2"):
        Sinusoidal(8)(3)
