# SPDX-License-Identifier: Apache-2.0
"""A distributed Muon optimizer for PyTorch ``DTensor``."""

from hyper_parallel.core.optimizer import (
    GradScaler,
    Muon,
    clip_grad_norm_,
    muon_param_groups,
    orthogonalize,
)

__all__ = [
    "GradScaler",
    "Muon",
    "__version__",
    "clip_grad_norm_",
    "muon_param_groups",
    "orthogonalize",
]

__version__ = "0.1.0.dev0"
