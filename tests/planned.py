# SPDX-License-Identifier: Apache-2.0
"""Plans of transformers, made by hand from shapes and placements."""

import math
from collections.abc import Sequence

from hyper_parallel.core.optimizer.bucket import Orthogonalization, PlannedParam
from hyper_parallel.core.optimizer.layout import AxisPlacement, MeshLayout, ParamLayout
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.planner import build_plan

R = AxisPlacement()
S0 = AxisPlacement(dim=0)
S1 = AxisPlacement(dim=1)
WORK = Orthogonalization(
    coefficients=((3.4445, -4.7750, 2.0315),) * 5,
    method="auto",
    eps=1e-7,
    dtype="bfloat16",
    device_type="cuda",
)
LARGE = 1 << 40


def mesh_of(*shape: int) -> MeshLayout:
    return MeshLayout(shape=shape, ranks=tuple(range(math.prod(shape))))


def planned(
    shape: tuple[int, ...], mesh: MeshLayout, axes: Sequence[AxisPlacement], name: str = "w"
) -> PlannedParam:
    layout = ParamLayout(shape=shape, mesh=mesh, axes=tuple(axes))
    return PlannedParam(name=name, layout=layout, source=layout, view=None, work=WORK)


def transformer(
    mesh: MeshLayout, axes: Sequence[AxisPlacement], *, num_layers: int, width: int
) -> list[PlannedParam]:
    """Blocks of (3d x d, d x d, 4d x d, d x 4d)."""
    d = width
    shapes = {"qkv": (3 * d, d), "out": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    return [
        planned(shape, mesh, axes, f"layers.{i}.{name}")
        for i in range(num_layers)
        for name, shape in shapes.items()
    ]


def experts(mesh: MeshLayout, *, num_layers: int, num_experts: int) -> list[PlannedParam]:
    """A mixture of experts: attention cut over all ranks, experts over the last axis first."""
    d, f = 7168, 2048
    everywhere = (S0,) * len(mesh.shape)
    stacked = (AxisPlacement(dim=1),) * (len(mesh.shape) - 1) + (S0,)
    params = []
    for i in range(num_layers):
        shapes = {"q_a": (1536, d), "q_b": (12288, 1536), "kv_b": (16384, 512), "o": (d, 8192)}
        params += [
            planned(shape, mesh, everywhere, f"layers.{i}.{name}") for name, shape in shapes.items()
        ]
        stacks = {
            "gate": (num_experts, f, d),
            "up": (num_experts, f, d),
            "down": (num_experts, d, f),
        }
        params += [
            planned(shape, mesh, stacked, f"layers.{i}.{name}") for name, shape in stacks.items()
        ]
    return params


def plan_of(params: Sequence[PlannedParam], *, rank: int = 0, bucket_bytes: int = LARGE) -> Plan:
    return build_plan(params, rank=rank, bucket_bytes=bucket_bytes)
