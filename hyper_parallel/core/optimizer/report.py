# SPDX-License-Identifier: Apache-2.0
"""A plan as a table that a person reads. No torch."""

from collections import Counter
from collections.abc import Iterable, Sequence

from hyper_parallel.core.optimizer.bucket import Bucket, PlannedParam, owner_loads
from hyper_parallel.core.optimizer.memory import peak_extra_bytes
from hyper_parallel.core.optimizer.routes import exchanges_of


def plan_table(rank: int, params: Sequence[PlannedParam], buckets: Sequence[Bucket]) -> str:
    """Format a plan.

    Args:
        rank: The rank whose plan it is.
        params: Its parameters.
        buckets: Its buckets.

    Returns:
        Lines of at most about a hundred columns: first the parameters by layout, then the
        exchanges by set of ranks, as this rank takes part in them.
    """
    lines = [
        f"Muon plan of rank {rank}: {_count(len(params), 'parameter')}, "
        f"{_count(sum(len(b.matrices) for b in buckets), 'matrix', 'matrices')}, "
        f"{_count(len(buckets), 'bucket')}, "
        f"{_count(sum(b.num_collectives for b in buckets), 'collective')} a step",
        "",
    ]
    lines += table(
        ("layout", "mesh", "parameters", "matrices", "Newton-Schulz"),
        _layout_rows(params, buckets),
    )
    lines.append("")
    lines += table(
        ("ranks", "route", "buckets", "collectives", "owner load max / mean", "received", "memory"),
        _domain_rows(rank, params, buckets),
    )
    return "\n".join(lines)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Align columns.

    Args:
        header: Titles.
        rows: Cells, as many as there are titles.

    Returns:
        One line per row, the header and a rule first.
    """
    cells = [tuple(header), *map(tuple, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return [line.rstrip() for line in lines]


def quantity(value: float, unit: str) -> str:
    """A number with a decimal prefix.

    Args:
        value: The number.
        unit: Its unit.

    Returns:
        Three digits, prefix and unit.

    Example:
        >>> quantity(2_360_000, "B")
        '2.36 MB'
    """
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def received_bytes(params: Sequence[PlannedParam], bucket: Bucket, rank: int) -> int:
    """Bytes that reach a rank from others for one bucket, both ways, headers included.

    Args:
        params: The plan's parameters.
        bucket: One of its buckets.
        rank: Global rank.

    Returns:
        The bytes.
    """
    return sum(
        exchange.numel_received() * bucket.itemsize + exchange.header_bytes()
        for exchange in exchanges_of(params, bucket, rank)
    )


def _placements_text(param: PlannedParam) -> str:
    return param.layout.placements_text() if len(param.layout.mesh.ranks) > 1 else "whole"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _layout_rows(
    params: Sequence[PlannedParam], buckets: Sequence[Bucket]
) -> list[tuple[str, ...]]:
    matrices = Counter(planned.param for bucket in buckets for planned in bucket.matrices)
    forms = _forms_text(params, buckets)
    rows: dict[tuple[str, str, str], list[int]] = {}
    for index, param in enumerate(params):
        work = f"{forms[index]}, {len(param.work.coefficients)} steps, {param.work.dtype}"
        mesh = "x".join(map(str, param.layout.mesh.shape))
        counts = rows.setdefault((_placements_text(param), mesh or "1", work), [0, 0])
        counts[0] += 1
        counts[1] += matrices[index]
    return [
        (layout, mesh, str(params), str(count), work)
        for (layout, mesh, work), (params, count) in rows.items()
    ]


def _forms_text(params: Sequence[PlannedParam], buckets: Sequence[Bucket]) -> dict[int, str]:
    """Which forms the matrices of each parameter take."""
    forms: dict[int, dict[str, None]] = {index: {} for index in range(len(params))}
    for planned in (planned for bucket in buckets for planned in bucket.matrices):
        matrix, work = planned.matrix, params[planned.param].work
        forms[planned.param][str(work.form(matrix.num_rows, matrix.num_cols))] = None
    return {index: " and ".join(texts) or "no matrix" for index, texts in forms.items()}


def _domain_rows(
    rank: int, params: Sequence[PlannedParam], buckets: Sequence[Bucket]
) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for ranks in dict.fromkeys(bucket.ranks for bucket in buckets):
        shared = [bucket for bucket in buckets if bucket.ranks == ranks]
        loads = owner_loads(params, shared, ranks).values()
        mean = sum(loads) / len(ranks)
        received = sum(received_bytes(params, bucket, rank) for bucket in shared)
        rows.append(
            (
                ranks_text(ranks),
                _route_text(shared),
                str(len(shared)),
                str(sum(bucket.num_collectives for bucket in shared)),
                f"{quantity(max(loads), 'FLOP')} / {quantity(mean, 'FLOP')}"
                f" = {max(loads) / mean if mean else 1:.3f}",
                quantity(received, "B"),
                quantity(peak_extra_bytes(params, shared, rank), "B"),
            )
        )
    return rows


def _route_text(buckets: Sequence[Bucket]) -> str:
    routes = dict.fromkeys(b.route if b.num_collectives else "local" for b in buckets)
    return ", ".join(routes)


def ranks_text(ranks: Sequence[int]) -> str:
    """A set of ranks in short: ``0-7``, ``0, 2, 4`` or its first eight and their number."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)})"
