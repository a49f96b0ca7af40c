"""One process or many: device, ranks, distributed data parallel (DDP) and fully sharded (FSDP2) models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Distributed:
    """This process among those of the run.

    Attributes:
        device: where this process computes.
        rank: number of this process, 0 for the one that writes files.
        world_size: number of processes.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.world_size > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor over all processes."""
        if self.world_size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def share(self, value: Any) -> Any:
        """Give every process the value that the main one has."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def wrap(self, model: nn.Module, *, find_unused: bool = False) -> nn.Module:
        """Average the gradients over all processes with DDP; a single process gets its model back.

        Args:
            find_unused: look in every step for parameters that have no part in it, as of a model that batches with
                different inputs lead through different layers.
        """
        if self.world_size == 1:
            return model
        ids = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, find_unused_parameters=find_unused)


@contextmanager
def distributed(device: str = "auto") -> Iterator[Distributed]:
    """Join the processes that torchrun started, or stand alone; leave them at the end.

    Args:
        device: auto (CUDA, then MPS, then CPU) or a device such as cpu, cuda, cuda:1, mps.

    Raises:
        ValueError: for a device that is not there.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if world_size == 1:
        yield Distributed(choose_device(device))
        return
    chosen = choose_device(device, local_rank=int(os.environ["LOCAL_RANK"]))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Distributed(chosen, rank=dist.get_rank(), world_size=dist.get_world_size())
    finally:
        if started_here:
            dist.destroy_process_group()


def choose_device(name: str, *, local_rank: int | None = None) -> torch.device:
    """Turn auto, cpu, cuda, cuda:1 or mps into a device that is there; every local rank gets its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        if name == "mps" and local_rank is not None:
            name = "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device is {name!r}, but it must be auto, cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda":
        if local_rank is not None and device.index is not None:
            raise ValueError(f"device is {name!r}, but under torchrun every process takes its own; give cuda or auto")
        device = torch.device("cuda", local_rank if local_rank is not None else device.index or 0)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.index >= count:
            raise ValueError(f"device is {str(device)!r}, but this machine has {count} CUDA devices that torch can use")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device is 'mps', but torch finds no such device here; give cpu or auto")
    return device


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Turn auto, fp32 or bf16 into a dtype; auto is bf16 only on a CUDA device that computes it natively.

    CPUs without bf16 units run bf16 matrix products about 80 times slower than float32.
    """
    if name == "auto":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    if name not in ("fp32", "bf16"):
        raise ValueError(f"precision is {name!r}, but it must be auto, fp32 or bf16")
    return torch.bfloat16 if name == "bf16" else torch.float32


def shard(model: nn.Module, *, param_dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Shard a positioned timm model over all processes with FSDP2, a block at a time, in place.

    Learned frequencies are a group of their own that stays float32: bf16 holds 8 bits, too few for an angle of
    many radians. Create the optimizer after this call.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    from vision_rope.rope import Rope

    low = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    # A block's tokens have the low dtype already; its rotation is to stay as it is.
    block_policy = replace(low, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    ropes = [part for part in model.modules() if isinstance(part, Rope) and any(True for _ in part.parameters())]
    for rope in ropes:
        fully_shard(rope, mp_policy=exact)
        # FSDP gathers parameters around forward() alone; the model calls this method instead.
        for method in ("rotations", "grid_rotations"):
            register_fsdp_forward_method(rope, method)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=block_policy)
    fully_shard(model, mp_policy=replace(low, cast_forward_inputs=False))
    # Images and clips alone: seconds of frames are to stay as they are.
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(param_dtype), *inputs[1:]))
    return model
