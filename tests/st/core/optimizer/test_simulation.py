# SPDX-License-Identifier: Apache-2.0
"""What is simulated is the plan that runs: its counts are those of real ranks."""

from dataclasses import dataclass

import pytest

from benchmarks.steps_ranks import GRAD_SEED, Entry
from benchmarks.steps_recorder import StepRecorder
from benchmarks.steps_work import SCENARIOS, Job, make_mesh, whole_tensors, work_of
from hyper_parallel import Muon
from hyper_parallel.core.optimizer.hardware_presets import PRESETS
from hyper_parallel.core.optimizer.layout import MeshLayout
from hyper_parallel.core.optimizer.simulation import Simulation, rank_step, simulate
from tests.pool import Pools

pytestmark = pytest.mark.dist

RANKS = 4
LARGE = 1 << 30
# Small enough for a test, large enough that headers and scalars are little beside the matrices.
SIZES = {"few-large": 64, "many-small": 256}


@dataclass(frozen=True)
class Seen:
    """What a rank counted, and what it predicts for all ranks."""

    flops: int
    received: int
    collectives: int
    peak: int
    simulation: Simulation
    simulated_peak: int


def count(job: Job, bucket_bytes: int, share: bool | str, method: str) -> Seen:
    work = work_of(job)
    entry = Entry("ours", work, make_mesh(work), whole_tensors(work, GRAD_SEED))
    optimizer = entry.stepper
    assert isinstance(optimizer, Muon)
    optimizer = entry.stepper = Muon(
        entry.params,
        ns_method=method,
        share_replicas=share,
        replicate_mesh=make_mesh(work) if job.scenario == "ddp" else None,
        bucket_bytes=bucket_bytes,
    )
    entry.refresh()
    entry.step()
    recorders = []
    for _ in range(3):
        entry.refresh()
        with StepRecorder() as recorder:
            entry.step()
        recorders.append(recorder)
    recorder = recorders[0]
    mesh = MeshLayout(shape=work.mesh_shape, ranks=tuple(range(job.ranks)))
    plan, names = optimizer.plan, [f"axis {i}" for i in range(len(work.mesh_shape))]
    here = rank_step(plan, plan.rank, PRESETS["cpu"], mesh=mesh, axis_names=names)
    return Seen(
        flops=recorder.flops,
        received=round(recorder.received),
        collectives=sum(recorder.collectives.values()),
        peak=min(
            r.peak for r in recorders
        ),  # gloo's thread sometimes holds a buffer a moment longer
        simulation=simulate(plan, PRESETS["cpu"], mesh=mesh),
        simulated_peak=here.peak_extra_bytes,
    )


def check(seen: list[Seen]) -> None:
    busiest = seen[0].simulation.busiest
    assert busiest.flops == max(s.flops for s in seen)
    for rank, one in enumerate(seen):
        for said in (s.simulation for s in seen):
            assert said.flops[rank] == one.flops
            assert said.received_bytes[rank] == one.received
        assert one.simulation.busiest.num_collectives == one.collectives
        assert one.peak <= one.simulated_peak <= 1.25 * one.peak, (rank, one.peak)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_simulated_step_counts_what_a_real_one_does(scenario: str, ranks: Pools) -> None:
    job = Job(scenario, RANKS, SIZES.get(scenario, 128))
    check(ranks.run(RANKS, count, job, LARGE, "auto", "auto"))


@pytest.mark.parametrize("scenario", ["hsdp", "ddp"])
@pytest.mark.parametrize("share", [True, False])
def test_it_does_whether_replicas_share_or_not(scenario: str, share: bool, ranks: Pools) -> None:
    check(ranks.run(RANKS, count, Job(scenario, RANKS, 128), LARGE, share, "auto"))


@pytest.mark.parametrize("scenario", ["fsdp", "hsdp", "fsdp-tp-columns"])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_it_does_with_many_buckets_in_each_form(scenario: str, method: str, ranks: Pools) -> None:
    check(ranks.run(RANKS, count, Job(scenario, RANKS, 128), 1 << 17, True, method))
