"""Random numbers that belong to one sample and leave the process's own generators alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive_seed(*numbers: int) -> int:
    """Derive one seed from whole numbers that are not negative, for instance (seed, epoch, index); it fits int64."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_generators(seed: int) -> None:
    """Seed the CPU generators of torch, Python and NumPy."""
    # Not torch.manual_seed: it would seed every CUDA device too.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Give the CPU generators of torch, Python and NumPy the state back that they had before."""
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def isolated_randomness(seed: int) -> Iterator[None]:
    """Seed the CPU generators of torch, Python and NumPy inside; afterwards they are as they were before."""
    with preserved_randomness():
        seed_generators(seed)
        yield
