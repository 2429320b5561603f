# SPDX-License-Identifier: Apache-2.0
"""Run a plan: what is issued when, and what happens if a rank cannot go on. No Muon in it.

[Note: order of a step]
Each domain (set of ranks that exchange packets) is *opened* first: its first exchange runs, and its
headers tell every rank whether all are well and step on the same thing. Only when all domains are
open is anything written. Then each domain runs as a pipeline: while bucket *k* is orthogonalized,
*k + 1* travels in and *k - 1* travels back. The order on each process group depends on the plan
alone, so no rank can wait for another that waits for it.

A rank that cannot go on still runs every exchange, with headers that say so, and writes nothing.
Whoever reads such a header does the same, so the news also reaches ranks that share no parameter
with the one that failed. At the end they meet once more and raise the same error.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.agreement import (
    Obstacle,
    check_same_plan,
    disagreement,
    pack_header,
)
from hyper_parallel.core.optimizer.bucket import HEADER_BYTES, Orthogonalization
from hyper_parallel.core.optimizer.collectives import (
    ProcessGroups,
    RankGroup,
    Transfer,
    all_reduce_,
    gather_objects,
    start_all_to_all,
)
from hyper_parallel.core.optimizer.layout import Ranks
from hyper_parallel.core.optimizer.packet import PacketFormat, Parcel, Part
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.program import Program, build_program
from hyper_parallel.core.optimizer.step_order import portions, run_in_order


class StepKernel(Protocol):
    """What an optimizer does to this rank's local tensors in one step."""

    def obstacle(self) -> Obstacle | None:
        """Why this rank cannot step, found before anything was sent; None if it can."""
        ...

    def facts(self, params: Sequence[int]) -> list[str]:
        """What must be equal on all ranks that share these parameters, one fact a line."""
        ...

    def fingerprint(self, params: Sequence[int]) -> int:
        """64-bit hash of :meth:`facts`."""
        ...

    def is_active(self, param: int) -> bool:
        """Whether a parameter has a gradient in this step."""
        ...

    def prepare(self, parts: Sequence[Part]) -> list[Tensor]:
        """What is to be orthogonalized, for active parts; new tensors, no state is touched."""
        ...

    def compute(self, batch: Tensor, work: Orthogonalization) -> None:
        """Replace ``(batch, rows, cols)`` whole matrices by their orthogonalization."""
        ...

    def apply(self, stored: Sequence[Part], updates: Sequence[tuple[Part, Tensor]]) -> None:
        """Write: advance the momentum of ``stored`` and apply the updates; active parts only."""
        ...


@dataclass(slots=True)
class _Flight:
    """A bucket on its way through a step."""

    program: Program
    batches: list[Tensor]
    gather: Transfer | None = None
    scatter: Transfer | None = None
    computed: bool = False
    sound: bool = True  # no rank has said otherwise
    updates: list[tuple[Part, Tensor]] | None = None  # once they have arrived


