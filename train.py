"""Train a vision transformer with a position encoding of your choice, then evaluate it at sizes it never saw.

    python train.py --config configs/default.yaml
    python train.py --config configs/default.yaml --model.position rope-vit-mixed --run.output runs/mixed
    python train.py --run.resume true --run.output runs/mixed
    torchrun --nproc-per-node 8 train.py --config configs/imagenet1k_vit_small_rope_mixed.yaml
    python train.py --help

A run folder holds config.yaml (complete, can be run again), metrics.csv and metrics.jsonl (a row an epoch),
log.txt, tensorboard/, best.safetensors, last/ (to resume from) and evaluation/ (the sweep over sizes).
"""

from __future__ import annotations

import sys

from vision_rope.trainer import main

if __name__ == "__main__":
    sys.exit(main())
