# SPDX-License-Identifier: Apache-2.0
"""Sort the parameters of a model into the groups that a Muon optimizer takes."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from hyper_parallel.core.optimizer.param_overrides import (
    Override,
    check_options,
    check_patterns,
    matches,
    normalize_overrides,
)
from hyper_parallel.core.optimizer.param_roles import Algorithm, MatrixView, Role, assign_roles
from hyper_parallel.core.optimizer.param_uses import ParameterUse, find_uses

__all__ = ["MuonParamGroups", "ParameterReport", "muon_param_groups"]

_ALGORITHMS = ("muon", "adamw")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterReport:
    """What was decided about one parameter.

    Attributes:
        fqn: First name that ``model.named_parameters()`` gives.
        shape: Global shape.
        algorithm: ``"muon"``, ``"adamw"`` or ``"frozen"``.
        reason: Why, in a few words.
        matrix_view: How Muon reads the parameter. None for its last two dims, and without Muon.
        is_distributed: Whether it is a ``DTensor``.
    """

    fqn: str
    shape: tuple[int, ...]
    algorithm: str
    reason: str
    matrix_view: MatrixView
    is_distributed: bool


class MuonParamGroups(list[dict[str, Any]]):
    """Parameter groups for ``Muon``, with the reason for each parameter.

    A plain list of plain dicts, so it may be changed like one. ``print`` shows a table.

    Attributes:
        report: One record for each parameter of the model, in its order, frozen ones included.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]] = (), report: Iterable[ParameterReport] = ()
    ) -> None:
        super().__init__(groups)
        self.report = tuple(report)

    def report_table(self) -> str:
        """Lay the report out as plain text.

        Returns:
            A header, one line for each parameter, and one line of totals for each algorithm.
        """
        header = ("parameter", "shape", "algorithm", "matrix view", "reason")
        rows = [header]
        for record in self.report:
            shape = "x".join(map(str, record.shape)) or "scalar"
            view = _format_view(record.matrix_view)
            rows.append((record.fqn, shape, record.algorithm, view, record.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", *self._totals()])

    def _totals(self) -> list[str]:
        totals = []
        for algorithm in (*_ALGORITHMS, "frozen"):
            records = [record for record in self.report if record.algorithm == algorithm]
            numel = sum(math.prod(record.shape) for record in records)
            num_plain = sum(not record.is_distributed for record in records)
            totals.append(
                f"{algorithm}: {len(records)} parameters, {numel:,} elements, "
                f"{num_plain} of them plain tensors"
            )
        return totals

    @override
    def __str__(self) -> str:
        return self.report_table()

    @override
    def __repr__(self) -> str:
        counts = (f"{group.get('algorithm')}: {len(group['params'])}" for group in self)
        return f"{type(self).__name__}({', '.join(counts)})"


def muon_param_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Override] | None = None,
    routers: Algorithm = "muon",
) -> MuonParamGroups:
    """Sort a model's trainable parameters into groups for Muon and AdamW.

    Hidden matrices, stacks of expert matrices and convolutions go to Muon. Embeddings and whatever
    is tied to them, output heads, norms, biases, scalars, position tables, LoRA factors, grouped
    and transposed convolutions go to AdamW. Types of modules decide first, then names, then
    shapes; ``print`` the result to see each decision with its reason. Every trainable parameter is
    in exactly one group.

    Call it after ``parallelize_module`` and ``fully_shard`` and before the first forward: sharding
    replaces parameters, and a forward leaves unsharded ones in the root module. It reads metadata
    alone, so a model on the meta device gives the same groups.

    An attribute ``optimizer_algorithm`` on a parameter comes before all rules. ``fully_shard``
    makes new parameters without it, so it may be set on the module that owns the parameter too,
    where ``"muon"`` leaves parameters below two dims out. Tag both copies of a matrix that two
    pipeline stages share, as no stage can see the other's.

    A fused projection in a ``Linear`` is one matrix until an override gives its ``matrix_view``.

    Args:
        model: The model, wrapped or not. It is only read.
        muon: Options for all Muon groups, such as ``{"momentum": 0.9}``.
        adamw: Options for all AdamW groups, such as ``{"lr": 3e-4, "betas": (0.9, 0.95)}``. What
            is not given is up to the optimizer, so without ``lr`` they share Muon's.
        overrides: From a pattern in the manner of ``fnmatch``, for names with or without wrappers,
            to an algorithm or to options, among them ``"algorithm"``. All that match are applied
            in order, so later ones win. Each must match a trainable parameter.
        routers: Algorithm for the routers of mixtures of experts.

    Returns:
        Groups ``{"params": [(fqn, param), ...], "algorithm": ..., **options}``, none empty, in the
        order of first appearance; parameters with equal options share a group.

    Raises:
        ValueError: If a pattern matches no trainable parameter, if an option, algorithm or tag is
            unknown or does not fit the parameter, or if an override contradicts a tag.
        TypeError: If an override is neither a string nor a mapping.

    Example:
        >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
        >>> groups = muon_param_groups(model, adamw={"lr": 3e-4}, overrides={"1.*": {"lr": 0.1}})
        >>> [(g["algorithm"], g["lr"], [name for name, _ in g["params"]]) for g in groups]
        [('adamw', 0.0003, ['0.weight', '2.weight', '2.bias']), \
('muon', 0.1, ['1.weight']), ('adamw', 0.1, ['1.bias'])]
    """
    base: dict[str, Mapping[str, Any]] = {"muon": muon or {}, "adamw": adamw or {}}
    for algorithm, options in base.items():
        check_options(options, algorithm, f"{algorithm}=")
    if routers not in _ALGORITHMS:
        raise ValueError(f"routers must be 'muon' or 'adamw', got {routers!r}")
    uses = find_uses(model)
    rules = normalize_overrides(overrides or {})
    check_patterns(rules, uses)

    roles = assign_roles(model, uses, routers=routers)
    groups: list[dict[str, Any]] = []
    report = []
    for places, role in zip(uses, roles, strict=True):
        use = places[0]
        group: dict[str, Any] = {"algorithm": "frozen"}
        reason = "requires_grad is False"
        if use.param.requires_grad:
            matched = {pattern: rules[pattern] for pattern in rules if matches(pattern, places)}
            group, reason = _decide(places, role, matched, base)
            _add(groups, group, use)
        report.append(
            ParameterReport(
                fqn=use.fqn,
                shape=use.shape,
                algorithm=group["algorithm"],
                reason=reason,
                matrix_view=group.get("matrix_view"),
                is_distributed=isinstance(use.param, DTensor),
            )
        )
    for message in (_without_matrices(roles, report), _without_sharding(model, uses)):
        if message:
            warnings.warn(message, UserWarning, stacklevel=2)
    return MuonParamGroups(groups, report)


