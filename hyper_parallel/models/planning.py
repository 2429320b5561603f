# SPDX-License-Identifier: Apache-2.0
"""From a model and sizes of axes to the plan that its optimizer would make. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hyper_parallel.core.optimizer.bucket import Orthogonalization, owner_loads
from hyper_parallel.core.optimizer.coefficients import Coefficients, resolve_coefficients
from hyper_parallel.core.optimizer.layout import MeshLayout
from hyper_parallel.core.optimizer.matrix_view import matrices_of
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.planner import build_plan
from hyper_parallel.core.optimizer.scaling import ResizableAxis
from hyper_parallel.core.optimizer.sharing import ReplicaPolicy, decide_sharing, shared_param
from hyper_parallel.models.errors import InputError
from hyper_parallel.models.mesh_axes import Parallelism
from hyper_parallel.models.model_param import Model, ModelParam
from hyper_parallel.models.recipes import PlacedParam, check_heads, place, stage_params


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Settings of the optimizer that a plan depends on; the defaults are ``Muon``'s.

    Attributes:
        ns_coefficients: Name of a preset, or triples.
        ns_steps: Newton-Schulz steps.
        ns_method: ``"auto"``, ``"standard"``, ``"gram"`` or ``"standard+quack"``.
        ns_dtype: Name of the dtype of the iteration.
        eps: Floor of the norm.
        share_replicas: True, False or ``"auto"``.
        shard_momentum: Whether replicas keep momentum once between them.
        replica_route: ``"auto"``, ``"direct"`` or ``"staged"``.
        bucket_bytes: Most bytes of one bucket on a rank.
        device_type: Where the matrices are orthogonalized.
    """

    ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315)
    ns_steps: int = 5
    ns_method: str = "auto"
    ns_dtype: str = "bfloat16"
    eps: float = 1e-7
    share_replicas: bool | str = "auto"
    shard_momentum: bool = False
    replica_route: str = "auto"
    bucket_bytes: int = 64 * 2**20
    device_type: str = "cuda"

    def work(self) -> Orthogonalization:
        """How matrices are orthogonalized."""
        try:
            schedule = resolve_coefficients(self.ns_coefficients, self.ns_steps)
        except (ValueError, TypeError) as error:
            raise InputError(str(error)) from None
        return Orthogonalization(
            coefficients=schedule,
            method=self.ns_method,
            eps=self.eps,
            dtype=self.ns_dtype,
            device_type=self.device_type,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A plan, and what it was made for.

    Attributes:
        model: The model.
        parallelism: Sizes of the axes.
        stage: Pipeline stage.
        placed: All parameters that the rank holds, AdamW's included.
        plan: The plan.
    """

    model: Model
    parallelism: Parallelism
    stage: int
    placed: tuple[PlacedParam, ...]
    plan: Plan


def placed_params(
    model: Model, parallelism: Parallelism, *, rank: int | None, stage: int | None
) -> tuple[int, list[PlacedParam]]:
    """Parameters of one rank.

    Args:
        model: The model.
        parallelism: Sizes of the axes.
        rank: Global rank; the first of the stage if None.
        stage: Pipeline stage; that of the rank, or the one with the most work, if None.

    Returns:
        The stage, and the placed parameters.

    Raises:
        InputError: If rank or stage is out of range, they contradict each other, or the axes do not
            fit the model.
    """
    check_heads(model, parallelism)
    stages = stage_params(model, parallelism)
    stage = _stage(stages, parallelism, rank, stage)
    at = stage * parallelism.ranks_per_stage if rank is None else rank
    return stage, place(stages[stage], parallelism, stage=stage, rank=at)


def _stage(
    stages: Sequence[Sequence[ModelParam]],
    parallelism: Parallelism,
    rank: int | None,
    stage: int | None,
) -> int:
    if rank is not None:
        if not 0 <= rank < parallelism.world_size:
            raise InputError(f"--rank must be below {parallelism.world_size}, got {rank}")
        if stage not in (None, parallelism.stage_of(rank)):
            raise InputError(
                f"--stage {stage} does not have rank {rank}, which is in stage "
                f"{parallelism.stage_of(rank)}"
            )
        return parallelism.stage_of(rank)
    if stage is None:
        return max(range(len(stages)), key=lambda s: (_standard_flops(stages[s]), -s))
    if not 0 <= stage < len(stages):
        raise InputError(f"--stage must be below pp={len(stages)}, got {stage}")
    return stage


def plan_model(
    model: Model,
    parallelism: Parallelism,
    settings: PlanSettings,
    *,
    rank: int | None = None,
    stage: int | None = None,
) -> PlannedModel:
    """Make the plan that one rank's optimizer would make.

    Args:
        model: The model.
        parallelism: Sizes of the axes.
        settings: Settings of the optimizer.
        rank: Global rank; the busiest of the stage if None: most FLOPs, then the lowest.
        stage: Pipeline stage; see :func:`placed_params`.

    Returns:
        The plan.

    Raises:
        InputError: If the model, the axes and the settings do not fit together.
    """
    planned = _planned(model, parallelism, settings, rank=rank, stage=stage)
    if rank is not None:
        return planned
    stage, first = planned.stage, planned.plan.rank
    busiest = busiest_rank(planned.plan)
    if busiest == first:
        return planned
    same_for_all = all(
        len(param.layout.mesh.ranks) == parallelism.ranks_per_stage for param in planned.plan.params
    )
    if same_for_all:
        return replace(planned, plan=replace(planned.plan, rank=busiest))
    return _planned(model, parallelism, settings, rank=busiest, stage=stage)


def data_parallel_axis(planned: PlannedModel, settings: PlanSettings) -> ResizableAxis:
    """The axis to which a training run adds ranks: its recipe places the model again.

    Args:
        planned: The plan of a model.
        settings: What it was planned with.

    Returns:
        ``dp_shard``; ``dp_replicate`` where replicas are all that there is.
    """
    parallelism = planned.parallelism
    is_replicated = parallelism.size("dp_replicate") > 1 == parallelism.size("dp_shard")
    name = "dp_replicate" if is_replicated else "dp_shard"

    def plan_at(size: int) -> tuple[Plan, MeshLayout] | None:
        try:
            resized = parallelism.resized(name, size)
            again = plan_model(planned.model, resized, settings, stage=planned.stage)
        except InputError:
            return None
        return again.plan, resized.dense_mesh(planned.stage).layout

    return ResizableAxis(name=name, size=parallelism.size(name), plan_at=plan_at)


def busiest_rank(plan: Plan) -> int:
    """The rank with the most FLOPs among those that the plan speaks of; the lowest of them."""
    loads: dict[int, int] = {plan.rank: 0}
    for ranks in dict.fromkeys(bucket.ranks for bucket in plan.buckets):
        shared = [bucket for bucket in plan.buckets if bucket.ranks == ranks]
        for rank, load in owner_loads(plan.params, shared, ranks).items():
            loads[rank] = loads.get(rank, 0) + load
    return min(loads, key=lambda rank: (-loads[rank], rank))


def _planned(
    model: Model,
    parallelism: Parallelism,
    settings: PlanSettings,
    *,
    rank: int | None,
    stage: int | None,
) -> PlannedModel:
    at, placed = placed_params(model, parallelism, rank=rank, stage=stage)
    rank = at * parallelism.ranks_per_stage if rank is None else rank
    policy = ReplicaPolicy(share=settings.share_replicas, shard_momentum=settings.shard_momentum)
    if settings.shard_momentum and settings.share_replicas is False:
        raise InputError(
            "--shard-momentum needs --share-replicas true or auto: momentum that is split over the "
            "replicas can only be gathered from all of them"
        )
    work = settings.work()
    params = [
        shared_param(p.param.name, p.layout, p.param.view, work=work, policy=policy)
        for p in placed
        if p.param.algorithm == "muon"
    ]
    if not params:
        raise InputError(f"{model.name} has no parameter for Muon in stage {at}")
    params = decide_sharing(params, [policy] * len(params), rank)
    plan = build_plan(
        params,
        rank=rank,
        bucket_bytes=settings.bucket_bytes,
        replica_route=settings.replica_route,
    )
    return PlannedModel(
        model=model, parallelism=parallelism, stage=at, placed=tuple(placed), plan=plan
    )


def _standard_flops(params: Sequence[ModelParam]) -> int:
    """Work of a stage, up to a factor: rows of the smaller side squared times the larger."""
    total = 0
    for param in params:
        if param.algorithm == "muon":
            # One matrix of a stack stands for all.
            matrix_dims = param.shape if param.view == "flatten" else param.shape[-2:]
            matrices = matrices_of(matrix_dims, param.view, param.name)
            copies = math.prod(param.shape) // max(1, math.prod(matrix_dims))
            total += copies * sum(
                min(m.num_rows, m.num_cols) ** 2 * max(m.num_rows, m.num_cols) for m in matrices
            )
    return total
