"""Optimizers and learning-rate schedules by their names in timm."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer

from vision_rope.config import OptimizerConfig, ScheduleConfig

SCHEDULES = ("cosine", "poly", "tanh", "wsd", "rsqrt", "step", "multistep", "constant")


def create_optimizer(model: nn.Module, section: OptimizerConfig) -> Optimizer:
    """Create timm's optimizer of that name; the model's `no_weight_decay` names are left out of weight decay.

    Raises:
        ValueError: for a name or an option that timm does not know.
    """
    from timm.optim import create_optimizer_v2

    if own := {"opt", "lr", "weight_decay", "layer_decay"} & set(section.options):
        raise ValueError(f"optimizer.options holds {', '.join(sorted(own))}, which have keys of their own")
    try:
        return create_optimizer_v2(
            model,
            opt=section.name,
            lr=section.lr,
            weight_decay=section.weight_decay,
            layer_decay=section.layer_decay,
            **section.options,
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f"optimizer.name {section.name} cannot be made with optimizer.options {section.options}: {error}"
        ) from error


def create_schedule(optimizer: Optimizer, section: ScheduleConfig, *, lr: float, updates_per_epoch: int) -> Any:
    """Create timm's schedule of that name; `schedule.step_update(updates so far)` sets the rate of the next one.

    The first update has `warmup_lr`, the first one after the warm-up has `lr` itself, and the last one of a
    decaying schedule has `min_lr`: the decay begins where the warm-up ends (timm's default begins it at the first
    update).

    Raises:
        ValueError: for a name or an option that timm does not know.
    """
    from timm.scheduler import create_scheduler_v2

    if section.name not in SCHEDULES:
        raise ValueError(f"schedule.name is {section.name!r}, but it must be one of {', '.join(SCHEDULES)}")
    own = {"sched", "num_epochs", "warmup_epochs", "warmup_lr", "warmup_prefix", "min_lr", "step_on_epochs"}
    known = set(inspect.signature(create_scheduler_v2).parameters) - own - {"optimizer", "updates_per_epoch"}
    if unknown := set(section.options) - known:
        raise ValueError(f"schedule.options holds {', '.join(sorted(unknown))}; valid are {', '.join(sorted(known))}")
    warmup_updates = round(section.warmup_epochs * updates_per_epoch)
    decay_updates = section.epochs * updates_per_epoch - warmup_updates
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=section.name,
        # One update less: the last update, not the one after it, is to have min_lr.
        num_epochs=max(decay_updates - 1, 1) / updates_per_epoch,
        warmup_epochs=warmup_updates / updates_per_epoch,
        warmup_lr=section.warmup_lr,
        warmup_prefix=True,
        min_lr=section.min_lr,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
        **section.options,
    )
    schedule.step_update(0)
    return schedule
