# SPDX-License-Identifier: Apache-2.0
"""The order in which a rank does its part of a step; for who runs, times or weighs it. No torch.

Domains (sets of ranks that exchange packets) are all opened before anything is finished; then each
runs as a pipeline; what exchanges nothing comes last.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

Program = TypeVar("Program", contravariant=True)
Flight = TypeVar("Flight")
_Item = TypeVar("_Item")


class Stages(Protocol[Program, Flight]):
    """What happens to one bucket on its way, from first to last."""

    def start(self, program: Program) -> Flight:
        """Prepare a bucket and send it to its owners."""
        ...

    def open(self, program: Program) -> Flight:
        """Start the first bucket of a domain, and go on until its ranks have heard each other."""
        ...

    def compute(self, flight: Flight) -> None:
        """Orthogonalize what has arrived and send it back, unless that is done already."""
        ...

    def finish(self, flight: Flight) -> None:
        """Wait for the updates and write them."""
        ...


def run_in_order(
    stages: Stages[_Item, Flight], domains: Collection[Sequence[_Item]], alone: Iterable[_Item]
) -> None:
    """Go through a step.

    Args:
        stages: What to do.
        domains: The buckets of each domain, in their order.
        alone: Buckets that exchange nothing.
    """
    opened = [stages.open(programs[0]) for programs in domains]
    for programs in domains:
        # Handed over: kept in the list, a domain's first bucket would live until the end.
        _pipeline(stages, opened.pop(0), programs[1:])
    for program in alone:
        _pipeline(stages, stages.start(program), [])


# While bucket k is orthogonalized, k + 1 travels in and k - 1 travels back.
def _pipeline(stages: Stages[_Item, Flight], current: Flight, rest: Sequence[_Item]) -> None:
    returning: Flight | None = None
    for program in rest:
        upcoming = stages.start(program)
        stages.compute(current)
        if returning is not None:
            stages.finish(returning)
        returning, current = current, upcoming
    stages.compute(current)
    if returning is not None:
        stages.finish(returning)
        returning = None
    stages.finish(current)
