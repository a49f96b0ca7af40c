"""Learning rates over a whole run, groups of parameters, and losses."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vision_rope.config import OptimizerConfig, ScheduleConfig
from vision_rope.losses import create_loss
from vision_rope.optimization import create_optimizer, create_schedule


def curve(section: ScheduleConfig, updates_per_epoch: int, lr: float = 1.0) -> list[float]:
    """Learning rate of every update, driven as the trainer drives it."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)
    schedule = create_schedule(optimizer, section, lr=lr, updates_per_epoch=updates_per_epoch)
    rates = []
    for update in range(section.epochs * updates_per_epoch):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(update + 1)
    return rates


@pytest.mark.parametrize(
    ("epochs", "warmup", "per_epoch"), [(10, 2, 7), (5, 0.5, 31), (3, 1, 1), (30, 3, 30), (400, 5, 3)]
)
def test_whole_cosine_curve(epochs, warmup, per_epoch):
    """Failure class 24: the closed form at every update."""
    section = ScheduleConfig(epochs=epochs, warmup_epochs=warmup, warmup_lr=0.01, min_lr=0.05)
    rates = curve(section, per_epoch)
    num_warmup = round(warmup * per_epoch)
    expected = [0.01 + (1 - 0.01) * update / num_warmup for update in range(num_warmup)]
    rest = epochs * per_epoch - num_warmup
    expected += [0.05 + 0.95 * (1 + math.cos(math.pi * update / (rest - 1))) / 2 for update in range(rest)]
    assert rates == pytest.approx(expected, abs=1e-6)
    assert rates[0] == pytest.approx(0.01), "the first update is at the learning rate of the warm-up"
    assert rates[num_warmup] == pytest.approx(1.0), "the first update after the warm-up has the learning rate itself"
    assert rates[-1] == pytest.approx(0.05), "the last update has the smallest learning rate"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cosine", {}),
        ("tanh", {}),
        ("poly", {"decay_rate": 1.0}),
        ("wsd", {}),
        ("rsqrt", {}),
        ("constant", {}),
        ("step", {}),
    ],
)
def test_every_schedule_warms_up_and_then_has_the_base_rate(name, options):
    """Failure class 24."""
    section = ScheduleConfig(name=name, epochs=20, warmup_epochs=2, warmup_lr=1e-6, min_lr=1e-3, options=options)
    rates = curve(section, 9)
    assert len(rates) == 180
    assert rates[0] == pytest.approx(1e-6)
    assert all(low < high for low, high in pairwise(rates[:19]))
    # tanh begins its curve at tanh(lower bound), which is a little below 1 by its definition
    assert rates[18] == pytest.approx(1.0, rel=1e-2 if name == "tanh" else 1e-9)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(rates[18:]))
    if name in ("cosine", "tanh", "poly", "wsd", "rsqrt"):
        assert rates[-1] == pytest.approx(1e-3, rel=0.05)


def test_no_warm_up_begins_at_the_base_rate():
    rates = curve(ScheduleConfig(epochs=4, warmup_epochs=0, min_lr=0.1), 5)
    assert rates[0] == 1.0
    assert rates[-1] == pytest.approx(0.1)


def test_single_update_does_not_divide_by_zero():
    assert curve(ScheduleConfig(epochs=1, warmup_epochs=0), 1) == [1.0]


def test_unknown_schedules_and_options_are_refused():
    with pytest.raises(ValueError, match=r"schedule\.name is 'cosin', but it must be one of cosine"):
        curve(ScheduleConfig(name="cosin"), 3)
    with pytest.raises(ValueError, match=r"schedule\.options holds k_decai; valid are .*k_decay"):
        curve(ScheduleConfig(options={"k_decai": 1}), 3)
    with pytest.raises(ValueError, match=r"schedule\.options holds num_epochs"):
        curve(ScheduleConfig(options={"num_epochs": 1}), 3)


def test_unknown_optimizers_and_options_are_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"optimizer\.name adamv cannot be made"):
        create_optimizer(model, OptimizerConfig(name="adamv"))
    with pytest.raises(ValueError, match=r"optimizer\.options .*'betaz'"):
        create_optimizer(model, OptimizerConfig(options={"betaz": [0.9, 0.98]}))
    with pytest.raises(ValueError, match=r"optimizer\.options holds lr"):
        create_optimizer(model, OptimizerConfig(options={"lr": 1}))


def test_learned_frequencies_have_no_weight_decay_and_their_full_rate():
    """Failure class 12: timm's layer decay and weight decay, with the names that the model gives."""
    import vision_rope

    options = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 2}
    model = vision_rope.create_model("vit_small_patch16_224", position="rope-vit-mixed", **options)
    learned = {name: parameter for name, parameter in model.named_parameters() if name.endswith("frequencies")}
    assert learned
    for layer_decay in (None, 0.5):
        optimizer = create_optimizer(model, OptimizerConfig(weight_decay=0.1, layer_decay=layer_decay))
        for parameter in learned.values():
            groups = [group for group in optimizer.param_groups if any(parameter is other for other in group["params"])]
            assert [group["weight_decay"] for group in groups] == [0.0]
            assert [group.get("lr_scale", 1.0) for group in groups] == [1.0]
        matrices = [group for group in optimizer.param_groups if group["weight_decay"] == 0.1]
        assert matrices


def soft(labels: torch.Tensor, num_classes: int, smoothing: float) -> torch.Tensor:
    return F.one_hot(labels, num_classes).float() * (1 - smoothing) + smoothing / num_classes


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_against_their_formulas(smoothing):
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    targets = soft(labels, 5, smoothing)
    cross = -(targets * logits.log_softmax(1)).sum(1).mean()
    binary = -(targets * F.logsigmoid(logits) + (1 - targets) * F.logsigmoid(-logits)).mean()
    for name, expected in (("cross-entropy", cross), ("binary-cross-entropy", binary)):
        loss = create_loss(name, smoothing, 5)
        torch.testing.assert_close(loss(logits, labels), expected)
        torch.testing.assert_close(loss(logits, targets), expected, msg="soft targets are not smoothed twice")


@pytest.mark.parametrize("name", ["cross-entropy", "binary-cross-entropy"])
def test_losses_are_computed_in_float32(name):
    logits, labels = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 4, 0])
    loss = create_loss(name, 0.1, 5)
    with torch.autocast("cpu", torch.bfloat16):
        low = loss(logits.bfloat16(), labels)
    assert low.dtype == torch.float32
    assert low == loss(logits.bfloat16().float(), labels)


def test_losses_refuse_what_they_cannot_mean():
    with pytest.raises(ValueError, match="loss name is 'mse'"):
        create_loss("mse", 0.0, 5)
    with pytest.raises(ValueError, match="label_smoothing is 1"):
        create_loss("cross-entropy", 1.0, 5)
    with pytest.raises(ValueError, match=r"\(6, 4\), but \(batch, 5 classes\)"):
        create_loss("cross-entropy", 0.0, 5)(torch.randn(6, 4), torch.zeros(6, dtype=torch.long))
