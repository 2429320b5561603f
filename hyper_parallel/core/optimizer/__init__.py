# SPDX-License-Identifier: Apache-2.0
"""The distributed Muon optimizer."""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hyper_parallel.core.optimizer.grad_scaler import GradScaler
    from hyper_parallel.core.optimizer.gradient_norm import clip_grad_norm_
    from hyper_parallel.core.optimizer.load_planner import OlderCheckpointPlanner
    from hyper_parallel.core.optimizer.muon import Muon
    from hyper_parallel.core.optimizer.param_grouping import (
        CommParamGroup,
        ShardInfo,
        calculate_replicate_group,
        calculate_shard_group,
        extract_shard_info,
        group_parameters_by_sharding,
    )
    from hyper_parallel.core.optimizer.param_groups import muon_param_groups
    from hyper_parallel.core.optimizer.plan import Plan
    from hyper_parallel.core.optimizer.polar import orthogonalize
    from hyper_parallel.core.optimizer.state_conversion import export_state, import_state

__all__ = [
    "CommParamGroup",
    "GradScaler",
    "Muon",
    "OlderCheckpointPlanner",
    "Plan",
    "ShardInfo",
    "calculate_replicate_group",
    "calculate_shard_group",
    "clip_grad_norm_",
    "export_state",
    "extract_shard_info",
    "group_parameters_by_sharding",
    "import_state",
    "muon_param_groups",
    "orthogonalize",
]

_MODULES: Final = {
    "GradScaler": "grad_scaler",
    "Muon": "muon",
    "OlderCheckpointPlanner": "load_planner",
    "Plan": "plan",
    "clip_grad_norm_": "gradient_norm",
    "export_state": "state_conversion",
    "import_state": "state_conversion",
    "muon_param_groups": "param_groups",
    "orthogonalize": "polar",
}


# Planning needs no torch, whose import takes longer than most plans: names are looked up on use.
def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'param_grouping')}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