class Executor:
    """Runs one rank's plan.

    Args:
        plan: The plan.
        groups: Source of process groups.
        device: Device of the local tensors.
        shared: For each set of ranks, the kernel's parameters that must be stepped on alike by all
            of them, whether they travel or not.
    """

    def __init__(
        self,
        plan: Plan,
        groups: ProcessGroups,
        device: torch.device,
        shared: Mapping[Ranks, Sequence[int]],
    ) -> None:
        self._plan = plan
        self._device = device
        programs = [build_program(plan, number) for number in range(len(plan.buckets))]
        self._alone = [p for p in programs if not p.bucket.num_collectives]
        self._domains: dict[Ranks, list[Program]] = {ranks: [] for ranks in plan.domains}
        for program in programs:
            if program.bucket.num_collectives:
                self._domains[program.bucket.ranks].append(program)
        needed = [ranks for program in programs for ranks in program.groups()]
        self._groups = {
            ranks: groups.group(ranks) for ranks in dict.fromkeys([*plan.rank_sets, *needed])
        }
        self._params = {ranks: shared[ranks] for ranks in plan.domains}
        self._agreed = False
        self._obstacle: Obstacle | None = None  # why this rank cannot go on
        self._suspects: set[Ranks] = set()  # domains in which some rank cannot
        self._fingerprints: dict[Ranks, int] = {}
        self._written = False

    def run(self, kernel: StepKernel) -> str | None:
        """Run one step; every rank runs every exchange of its plan, whatever happens.

        Args:
            kernel: What to do to the local tensors.

        Returns:
            None; or why this step was left out, the same on all ranks of a domain. Nothing was
            written then.

        Raises:
            RuntimeError: On all ranks of a domain, if one of them cannot step, if they do not
                agree about the plan or about what they step on, or if a peer does not arrive.
        """
        self._agree()
        self._obstacle = kernel.obstacle()
        self._suspects.clear()
        self._written = False
        self._fingerprints = {
            ranks: kernel.fingerprint(params) for ranks, params in self._params.items()
        }
        run_in_order(_Stages(self, kernel), self._domains.values(), self._alone)
        return self._settle(kernel)

    def any_rank(self, here: bool) -> bool:  # noqa: FBT001 -- a truth, no switch
        """Whether something is so on any rank that exchanges with this one. Called on all of them.

        Args:
            here: Whether it is so on this rank.

        Returns:
            The same on all ranks of a domain.
        """
        self._agree()
        flag = torch.tensor(float(here), device=self._device)
        # Twice: what is so in the last domain only then reaches the first one, too.
        for ranks in [*self._domains, *self._domains]:
            all_reduce_(flag, RankGroup(ranks, self._groups[ranks]), largest=True)
        return bool(flag)

    def _agree(self) -> None:
        """Compare plans, before the first exchange of all."""
        if not self._agreed:
            for ranks in self._plan.rank_sets:
                check_same_plan(self._plan, ranks, self._groups[ranks])
            self._agreed = True

    def _open(self, program: Program, kernel: StepKernel) -> _Flight:
        """Exchange until the headers of every rank of the domain have reached every other."""
        flight = self._start(program, kernel)
        if flight.gather is not None:
            self._gathered(flight)
        if not program.bucket.gathers or program.relay is not None:
            self._compute(flight, kernel)
            self._arrive(flight)
        self._judge(flight)
        return flight

    def _judge(self, flight: _Flight) -> None:
        if not flight.sound:
            self._suspects.add(flight.program.bucket.ranks)
            if self._obstacle is None:
                self._obstacle = Obstacle("")  # others know the reason, and will tell

    def _start(self, program: Program, kernel: StepKernel) -> _Flight:
        """Allocate the owned matrices, keep what is here already and send the rest."""
        flight = _Flight(
            program,
            [
                torch.empty(
                    (len(batch.params), *batch.box_shape),
                    dtype=program.wire_dtype,
                    device=self._device,
                )
                for batch in program.batches
            ],
        )
        packet = self._packet(program, program.gather_out)
        if self._obstacle is None:
            with self._guard():
                self._prepare(flight, packet, kernel)
        if program.bucket.gathers:
            flight.gather = self._send(flight, packet, program.gather_out, program.gather_in)
        return flight

    def _prepare(self, flight: _Flight, packet: Tensor, kernel: StepKernel) -> None:
        program = flight.program
        sources = [part for part, _ in program.keeps] + list(program.sends)
        targets = [slot.of(flight.batches) for _, slot in program.keeps]
        targets += [parcel.of(packet) for parcel in program.gather_out.parcels]
        active = [
            (part, target)
            for part, target in zip(sources, targets, strict=True)
            if kernel.is_active(part.param)
        ]
        for run in portions([target.numel() for _, target in active]):
            parts, places = zip(*active[run], strict=True)
            _copy(list(places), kernel.prepare(parts))

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Between two exchanges nothing may raise on one rank alone: the others would wait."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- raised on all ranks once they know
            self._obstacle = Obstacle(f"{type(error).__name__}: {error}")

    def _gathered(self, flight: _Flight) -> None:
        """Wait for the pieces of the owned matrices and put them in place."""
        program = flight.program
        assert flight.gather is not None
        received = self._wait(flight, flight.gather, program.gather_in, "gather")
        _copy(
            [slot.of(flight.batches) for slot in program.fills],
            [parcel.of(received) for parcel in program.gather_in.parcels],
        )
        flight.gather = None

    def _compute(self, flight: _Flight, kernel: StepKernel) -> None:
        """Orthogonalize what this rank owns and send the updates."""
        if flight.computed:
            return
        program = flight.program
        if flight.gather is not None:
            self._gathered(flight)
        if self._obstacle is None:
            with self._guard():
                self._orthogonalize(flight, kernel)
        if program.bucket.scatters:
            packet = self._packet(program, program.scatter_out)
            _copy(
                [parcel.of(packet) for parcel in program.scatter_out.parcels],
                [slot.of(flight.batches) for slot in program.returns],
            )
            flight.scatter = self._send(flight, packet, program.scatter_out, program.scatter_in)
        flight.computed = True

    def _orthogonalize(self, flight: _Flight, kernel: StepKernel) -> None:
        for i, batch in enumerate(flight.program.batches):
            matrices = flight.batches[i].view(-1, batch.num_rows, batch.num_cols)
            active = [j for j, param in enumerate(batch.params) if kernel.is_active(param)]
            if len(active) == len(batch.params):
                kernel.compute(matrices, batch.work)
            elif active:
                chosen = matrices[active]
                kernel.compute(chosen, batch.work)
                matrices[active] = chosen

    def _arrive(self, flight: _Flight) -> None:
        """Wait for the updates of this rank's pieces, and pass them on to its replicas."""
        if flight.updates is not None:
            return
        program = flight.program
        updates: list[tuple[Part, Tensor]] = []
        if flight.scatter is not None:
            received = self._wait(flight, flight.scatter, program.scatter_in, "scatter")
            parcels = program.scatter_in.parcels
            updates += _arrived(program.updates, parcels, received)
            flight.scatter = None
        updates += [(part, slot.of(flight.batches)) for part, slot in program.kept_updates]
        if program.relay is not None:
            relay = program.relay
            packet = self._packet(program, relay.out)
            _copy(
                [parcel.of(packet) for parcel in relay.out.parcels],
                [updates[source][1] for source in relay.sources],
            )
            transfer = self._send(flight, packet, relay.out, relay.into)
            received = self._wait(flight, transfer, relay.into, "relay")
            updates += _arrived(relay.updates, relay.into.parcels, received)
        flight.updates = updates

    def _finish(self, flight: _Flight, kernel: StepKernel) -> None:
        """Write, unless some rank has failed."""
        self._arrive(flight)
        self._judge(flight)
        alone = not flight.program.bucket.num_collectives
        if self._suspects or (alone and self._obstacle is not None):
            return
        assert flight.updates is not None
        kernel.apply(
            [part for part in flight.program.stored if kernel.is_active(part.param)],
            [(part, update) for part, update in flight.updates if kernel.is_active(part.param)],
        )
        self._written = True

    def _packet(self, program: Program, form: PacketFormat) -> Tensor:
        # Where a matrix has no gradient, what lies here travels, and nobody reads it.
        return torch.empty(sum(form.sizes), dtype=program.wire_dtype, device=self._device)

    def _send(
        self, flight: _Flight, packet: Tensor, out: PacketFormat, into: PacketFormat
    ) -> Transfer:
        flight.sound &= self._obstacle is None
        fingerprint = self._fingerprints[flight.program.bucket.ranks]
        text = pack_header(fingerprint, is_well=flight.sound)
        header = torch.tensor(list(text), dtype=torch.uint8, device=self._device)
        raw, itemsize = packet.view(torch.uint8), packet.element_size()
        for offset in out.headers.values():
            raw.narrow(0, offset * itemsize, HEADER_BYTES).copy_(header)
        return start_all_to_all(packet, out.sizes, into.sizes, self._groups[out.ranks])

    def _wait(
        self, flight: _Flight, transfer: Transfer, form: PacketFormat, direction: str
    ) -> Tensor:
        program = flight.program
        try:
            received = transfer.wait()
        except RuntimeError as error:
            first = self._plan.params[program.bucket.matrices[0].param].name
            raise RuntimeError(
                f"bucket {program.number} of {len(self._plan.buckets)} ({direction} among ranks "
                f"{list(form.ranks)}, starts with {first}) did not complete: a rank failed, or "
                f"did not call step() within the timeout of the process group. {error}"
            ) from error
        if form.headers:
            raw, itemsize = received.view(torch.uint8), received.element_size()
            headers = torch.stack(
                [raw.narrow(0, at * itemsize, HEADER_BYTES) for at in form.headers.values()]
            )
            due = pack_header(self._fingerprints[program.bucket.ranks], is_well=True)
            flight.sound &= all(bytes(text) == due for text in headers.cpu().tolist())
        return received

    def _settle(self, kernel: StepKernel) -> str | None:
        """Raise, or say why nothing was done, in the same words on all ranks of a domain."""
        if self._obstacle is None:
            return None
        reason, is_fatal = self._obstacle.reason, self._obstacle.is_fatal
        here = Obstacle(reason and f"rank {self._plan.rank} cannot step: {reason}", is_fatal)
        # Twice: a reason that is found in the last domain then reaches the first one, too.
        for ranks in [*self._domains, *self._domains]:
            if ranks in self._suspects:
                facts = kernel.facts(self._params[ranks])
                told = gather_objects((here, facts), self._groups[ranks])
                known = sorted((o for o, _ in told if o.reason), key=lambda o: not o.is_fatal)
                here = known[0] if known else Obstacle(disagreement(ranks, [f for _, f in told]))
        if not here.is_fatal:
            return here.reason
        outcome = (
            "Part of the parameters has been updated: go back to the last checkpoint"
            if self._written
            else "No weight and no optimizer state was changed"
        )
        raise RuntimeError(f"{here.reason or 'another rank cannot step'}. {outcome}")


@dataclass(frozen=True, slots=True)
class _Stages:
    """An executor with what it does in this step; see :class:`~.step_order.Stages`."""

    executor: Executor
    kernel: StepKernel

    def start(self, program: Program) -> _Flight:
        return self.executor._start(program, self.kernel)

    def open(self, program: Program) -> _Flight:
        return self.executor._open(program, self.kernel)

    def compute(self, flight: _Flight) -> None:
        self.executor._compute(flight, self.kernel)

    def finish(self, flight: _Flight) -> None:
        self.executor._finish(flight, self.kernel)


def _arrived(
    parts: Sequence[Part], parcels: Sequence[Parcel], received: Tensor
) -> list[tuple[Part, Tensor]]:
    return [(part, p.of(received)) for part, p in zip(parts, parcels, strict=True)]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
