"""Train a positioned model: `Trainer` holds a run, `train` does a whole one, `main` is the command."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vision_rope import checkpoint, weight_metadata
from vision_rope.config import TrainConfig, load_config, to_yaml
from vision_rope.optimization import create_optimizer, create_schedule
from vision_rope.parallel import Distributed, choose_device, choose_precision, distributed
from vision_rope.points import Point, format_point
from vision_rope.preparation import build_start, check_sweep, create_loaders, divisor_of
from vision_rope.progress import show_progress, summarise
from vision_rope.results import describe_clip_counts
from vision_rope.rules import check_config
from vision_rope.run_folder import Row, RunFolder, check_output, default_output
from vision_rope.sizes import format_size, pixel_size, training_sizes
from vision_rope.tasks import create_task

# Steps between looks at whether the loss is finite, which wait for the device.
CHECK_EVERY = {"cpu": 1, "cuda": 50, "mps": 50}


class TrainingDiverged(RuntimeError):
    """The loss or the logits stopped being finite; the state after the last whole epoch is kept."""


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        folder: the run folder.
        rows: the numbers of every epoch, as in metrics.jsonl.
        best: the row of the epoch that best.safetensors is from.
        figure: the picture of the sweep over sizes, where there was one.
    """

    folder: Path
    rows: list[Row]
    best: Row
    figure: Path | None = None


