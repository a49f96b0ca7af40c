"""The encodings RoPE is compared with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from vision_rope.encodings import Sinusoidal


@pytest.mark.parametrize("grid", [(4, 6), (6, 4), (1, 9), (14, 14)])
def test_sinusoidal_equals_timm(grid):
    from timm.layers import build_sincos2d_pos_embed

    assert_close(Sinusoidal(16)(*grid), build_sincos2d_pos_embed(list(grid), dim=16), atol=2e-6, rtol=0)


def test_golden_sinusoidal(golden):
    assert_close(Sinusoidal(16)(4, 6), golden("other_positional")["timm_sincos2d_4x6_dim16"], atol=2e-6, rtol=0)


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
