# SPDX-License-Identifier: Apache-2.0
"""What every report is made from, and its headline numbers in plain words."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from hyper_parallel.core.optimizer.choices import GroupChoice, explain
from hyper_parallel.core.optimizer.hardware import Hardware
from hyper_parallel.core.optimizer.layout import MeshLayout
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.report import quantity
from hyper_parallel.core.optimizer.scaling import (
    ResizableAxis,
    ScalingPoint,
    longest_axis,
    scaling_curve,
)
from hyper_parallel.core.optimizer.simulation import Simulation, simulate
from hyper_parallel.core.optimizer.strategies import STRATEGIES

SCHEMA_VERSION: Final = 1
REPEAT: Final = "gather and repeat"

SCALING_COLUMNS: Final = (
    "ranks",
    "mesh",
    "step",
    "FLOP, busiest",
    "received",
    "memory",
    "idle ranks",
)
"""What a table says of each point of a scaling curve; see :func:`scaling_cells`."""

# Bytes to each peer, on average, below which latency takes longer than the bytes on current links.
_SHORT_MESSAGE: Final = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A number that stands at the top.

    Attributes:
        value: With its unit.
        label: What it is.
        note: What it means, in a sentence.
    """

    value: str
    label: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan, what it would cost, and what else one could do.

    Attributes:
        title: What was planned.
        hardware: What it would run on.
        simulation: A step of all ranks.
        choices: Strategies compared, one entry per group of parameters.
        scaling: The same on fewer and on more ranks; may be empty.
    """

    title: str
    hardware: Hardware
    simulation: Simulation
    choices: tuple[GroupChoice, ...]
    scaling: tuple[ScalingPoint, ...]

    @property
    def mesh_text(self) -> str:
        """The mesh in short: ``dp = 4 x tp = 2``."""
        axes = zip(self.simulation.axis_names, self.simulation.mesh_shape, strict=True)
        return " x ".join(f"{name} = {size}" for name, size in axes) or "one rank"

    @property
    def scaling_text(self) -> str:
        """What grows along the scaling curve, in short: ``dp_shard from 16 to 1,024``."""
        first, last = self.scaling[0], self.scaling[-1]
        return f"{first.axis} from {first.axis_size:,} to {last.axis_size:,}"

    def is_planned(self, point: ScalingPoint) -> bool:
        """Whether a point of the scaling curve is the plan itself."""
        return point.num_ranks == len(self.simulation.ranks)

    def headlines(self) -> tuple[Headline, ...]:
        """Step time, balance, traffic and memory."""
        simulation, busiest = self.simulation, self.simulation.busiest
        return (
            Headline(
                value=duration(simulation.step_s),
                label="predicted Muon step",
                note=self._compared_text(),
            ),
            Headline(
                value=f"{simulation.imbalance:.2f}",
                label="busiest rank / mean",
                note=self._balance_text(),
            ),
            Headline(
                value=quantity(busiest.received_bytes, "B"),
                label="received per step",
                note=self._traffic_text(),
            ),
            Headline(
                value=quantity(busiest.peak_extra_bytes, "B"),
                label="extra memory, peak",
                note=self._memory_text(),
            ),
        )

    def _compared_text(self) -> str:
        repeat = sum(s.seconds for g in self.choices for s in g.strategies if s.name == REPEAT)
        exposed = self.simulation.exposed_exchange_s
        text = f"{duration(exposed)} of it waiting for exchanges"
        if repeat > 0 and self.simulation.step_s > 0:
            busy = self.simulation.busiest.seconds_by_lane
            repeat += busy["prepare"] + busy["apply"]  # momentum and weights, in any strategy
            text += f"; gathering and repeating takes about {duration(repeat)}"
        return text

    def _balance_text(self) -> str:
        simulation = self.simulation
        total = len(simulation.ranks)
        if simulation.num_idle:
            return (
                f"{simulation.num_idle:,} of {total:,} ranks own no matrix: there are "
                f"{simulation.num_matrices:,}"
            )
        worst = max(self.choices, key=lambda c: c.imbalance, default=None)
        if simulation.imbalance <= 1.05 or worst is None:
            return f"{simulation.num_matrices:,} matrices spread evenly over {total:,} ranks"
        return f"{simulation.num_matrices:,} matrices over {total:,} ranks"

    def _traffic_text(self) -> str:
        links = self.simulation.busiest.received_by_link
        total = sum(links.values())
        if not total:
            return "nothing travels"
        collectives = self.simulation.busiest.num_collectives
        far = links["between_nodes"] / total
        text = f"{counted(collectives, 'all-to-all')}; {far:.0%} of the bytes come from other nodes"
        each = total / collectives / max(1, len(self.simulation.ranks) - 1)
        if each < _SHORT_MESSAGE and self.simulation.num_buckets > 1:
            text += f"; messages are short, {quantity(each, 'B')}: raise bucket_bytes"
        return text

    def _memory_text(self) -> str:
        busiest = self.simulation.busiest
        share = (busiest.peak_extra_bytes + busiest.momentum_bytes) / self.hardware.memory_bytes
        return (
            f"and {quantity(busiest.momentum_bytes, 'B')} of momentum that stays; together "
            f"{share:.1%} of {self.hardware.name}'s memory"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold, as ``schema.json`` describes them."""
        return {
            "version": SCHEMA_VERSION,
            "title": self.title,
            "mesh": self.mesh_text,
            "headlines": [asdict(headline) for headline in self.headlines()],
            "hardware": asdict(self.hardware),
            "simulation": self.simulation.to_dict(),
            "strategies": STRATEGIES,
            "choices": [choice.to_dict() for choice in self.choices],
            "scaling": [point.to_dict() for point in self.scaling],
        }


