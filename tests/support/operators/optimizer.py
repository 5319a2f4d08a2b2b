"""Optimizer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from operator_case import Case


def adam_w(grad: Any, out: Any, max_grad_norm: Any, amsgrad: bool, maximize: bool, **known: float) -> Any:
    var, m, v = out
    grad = -grad if maximize else grad
    m = known["beta1"] * m + (1 - known["beta1"]) * grad
    v = known["beta2"] * v + (1 - known["beta2"]) * grad**2
    v = np.maximum(v, max_grad_norm) if amsgrad else v
    m_hat = m / (1 - known["beta1_power"] * known["beta1"])
    v_hat = v / (1 - known["beta2_power"] * known["beta2"])
    step = m_hat / (np.sqrt(v_hat) + known["epsilon"]) + known["weight_decay"] * var
    return var - known["lr"] * step, m, v


def to_step(amsgrad: bool, maximize: bool) -> Any:
    return lambda r: {
        "beta1_power": 0.9, "beta2_power": 0.99, "lr": 0.1, "weight_decay": 0.05, "beta1": 0.9, "beta2": 0.99,
        "epsilon": 1e-6, "grad": r.normal(size=(3, 4)), "max_grad_norm": r.uniform(size=(3, 4)) if amsgrad else None,
        "amsgrad": amsgrad, "maximize": maximize,
        "out": [r.normal(size=(3, 4)), r.normal(size=(3, 4)), r.uniform(0.1, 1, (3, 4))],
    }  # fmt: skip


CASES = [
    *(Case("npu_apply_adam_w.out", to_step(*arguments), adam_w) for arguments in ((False, False), (True, True))),
    *(
        Case(
            "_amp_foreach_non_finite_check",
            lambda r, last=last: {"scaled_grads": [r.normal(size=3), np.array([1.0, last])]},
            lambda scaled_grads: not np.isfinite(scaled_grads[1]).all(),
        )
        for last in (2.0, np.inf, np.nan)
    ),
]