def train(config: TrainConfig) -> RunResult:
    """Train, keep the best weights and evaluate them at `evaluation.sizes`; under torchrun, in all processes.

    Raises:
        ValueError: before the first step, for anything in the configuration that cannot work.
        TrainingDiverged: when the loss is no longer finite.
    """
    with distributed(config.run.device) as world:
        if config.run.output is None:
            config = replace(config, run=replace(config.run, output=world.share(default_output())))
        trainer = Trainer(config, world)
        result = trainer.fit()
        if config.evaluation.sizes:
            result = replace(result, figure=trainer.evaluate_sizes())
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `train.py`; a mistake of the user is one sentence on stderr and an exit status of 2."""
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        result = train(config)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingDiverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(
            "interrupted; --run.resume true --run.output FOLDER goes on after the last whole epoch",
            file=sys.stderr,
        )
        return 130
    print(f"run folder: {result.folder}")
    return 0


class Trainer:
    """A run: everything is built and checked at creation, `fit` trains.

    Raises:
        ValueError: at creation, for anything in the configuration that cannot work.
    """

    def __init__(self, config: TrainConfig, world: Distributed | None = None) -> None:
        from timm.utils import ModelEmaV3

        world = world or Distributed(choose_device(config.run.device))
        if config.run.output is None:
            config = replace(config, run=replace(config.run, output=default_output()))
        check_config(config)
        check_output(config)
        self.config, self.world = config, world
        self.dtype = choose_precision(config.run.precision, world.device)
        self.folder = RunFolder(config, is_main=world.is_main)

        self.classes, self.train_loader, self.val_loader = create_loaders(config, world)
        if world.is_main:
            self.train_loader.report = self.val_loader.report = self.folder.log
        seed_everything(config.seed)
        self.model = build_start(config, len(self.classes)).to(world.device)
        check_sweep(config, self.model)
        self.optimizer = create_optimizer(self.model, config.optimizer)
        self.updates_per_epoch = -(-len(self.train_loader) // config.optimizer.accumulate)
        self.schedule = create_schedule(
            self.optimizer, config.schedule, lr=config.optimizer.lr, updates_per_epoch=self.updates_per_epoch
        )
        self.task = create_task(config, len(self.classes), divisor_of(self.model))
        self.sizes = training_sizes(config.data)
        self.noun = "images" if config.video.num_frames is None else "clips"
        # Without the warm-up of the decay a short run's average would still hold its random first weights.
        self.ema = ModelEmaV3(self.model, decay=config.ema_decay, use_warmup=True) if config.ema_decay else None
        self.epoch = self.updates = 0
        self.best: Row = {}
        self.validated = False
        if config.run.resume:
            self._load()
        if config.run.grad_checkpointing:
            self.model.set_grad_checkpointing(True)  # type: ignore[operator]
        if config.run.compile:
            # In place: the names of the parameters stay as they are.
            self.model.compile()
        # Each kind of prompt goes through layers of its own.
        self.wrapped = world.wrap(self.model, find_unused=config.task == "segmentation")
        self._first_bad = torch.full((), -1, device=world.device)

    def fit(self) -> RunResult:
        """Train the epochs that are left."""
        epochs = self.config.schedule.epochs
        self.world.barrier()
        self.folder.prepare(self.epoch)
        self.world.barrier()
        try:
            if self.epoch >= epochs:
                self.folder.log(f"the run in {self.folder.path} is finished: all {epochs} epochs are trained")
            else:
                self.folder.log(self._describe())
            for epoch in range(self.epoch, epochs):
                row = self._train_epoch(epoch)
                if (epoch + 1) % self.config.evaluation.every == 0 or epoch + 1 == epochs:
                    row |= self._validate(epoch)
                self._keep(epoch, row)
        finally:
            self.folder.close()
        self.world.barrier()
        return RunResult(self.folder.path, self.folder.rows, self.best)

    def _train_epoch(self, epoch: int) -> Row:
        from vision_rope.data.randomness import derive_seed

        loader, accumulate = self.train_loader, self.config.optimizer.accumulate
        loader.set_epoch(epoch)
        self.model.train()
        # loss, right answers and images so far; read only now and then, since reading waits for the device
        has_hits = False
        precise = torch.float32 if self.world.device.type == "mps" else torch.float64
        totals = torch.zeros(3, dtype=precise, device=self.world.device)
        start = time.perf_counter()
        check_every = CHECK_EVERY.get(self.world.device.type, 50)
        lr = 0.0
        places: dict[int, Tensor] = {}
        batches = show_progress(
            loader,
            totals,
            epoch=epoch,
            epochs=self.config.schedule.epochs,
            num_processes=self.world.world_size,
            with_accuracy=self.config.task == "classification",
            noun=self.noun,
            enabled=self.world.is_main and self.config.run.progress,
        )
        for index, (images, labels, places[index]) in enumerate(batches):
            if index == 0:
                # An epoch's random numbers follow from the seed and its own number, so that a resumed run draws
                # what the unbroken one would have; set here because a starting loader draws numbers itself.
                seed_everything(self.config.seed, self.world.rank, epoch)
            images = self._resize(images, derive_seed(self.config.seed, epoch, index))
            batch = self.task.train_batch(images, labels, derive_seed(self.config.seed, epoch, index, self.world.rank))
            group = min(accumulate, len(loader) - index // accumulate * accumulate)
            is_update = (index + 1) % accumulate == 0 or index + 1 == len(loader)
            with self._gradients_stay_local(not is_update):
                with self._autocast():
                    outputs = self.wrapped(*batch.inputs)
                loss = self.task.loss(outputs, batch.targets)
                (loss / group).backward()
            with torch.no_grad():
                hits = self.task.count_hits(outputs, batch.targets)
                has_hits = hits is not None
                totals[0] += loss.detach().to(precise) * len(labels)
                totals[1] += 0 if hits is None else hits
                totals[2] += len(labels)
                self._first_bad = torch.where(~loss.isfinite() & (self._first_bad < 0), index, self._first_bad)
            lr = self._lr()
            if (index + 1) % check_every == 0 or index + 1 == len(loader):
                self._check_finite(epoch, lr, places)
                places.clear()
            if is_update:
                self._update()
        loss_sum, hit_sum, images_seen = self.world.sum(totals).tolist()
        seconds = time.perf_counter() - start
        return {
            "epoch": epoch + 1,
            "lr": lr,
            "train_loss": loss_sum / images_seen,
            **({"train_top1": hit_sum / images_seen} if has_hits else {}),
            "images_per_second": images_seen / seconds,
            "seconds": seconds,
        }

    def _resize(self, images: Any, seed: int) -> Any:
        """Give a batch one of the training sizes, the same on all ranks."""
        from vision_rope.data import resize_batch

        return resize_batch(images, self.sizes[seed % len(self.sizes)], self.config.data.interpolation)

    def _update(self) -> None:
        if self.config.optimizer.clip_grad is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        if self.ema is not None:
            self.ema.update(self.model, step=self.updates)
        self.schedule.step_update(self.updates)

    def _lr(self) -> float:
        """The learning rate of the next update, of the topmost layer under layer decay."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def _check_finite(self, epoch: int, lr: float, places: dict[int, Tensor]) -> None:
        bad = self._first_bad.clone()
        if self.world.world_size > 1:
            torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX)
        step = int(bad)
        if step >= 0:
            data = self.train_loader.dataset
            files = [data.path(place) for place in places[step].tolist() if place >= 0]  # type: ignore[union-attr]
            batch = f"; its batch: {', '.join(files[:8])}{' ...' if len(files) > 8 else ''}" if files else ""
            raise self._diverged(f"the loss of epoch {epoch + 1}, step {step + 1}, is not finite", lr, batch)

    def _diverged(self, what: str, lr: float, batch: str = "") -> TrainingDiverged:
        kept = f"the state after epoch {self.epoch} is kept in {self.folder.path / 'last'}" if self.epoch else ""
        advice = "a lower optimizer.lr, a longer warm-up or optimizer.clip_grad usually helps"
        message = "; ".join(part for part in (f"{what} (learning rate {lr:.3g})", kept, advice) if part) + batch
        self.folder.log(message)
        return TrainingDiverged(message)

    def evaluate_sizes(self) -> Path | None:
        """Sweep the best weights over `evaluation.sizes`; prints the table and returns the figure's path."""
        from vision_rope.evaluate import evaluate
        from vision_rope.results import format_table

        run = self.config.run
        rows, files = evaluate(
            self.folder.path,
            num_workers=run.num_workers,
            device=run.device,
            precision=run.precision,
            progress=run.progress,
            report=self.folder.log,
        )
        self.folder.log(format_table(rows))
        figures = [path for path in files if path.suffix == ".png"]
        self.folder.log("\n".join(f"figure: {path}" for path in figures))
        return figures[0] if figures else None

    def _validate(self, epoch: int) -> Row:
        from vision_rope.measure import Meter
        from vision_rope.sweep import ClipCounts

        video, clips = self.config.video, self.val_loader.dataset
        counts = None if video.num_frames is None else ClipCounts(len(clips), video.num_frames, video.fps)
        model = self.model if self.ema is None else self.ema.module
        precision = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        meter = Meter(self.task, self.world.device, precision)
        try:
            meter.run(model, self.val_loader if counts is None else counts.watch(self.val_loader))
            row = meter.result()
        except ValueError as error:
            if "not finite" not in str(error):
                raise
            raise self._diverged(f"validation after epoch {epoch + 1} failed: {error}", self._lr()) from error
        if counts is not None and not self.validated:
            point = Point(pixel_size(self.config.data.size), video.num_frames, video.fps)
            told = {**point.describe((video.tubelet, 1, 1)), **counts.complete(row)}
            for sentence in describe_clip_counts([told]):
                self.folder.log(f"validation: {sentence}")
        self.validated = True
        if self.world.is_main and meter.first is not None and self.task.pictures is not None:
            picture = self.folder.path / self.task.pictures / f"epoch-{epoch + 1:04d}.png"
            self.task.draw(meter.first[0], {"predicted": meter.first[1]}, picture)
        return {f"val_{key}": row[key] for key in row if key not in ("images_per_second", "peak_memory_mb")}

    def _score(self, row: Row) -> tuple[float, ...]:
        """What the best epoch has most of; an epoch without validation has nothing of it."""
        figures = {key.removeprefix("val_"): value for key, value in row.items() if key.startswith("val_")}
        return self.task.score(figures) if figures else (-np.inf,)

    def _keep(self, epoch: int, row: Row) -> None:
        """Write what an epoch came to: best.safetensors where it is the best, its row, last/ at the end."""
        # The last update of an epoch has no loss after it that would show what it did.
        if not torch.stack([parameter.isfinite().all() for parameter in self.model.parameters()]).all():
            raise self._diverged(f"the weights after epoch {epoch + 1} are not finite", self._lr())
        self.epoch = epoch + 1
        is_best = self._score(row) > self._score(self.best)
        if is_best:
            self.best = row
        if self.world.is_main:
            metadata = {
                **weight_metadata.describe_position(self.model),
                "config": to_yaml(self.config),
                "classes": self.classes,
                "epoch": self.epoch,
                "metrics": row,
            }
            ema = None if self.ema is None else self.ema.module.state_dict()
            weights = self.model.state_dict()
            if is_best:
                path = self.folder.path / "best.safetensors"
                checkpoint.save_weights(path, weights if ema is None else ema, metadata)
            self.folder.add_row(row)
            state = {"epoch": self.epoch, "updates": self.updates, "best": self.best}
            state["optimizer"] = self.optimizer.state_dict()
            checkpoint.save_last(self.folder.path, state, weights=weights, ema=ema, metadata=metadata)
        else:
            self.folder.add_row(row)
        self.folder.log(summarise(row, self.config.schedule.epochs, is_best, self.task.headline, self.noun))

    def _load(self) -> None:
        """Go on from last/; the schedule is a function of the number of updates, the optimizer keeps its last value."""
        last = checkpoint.find_last(self.folder.path)
        assert last is not None, "check_output has looked for it"
        state = checkpoint.load_state(last / "state.pt")
        weights, metadata = checkpoint.load_weights(last / "model.safetensors")
        weight_metadata.check_pairing(self.model, metadata, last / "model.safetensors")
        checkpoint.load_strictly(self.model, weights, last)
        if self.ema is not None:
            averaged, metadata = checkpoint.load_weights(last / "ema.safetensors")
            weight_metadata.check_pairing(self.model, metadata, last / "ema.safetensors")
            checkpoint.load_strictly(self.ema.module, averaged, last)
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.updates, self.best = state["epoch"], state["updates"], state["best"]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _gradients_stay_local(self, local: bool) -> Any:
        is_parallel = isinstance(self.wrapped, nn.parallel.DistributedDataParallel)
        return self.wrapped.no_sync() if local and is_parallel else nullcontext()  # type: ignore[operator]

    def _describe_data(self) -> str:
        data, masked = self.config.data, self.config.masked
        size = format_size(pixel_size(data.size))
        sizes = f"{', '.join(data.train_sizes)} px at random" if data.train_sizes else f"{size} px"
        sizes = format_point(sizes, self.config.video.num_frames, self.config.video.fps)
        if self.config.task == "masked":
            return f"{masked.ratio:.0%} of the patches hidden, {sizes}"
        if self.config.task == "segmentation":
            return f"up to {self.config.objects.num_objects} objects, {sizes}"
        return f"{len(self.classes)} classes, {sizes}"

    def _describe(self) -> str:
        config = self.config
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        start = f"from epoch {self.epoch + 1} on" if self.epoch else ""
        licence = f" (licence {self.train_loader.dataset.licence})" if self.train_loader.dataset.licence else ""
        origin = f" from {config.model.checkpoint}" if config.model.checkpoint else ""
        parts = [
            f"{config.model.name} with {config.model.position}{origin}, {parameters / 1e6:.2f} M parameters",
            f"{config.data.source}{licence}, {self._describe_data()}",
            f"{config.schedule.epochs} epochs of {len(self.train_loader)} steps {start}".rstrip(),
            f"{self.world.device} x {self.world.world_size}, {str(self.dtype).removeprefix('torch.')}",
        ]
        return "; ".join(parts)


def seed_everything(*parts: int) -> None:
    """Seed torch, numpy and Python by numbers, so that different numbers give unrelated streams."""
    from vision_rope.data.randomness import derive_seed

    seed = derive_seed(*parts)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