def build_report(
    plan: Plan,
    hardware: Hardware,
    *,
    title: str,
    axis_names: Sequence[str] | None = None,
    mesh: MeshLayout | None = None,
    storage_dtype: str = "float32",
    axis: ResizableAxis | None = None,
    with_scaling: bool = True,
) -> Report:
    """Simulate a plan and compare what else one could do.

    Args:
        plan: The plan of any rank.
        hardware: What it would run on.
        title: What was planned.
        axis_names: Names of the mesh axes.
        mesh: The mesh of all ranks. None takes the largest of the parameters' meshes.
        storage_dtype: Dtype of gradients and momentum.
        axis: What the scaling curve makes longer and shorter. None takes that of
            :func:`~hyper_parallel.core.optimizer.scaling.longest_axis`.
        with_scaling: Whether to plan again for fewer and more ranks.

    Returns:
        The report.

    What cannot be simulated raises as :func:`~hyper_parallel.core.optimizer.simulation.simulate`
    says.
    """
    simulation = simulate(
        plan, hardware, axis_names=axis_names, mesh=mesh, storage_dtype=storage_dtype
    )
    axis = axis or longest_axis(plan, axis_names=axis_names, mesh=mesh)
    scaling: tuple[ScalingPoint, ...] = ()
    if with_scaling and axis is not None:
        scaling = scaling_curve(simulation, hardware, axis, storage_dtype=storage_dtype)
    return Report(
        title=title,
        hardware=hardware,
        simulation=simulation,
        choices=explain(plan, hardware, mesh=mesh),
        scaling=scaling,
    )


def scaling_cells(point: ScalingPoint) -> tuple[str, ...]:
    """A point of a scaling curve as a row of a table.

    Args:
        point: The point.

    Returns:
        One text for each of :data:`SCALING_COLUMNS`.
    """
    return (
        f"{point.num_ranks:,}",
        " x ".join(map(str, point.mesh_shape)),
        duration(point.step_s),
        quantity(point.max_flops, "FLOP"),
        quantity(point.received_bytes, "B"),
        quantity(point.peak_extra_bytes, "B"),
        f"{point.num_idle:,}",
    )


def elements(number: int) -> str:
    """A number of elements in words.

    Args:
        number: How many.

    Returns:
        Three digits, and million, billion or trillion.

    Example:
        >>> elements(1_020_000_000_000), elements(8_030_000_000)
        ('1.02 trillion elements', '8.03 billion elements')
    """
    for scale, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= scale:
            return f"{number / scale:.3g} {word} elements"
    return f"{number:,} elements"


def duration(seconds: float) -> str:
    """A time with a fitting unit.

    Args:
        seconds: The time.

    Returns:
        Three digits and the unit.

    Example:
        >>> duration(0.01234), duration(75)
        ('12.3 ms', '75 s')
    """
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things.

    Args:
        number: How many.
        one: What one is called.
        many: What several are called; with an "s" if empty.

    Returns:
        Number and word.

    Example:
        >>> counted(1, "bucket"), counted(2000, "matrix", "matrices")
        ('1 bucket', '2,000 matrices')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"
