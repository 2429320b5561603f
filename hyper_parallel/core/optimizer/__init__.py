# SPDX-License-Identifier: Apache-2.0
"""The distributed Muon optimizer."""

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
