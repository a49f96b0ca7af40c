"""Classifiers of fixed features: nearest neighbours that vote, and a linear one fitted to its optimum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Strengths of L2 that the linear probe chooses from, strongest first: each fit begins with the one before.
L2_STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
# Every fifth image of a class is held out for that choice.
HELD_OUT = 5
MAX_ITERATIONS = 1000
# Numbers in an intermediate matrix (256 MiB in float64); a larger one is made in parts.
PART = 2**25


@dataclass(frozen=True)
class LinearProbe:
    """A linear classifier of standardised features.

    Attributes:
        mean: (dim,), taken off the features.
        scale: (dim,), what they are then multiplied by; 0 for a feature that never changes.
        weight: (classes, dim).
        bias: (classes,).
        l2: the strength of L2 that it was fitted with.
        gradient: largest entry of the objective's gradient at this answer; 0 is the optimum.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor
    l2: float
    gradient: float

    def __call__(self, features: Tensor) -> Tensor:
        """Shapes: features (images, dim) -> logits (images, classes)."""
        return F.linear((features.to(self.mean.dtype) - self.mean) * self.scale, self.weight, self.bias)


def knn_votes(
    train: Tensor, train_labels: Tensor, images: Tensor, num_classes: int, *, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Each class's share of the votes of an image's k nearest neighbours, weighted by exp(similarity / temperature).

    Shapes: train (n, dim), train_labels (n,), images (m, dim) -> (m, num_classes); rows add up to 1.
    Raises: ValueError where k is larger than n.
    Source: Wu et al. 2018, arXiv 1805.01978; as in DINO, arXiv 2104.14294.
    """
    check_neighbours(k, temperature)
    if k > len(train):
        raise ValueError(f"k is {k}, but there are only {len(train)} training images; give fewer neighbours")
    train = F.normalize(train, dim=1)
    shares = []
    for part in F.normalize(images, dim=1).split(max(PART // len(train), 1)):
        similarities, places = (part @ train.T).topk(k, dim=1)
        # softmax is these weights divided by their sum, without the overflow of exp at low temperatures.
        votes = (similarities / temperature).softmax(dim=1)
        shares.append(votes.new_zeros(len(part), num_classes).scatter_add_(1, train_labels[places], votes))
    return torch.cat(shares)


def fit_linear(
    features: Tensor, labels: Tensor, num_classes: int, *, l2: float, start: LinearProbe | None = None
) -> LinearProbe:
    """Minimise mean cross entropy + l2 / 2 * |weight|^2 over standardised features with L-BFGS on all images at once.

    It computes in float64 (on MPS, which has none, in float32), a part of the images at a time.

    Args:
        l2: strength of L2; the bias has none.
        start: an answer that is near, to begin with. The objective is convex, so that it changes the time alone; a
            weak l2 without one may need more steps than MAX_ITERATIONS on separable classes, which `gradient` shows.

    Shapes: features (images, dim), labels (images,)
    Raises: ValueError where l2 is not positive.
    """
    if not l2 > 0:
        raise ValueError(f"l2 is {l2}, but it must be positive: without it separable classes have no optimum")
    device, dtype = features.device, torch.float32 if features.device.type == "mps" else torch.float64
    variance, mean = (part.to(dtype) for part in torch.var_mean(features, dim=0, correction=0))
    deviation = variance.sqrt()
    # What only rounding changes is a constant, and dividing by its deviation would make noise of it.
    scale = torch.where(deviation <= 1e-6 * mean.abs(), 0.0, 1 / deviation)
    rows = max(PART // max(num_classes, features.shape[1]), 1)

    def standardised() -> Iterator[tuple[Tensor, Tensor]]:
        for part, its_labels in zip(features.split(rows), labels.split(rows), strict=True):
            yield (part.to(dtype) - mean) * scale, its_labels

    def objective(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The value and its gradients for weight and bias."""
        value, weight_gradient, bias_gradient = l2 / 2 * weight.square().sum(), l2 * weight, torch.zeros_like(bias)
        for part, its_labels in standardised():
            log_probabilities = F.linear(part, weight, bias).log_softmax(dim=1)
            value = value + F.nll_loss(log_probabilities, its_labels, reduction="sum") / len(features)
            excess = log_probabilities.exp() / len(features)
            excess[torch.arange(len(part), device=device), its_labels] -= 1 / len(features)
            weight_gradient = weight_gradient + excess.T @ part
            bias_gradient = bias_gradient + excess.sum(dim=0)
        return value, weight_gradient, bias_gradient

    weight = torch.zeros(num_classes, features.shape[1], dtype=dtype, device=device) if start is None else start.weight
    bias = torch.zeros(num_classes, dtype=dtype, device=device) if start is None else start.bias
    # Features are correlated, which costs L-BFGS hundreds of steps. In coordinates in which the curvature, about
    # mean of p (1 - p) * covariance + l2, is the unit matrix, it needs tens.
    covariance = torch.zeros(2 * features.shape[1:], dtype=dtype, device=device)
    doubt = torch.zeros((), dtype=dtype, device=device)
    for part, _ in standardised():
        covariance += part.T @ part / len(features)
        probabilities = F.linear(part, weight, bias).softmax(dim=1)
        doubt += (probabilities * (1 - probabilities)).mean(dim=1).sum() / len(features)
    variances, directions = (found.to(device) for found in torch.linalg.eigh(covariance.cpu()))
    root = (doubt * variances.clamp(min=0) + l2).sqrt()
    bias_root = doubt.clamp(min=l2).sqrt()
    turn = (directions / root).T
    turned, scaled = weight @ directions * root, bias * bias_root

    def turned_objective() -> Tensor:
        value, weight_gradient, bias_gradient = objective(turned @ turn, scaled / bias_root)
        turned.grad, scaled.grad = weight_gradient @ turn.T, bias_gradient / bias_root
        return value

    optimizer = torch.optim.LBFGS(
        [turned, scaled],
        max_iter=MAX_ITERATIONS,
        history_size=20,
        tolerance_grad=1e-8,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(turned_objective)
    weight, bias = turned @ turn, scaled / bias_root
    gradient = max(float(part.abs().max()) for part in objective(weight, bias)[1:])
    return LinearProbe(mean, scale, weight, bias, l2, gradient)


def fit_best(features: Tensor, labels: Tensor, num_classes: int, *, seed: int = 0) -> LinearProbe:
    """Fit with the strength of L2_STRENGTHS that gives held-out images, every fifth of a class, the best likelihood.

    Args:
        seed: of what is held out for the choice; the answer is fitted to all images.

    Raises: ValueError where no class has two images, of which one could be held out.
    """
    held_out = _hold_out(labels, seed)
    if not bool(held_out.any()):
        raise ValueError(
            "no class has two training images, so that none can be held out to choose the strength of L2; give more "
            "images"
        )
    kept, judge = (features[~held_out], labels[~held_out]), (features[held_out], labels[held_out])
    fits: list[LinearProbe] = []
    for l2 in L2_STRENGTHS:
        fits.append(fit_linear(*kept, num_classes, l2=l2, start=fits[-1] if fits else None))
    best = min(fits, key=lambda fit: float(F.cross_entropy(fit(judge[0]), judge[1])))
    return fit_linear(features, labels, num_classes, l2=best.l2, start=best)


def check_neighbours(k: int, temperature: float) -> None:
    if k < 1:
        raise ValueError(f"k is {k}, but at least 1 neighbour must vote")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, but it must be positive")


def _hold_out(labels: Tensor, seed: int) -> Tensor:
    """True for every fifth image of a class in a random order, beginning with the second."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[labels.cpu()[order].argsort(stable=True)]
    counts = labels.cpu().bincount()
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[by_class] = rank % HELD_OUT == 1
    return chosen.to(labels.device)
