# SPDX-License-Identifier: Apache-2.0
"""The order in which a rank does its part of a step; for who runs, times or weighs it. No torch.

Domains (sets of ranks that exchange packets) are all opened before anything is finished; then each
runs as a pipeline; what exchanges nothing comes last.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

Program = TypeVar("Program", contravariant=True)
Flight = TypeVar("Flight")
_Item = TypeVar("_Item")

_PORTIONS: Final = 8
_SMALLEST_PORTION: Final = 2**18  # elements: fewer at once fit into no faster cache


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


def portions(numels: Sequence[int]) -> Iterator[slice]:
    """Cut what is packed into portions, so that little of it lies beside the packet at once.

    Directions are made in the dtype of gradients and momentum, often twice as wide as a packet's.

    Args:
        numels: Elements of each piece, in packing order.

    Yields:
        Runs of pieces, none much more than an eighth of all, unless that is a single piece.

    Example:
        >>> [(run.start, run.stop) for run in portions([2**18, 2**17, 2**17, 2**19])]
        [(0, 1), (1, 3), (3, 4)]
    """
    limit = max(_SMALLEST_PORTION, sum(numels) // _PORTIONS)
    start = total = 0
    for i, numel in enumerate(numels):
        if i > start and total + numel > limit:
            yield slice(start, i)
            start, total = i, 0
        total += numel
    if start < len(numels):
        yield slice(start, len(numels))
