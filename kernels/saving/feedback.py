"""Quantization that makes up for the errors of a matrix's first inputs in what it stores for the others.

What counts is the error of products, the sum of E H E^T over outputs, where E are the errors of weights and H = X^T X
of inputs X. With H = (U + I) D (U + I)^T, U strictly upper triangular and D diagonal, it is the sum over inputs k of
D_k |E_k + sum_{i<k} E_i U_ik|^2: the weights of an input are rounded after the errors before them have been added. This
is GPTQ (https://arxiv.org/abs/2210.17323) in the form of LDLQ (https://arxiv.org/abs/2307.13304), without an inverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.saving.fit import Fitted, Floats, fit

_DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to all of it, so that errors never seen in X count a little too."""

_SHRINKAGE = 0.5
"""Part of H that is taken from what is off its diagonal: correlations of a few thousand tokens are partly those of the
text alone. With none taken, a text of another kind makes products worse than importance does; 0.3 to 0.6 are best.
"""

_MOST_INPUTS = 16384


@dataclass(frozen=True)
class Feedback:
    """Feedback of errors among a layer's k inputs: `importance` f32 [k], D above, and `factors` f32 [k, k], U above."""

    importance: Floats
    factors: Floats

    @classmethod
    def of(cls, inputs: Floats) -> Feedback | None:
        """Return the feedback for inputs of a layer, f32 [tokens, k].

        None if they are too large to be squared, or more than 16,384, whose matrices would take 6 GiB.
        """
        if inputs.shape[1] > _MOST_INPUTS:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            hessian: npt.NDArray[np.float64] = (inputs.T @ inputs).astype(np.float64)
        if not np.isfinite(hessian).all():
            return None
        diagonal = np.diagonal(hessian).copy()
        hessian *= 1 - _SHRINKAGE
        np.fill_diagonal(hessian, diagonal + (_DAMPING * diagonal.mean() or 1.0))
        root = np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1]  # upper triangular, root @ root.T is H
        scales = np.diagonal(root).copy()
        root /= scales
        return cls((scales**2).astype(np.float32), root.astype(np.float32))


def fit_with_feedback(weights: Floats, feedback: Feedback, bits: int, group: int) -> Fitted:
    """Quantize weights, f32 [n, k], with scales and zero points that `fit` finds for each group of inputs."""
    n, k = weights.shape
    wanted, values = np.ascontiguousarray(weights.T), np.empty((k, n), np.uint8)
    errors, factors = np.zeros((k, n), np.float32), feedback.factors
    found: list[Fitted] = []
    for first in range(0, k, group):
        columns = slice(first, first + group)
        goals = wanted[columns] + factors[:first, columns].T @ errors[:first]
        fitted = fit(np.ascontiguousarray(goals.T), feedback.importance[columns], bits, group)
        scales, zeros = fitted.scales[:, 0], fitted.zeros[:, 0].astype(np.float32)
        for column in range(first, first + group):
            goal = goals[column - first] + factors[first:column, column] @ errors[first:column]
            offsets = np.clip(np.rint(goal / scales) + zeros, 0, (1 << bits) - 1) - zeros
            values[column] = offsets + zeros
            errors[column] = wanted[column] - offsets * scales
        found.append(fitted)
    all_scales = np.concatenate([fitted.scales for fitted in found], axis=1)
    all_zeros = np.concatenate([fitted.zeros for fitted in found], axis=1)
    return Fitted(np.ascontiguousarray(values.T), all_scales, all_zeros)
