# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other besides matrices: the same plan once, and in each packet a header."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hyper_parallel.core.optimizer.bucket import HEADER_BYTES
from hyper_parallel.core.optimizer.collectives import gather_objects
from hyper_parallel.core.optimizer.layout import Ranks
from hyper_parallel.core.optimizer.plan import Plan

_HEADER = struct.Struct("<B7xQ")
assert _HEADER.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a rank cannot step.

    Attributes:
        reason: In words; empty as long as only others know it.
        is_fatal: Whether it is an error. If not, all ranks leave this step out and go on.
    """

    reason: str
    is_fatal: bool = True


def pack_header(fingerprint: int, *, is_well: bool) -> bytes:
    """Head of a packet: equal on all ranks that are well and step on the same thing.

    Args:
        fingerprint: 64-bit hash of what this rank steps on.
        is_well: Whether it can.

    Returns:
        ``HEADER_BYTES`` bytes.
    """
    return _HEADER.pack(not is_well, fingerprint)


def check_same_plan(plan: Plan, ranks: Ranks, group: dist.ProcessGroup) -> None:
    """Compare what a set of ranks has planned. Called on all of them, before the first exchange.

    Args:
        plan: This rank's plan.
        ranks: The set.
        group: Its process group.

    Raises:
        RuntimeError: On all ranks, if the plans differ; it names the first difference.
    """
    try:
        digests = gather_objects(plan.digest(ranks), group)
    except RuntimeError as error:
        first = next(plan.describe(ranks))
        raise RuntimeError(
            f"ranks {list(ranks)} could not compare their plans before the first step: a rank "
            f"failed, or has no parameter on this mesh and did not come. Here it starts with "
            f"{first}. {error}"
        ) from error
    if len(set(digests)) > 1:
        told = gather_objects(list(plan.describe(ranks)), group)
        raise RuntimeError(
            f"ranks disagree about the optimizer's plan: {_first_difference(ranks, told)}. Build "
            "the optimizer on every rank from the same parameters, in the same order, with the "
            "same settings"
        )


def disagreement(ranks: Ranks, facts: Sequence[Sequence[str]]) -> str:
    """Say in what ranks differ, in one step.

    Args:
        ranks: The ranks.
        facts: What each of them steps on, one fact a line.

    Returns:
        A sentence or two; nothing if they do not differ.
    """
    difference = _first_difference(ranks, facts)
    if not difference:
        return ""
    return (
        f"ranks disagree about this step: {difference}. All ranks that share a parameter must "
        "step with the same hyperparameters, and either all or none of them with a gradient"
    )


def _first_difference(ranks: Ranks, lines: Sequence[Sequence[str]]) -> str:
    """Name the first line in which ranks differ and who says what; nothing if they do not."""
    for number in range(max(map(len, lines))):
        said: dict[str, list[int]] = {}
        for rank, own in zip(ranks, lines, strict=True):
            line = own[number] if number < len(own) else "nothing more"
            said.setdefault(line, []).append(rank)
        if len(said) > 1:
            return " but ".join(f"{_ranks(who)} {line}" for line, who in said.items())
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"
