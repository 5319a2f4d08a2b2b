"""Tokens, routing and experts. Nothing here communicates: one process and many ranks use the same functions.

The bits of a token's result do not depend on which other tokens are in the batch. That rules out BLAS: a
matrix product chooses its kernel, and with it the order of the sums, by the number of rows. It also rules out
vectorized ``tanh`` and similar functions, which may round the last elements of an array differently from the others.
What remains are additions, multiplications and divisions of single elements in a fixed order, which
IEEE 754 rounds to one result everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

EXPERTS = 8
CLASSES = 10
_SEED = 20240  # the seed of expert 0; expert e has the e-th seed after it


def load_tokens() -> tuple[Floats, Ints]:
    """Returns the 1,797 digits of 8 x 8 pixels that scikit-learn ships, sorted by class.

    Returns:
        Tokens of shape [1797, 64] with values 0 to 16, and their classes 0 to 9 of shape [1797].
    """
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    order = np.argsort(classes, kind="stable")
    return pixels[order].astype(np.float32), classes[order].astype(np.int64)


def classes_of(rank: int, size: int) -> range:
    """Returns the classes whose tokens a rank starts with: neighbours, split evenly; none if ranks are many."""
    return range(-(-rank * CLASSES // size), -(-(rank + 1) * CLASSES // size))


def experts_of(rank: int, size: int) -> range:
    """Returns the experts that a rank owns: neighbouring experts, split evenly."""
    return range(-(-rank * EXPERTS // size), -(-(rank + 1) * EXPERTS // size))


def find_centroids(tokens: Floats) -> npt.NDArray[np.float64]:
    """Runs k-means (Lloyd's algorithm) from 8 evenly spaced tokens; returns centroids of shape [8, 64].

    Centroids are numbered by their first token, so that neighbouring tokens tend to have neighbouring centroids.
    """
    x = tokens.astype(np.float64)
    centroids = x[(2 * np.arange(EXPERTS) + 1) * len(x) // (2 * EXPERTS)]
    nearest = route(tokens, centroids)
    while True:
        centroids = np.stack([x[nearest == expert].mean(axis=0) for expert in range(EXPERTS)])
        before, nearest = nearest, route(tokens, centroids)
        if np.array_equal(before, nearest):
            first = [int(np.argmax(nearest == expert)) for expert in range(EXPERTS)]
            return centroids[np.argsort(first)]


def route(tokens: Floats, centroids: npt.NDArray[np.float64]) -> Ints:
    """Returns the expert of every token, which is the nearest centroid; shape [n]."""
    distance = np.zeros((len(tokens), len(centroids)))
    for pixel in range(tokens.shape[1]):
        distance += (tokens[:, pixel, None] - centroids[:, pixel]) ** 2
    nearest: Ints = distance.argmin(axis=1).astype(np.int64)
    return nearest


def apply_expert(expert: int, tokens: Floats) -> Floats:
    """Applies a fixed layer with random float32 weights and then s / (1 + |s|); shapes [n, 64] -> [n, 64]."""
    random = np.random.default_rng(_SEED + expert)
    width = tokens.shape[1]
    weights = random.standard_normal((width, width), np.float32)
    total = np.repeat(random.standard_normal((1, width), np.float32), len(tokens), axis=0)
    for pixel in range(width):
        total += tokens[:, pixel, None] * weights[pixel]
    total /= 1 + np.abs(total)
    return total


def apply_experts(tokens: Floats, expert_of_token: Ints) -> Floats:
    """Runs every token through its expert: the whole job in one process. Shapes [n, 64], [n] -> [n, 64]."""
    result = np.empty_like(tokens)
    for expert in np.unique(expert_of_token):
        rows = expert_of_token == expert
        result[rows] = apply_expert(int(expert), tokens[rows])
    return result


def differing_rows(result: npt.NDArray[Any], expected: npt.NDArray[Any]) -> Ints:
    """Returns the rows of dimension 0 in which any bit differs: ``-0.0`` is not ``0.0``, and NaN equals itself.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        raise ValueError(f"result is {result.dtype} {result.shape}, expected {expected.dtype} {expected.shape}")
    bits = [np.ascontiguousarray(array).view(np.uint8) for array in (result, expected)]
    return np.flatnonzero((bits[0] != bits[1]).any(axis=tuple(range(1, result.ndim))))