def _decide(
    places: Sequence[ParameterUse],
    role: Role,
    matched: Mapping[str, Mapping[str, Any]],
    base: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, Any], str]:
    # The group keys of one parameter, and the reason: overrides, then its tag, then its role.
    use = places[0]
    tag = _tag_of(places)
    algorithm = tag or str(role.algorithm)
    source = "tag optimizer_algorithm" if tag else ""
    for pattern, options in matched.items():
        if "algorithm" in options:
            algorithm, source = options["algorithm"], f"override {pattern!r}"
            if tag and algorithm != tag:
                raise ValueError(
                    f"{use.fqn}: {source} says {algorithm!r}, but its tag optimizer_algorithm "
                    f"says {tag!r}"
                )
    if algorithm == "muon" and len(use.shape) < 2:
        raise ValueError(
            f"{use.fqn}: {source} asks for Muon, which needs at least two dims, got shape "
            f"{use.shape}"
        )
    group: dict[str, Any] = {"algorithm": algorithm, **base[algorithm]}
    if algorithm == "muon" and role.matrix_view:
        group["matrix_view"] = role.matrix_view
    for pattern, options in matched.items():
        own = {key: value for key, value in options.items() if key != "algorithm"}
        check_options(own, algorithm, f"override {pattern!r} for {use.fqn}")
        group.update(own)
    if group.get("matrix_view", "") is None:
        del group["matrix_view"]
    reason = f"{source} (rule: {role.algorithm}, {role.reason})" if source else role.reason
    return group, reason


def _tag_of(places: Sequence[ParameterUse]) -> str:
    use = places[0]
    tag = getattr(use.param, "optimizer_algorithm", None)
    if tag is None:
        tags = [getattr(place.module, "optimizer_algorithm", None) for place in places]
        found = [each for each in tags if each is not None]
        if not found or (found == ["muon"] * len(found) and len(use.shape) < 2):
            return ""
        tag = found[0]
        if any(each != tag for each in found):
            raise ValueError(f"{use.fqn}: the modules that share it have different tags, {found}")
    if tag not in _ALGORITHMS:
        raise ValueError(f"{use.fqn}: optimizer_algorithm must be 'muon' or 'adamw', got {tag!r}")
    return str(tag)


def _add(groups: list[dict[str, Any]], keys: dict[str, Any], use: ParameterUse) -> None:
    for group in groups:
        if {key: value for key, value in group.items() if key != "params"} == keys:
            group["params"].append((use.fqn, use.param))
            return
    groups.append({"params": [(use.fqn, use.param)], **keys})


def _without_matrices(roles: Sequence[Role], report: Sequence[ParameterReport]) -> str:
    trainable = [i for i, record in enumerate(report) if record.algorithm != "frozen"]
    if any("muon" in (roles[i].algorithm, report[i].algorithm) for i in trainable):
        return ""
    return (
        f"none of {len(trainable)} trainable parameters is a hidden matrix, so Muon has nothing to "
        "do. FSDP1 and ZeRO-3 flatten parameters, which leaves no matrix to see: use "
        "torch.distributed.fsdp.fully_shard"
    )


def _without_sharding(model: nn.Module, uses: Sequence[Sequence[ParameterUse]]) -> str:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    modules = list(model.modules())
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        return ""
    trainable = [places[0] for places in uses if places[0].param.requires_grad]
    plain = [use for use in trainable if not isinstance(use.param, DTensor)]
    if len(plain) < len(trainable):
        # What fully_shard was told to ignore (scalars must be) is plain among distributed ones;
        # after a forward everything that a module manages is plain.
        manager: dict[int, FSDPModule] = {}
        for module in modules:
            if isinstance(module, FSDPModule):
                manager |= dict.fromkeys(map(id, module.parameters()), module)
        sharded = [use.param for use in trainable if isinstance(use.param, DTensor)]
        unsuspected = {None, *(manager.get(id(param)) for param in sharded)}
        plain = [u for u in plain if u.shape and manager.get(id(u.param)) not in unsuspected]
    if not plain:
        return ""
    return (
        f"{len(plain)} of {len(trainable)} trainable parameters are plain tensors, the first "
        f"{plain[0].fqn!r}, on {dist.get_world_size()} ranks. Call muon_param_groups after "
        "parallelize_module or fully_shard and before the first forward, or the optimizer keeps "
        "tensors that the model no longer uses. For DDP give Muon replicate_mesh="
    )


def _format_view(view: MatrixView) -> str:
    if view is None or isinstance(view, str):
        return view or ""
    kind, sizes = view
    return f"{kind} {'+'.join(map(str, sizes)) if isinstance(sizes, tuple | list) else sizes}"
