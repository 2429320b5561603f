# SPDX-License-Identifier: Apache-2.0
"""Drawings of where matrices live and who owns them."""

from itertools import product
from typing import Final

from docs.drawings.canvas import Canvas
from hyper_parallel.core.optimizer.bucket import Orthogonalization, PlannedParam, owner_loads
from hyper_parallel.core.optimizer.layout import AxisPlacement, MeshLayout, ParamLayout
from hyper_parallel.core.optimizer.planner import build_plan

_REPLICATE: Final = AxisPlacement()
_WORK: Final = Orthogonalization(
    coefficients=((3.4445, -4.7750, 2.0315),) * 5,
    method="standard",
    eps=1e-7,
    dtype="bfloat16",
    device_type="cpu",
)
_LAYOUTS: Final = (
    ("FSDP", "Shard(0)", (4,), (AxisPlacement(dim=0),)),
    ("HSDP, 2 replicas", "Replicate(), Shard(0)", (2, 2), (_REPLICATE, AxisPlacement(dim=0))),
    ("DDP", "Replicate()", (4,), (_REPLICATE,)),
    ("TP, row-wise", "Shard(1)", (4,), (AxisPlacement(dim=1),)),
    (
        "FSDP x TP, row-wise",
        "Shard(0), Shard(1)",
        (2, 2),
        (AxisPlacement(dim=0), AxisPlacement(dim=1)),
    ),
    (
        "FSDP x TP, column-wise",
        "_StridedShard(0), Shard(0)",
        (2, 2),
        (AxisPlacement(dim=0, split_factor=2), AxisPlacement(dim=0)),
    ),
)


def layouts() -> str:
    """One matrix of 8 x 8 on four ranks in six layouts, as the package sees them."""
    canvas = Canvas(760, 452, "Which elements of an 8 by 8 matrix each of four ranks holds")
    cell = 7
    for number, (name, placements, shape, axes) in enumerate(_LAYOUTS):
        left, top = 24 + number % 2 * 372, 34 + number // 2 * 148
        canvas.text(left, top, name, weight=600)
        canvas.text(left, top + 17, placements, size=12, fill="soft")
        layout = ParamLayout(
            shape=(8, 8), mesh=MeshLayout(shape=shape, ranks=tuple(range(4))), axes=axes
        )
        for rank in range(4):
            x, y = left + rank * 88, top + 30
            canvas.box(x, y, 8 * cell, 8 * cell, fill="none")
            region = layout.region(layout.mesh.coordinate(rank))
            for rows, cols in product(*region):
                canvas.box(
                    x + cols[0] * cell,
                    y + rows[0] * cell,
                    (cols[1] - cols[0]) * cell,
                    (rows[1] - rows[0]) * cell,
                    fill=f"c{rank}",
                )
            canvas.text(
                x + 4 * cell,
                y + 8 * cell + 18,
                f"rank {rank}",
                size=12,
                fill="soft",
                anchor="middle",
            )
    return canvas.svg()


def ownership() -> str:
    """Matrices of two transformer blocks on four ranks, longest processing time first."""
    width, ranks = 256, tuple(range(4))
    mesh = MeshLayout(shape=(4,), ranks=ranks)
    shapes = {"qkv": (3, 1), "out": (1, 1), "up": (4, 1), "down": (1, 4)}
    params = [
        PlannedParam(name=f"{name} {block}", layout=layout, source=layout, view=None, work=_WORK)
        for block in range(3)
        for name, (rows, cols) in shapes.items()
        for layout in [
            ParamLayout(shape=(rows * width, cols * width), mesh=mesh, axes=(AxisPlacement(dim=0),))
        ]
    ]
    plan = build_plan(params, rank=0, bucket_bytes=1 << 40)
    loads = owner_loads(params, plan.buckets, ranks)
    scale = 560 / max(loads.values())
    canvas = Canvas(760, 268, "Which rank owns which matrix of three blocks, and the load of each")
    canvas.text(24, 34, "Owners of the 12 matrices of three blocks", weight=600)
    canvas.text(736, 34, "length: operations", size=12, fill="soft", anchor="end")
    for rank in ranks:
        left, top = 90.0, 54 + rank * 44
        canvas.text(24, top + 22, f"rank {rank}", fill="soft")
        for matrix in plan.buckets[0].matrices:
            if matrix.owner == rank:
                length = params[matrix.param].work.flops(matrix.matrix) * scale
                canvas.box(left, top, length, 34, fill=f"c{rank}")
                name = params[matrix.param].name
                if length > 7.5 * len(name):
                    canvas.text(
                        left + length / 2, top + 22, name, size=12, fill="on", anchor="middle"
                    )
                left += length
    mean = 90 + sum(loads.values()) / 4 * scale
    canvas.line((mean, 46), (mean, 232), dashed=True)
    ratio = max(loads.values()) * 4 / sum(loads.values())
    canvas.text(mean, 250, f"mean; max / mean = {ratio:.3f}", size=12, fill="soft", anchor="middle")
    return canvas.svg()
