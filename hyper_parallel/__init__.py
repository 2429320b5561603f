# SPDX-License-Identifier: Apache-2.0
"""A distributed Muon optimizer for PyTorch ``DTensor``."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


# Planning needs no torch, whose import takes longer than most plans: names are looked up on use.
def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("hyper_parallel.core.optimizer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
