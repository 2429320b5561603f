# SPDX-License-Identifier: Apache-2.0
"""Measure this machine in under a minute, and say what was found as a hardware record."""

import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from hyper_parallel.calibration.compute_rates import (
    MatrixProbes,
    memory_probe,
    operation_probe,
)
from hyper_parallel.calibration.crowd import Crowd
from hyper_parallel.calibration.exchange_rates import (
    cores_in_effect,
    crowd_probes,
    exchange_probes,
    fit_link,
)
from hyper_parallel.calibration.reference_step import reference_optimizer, scaled
from hyper_parallel.calibration.timing import Probe, time_in_turn
from hyper_parallel.core.optimizer.hardware import Hardware, Link, MatrixRate
from hyper_parallel.core.optimizer.simulation import simulate

Progress = Callable[[str, float], None]
"""Told what is measured now, and how much of all is done, from 0 to 1."""

DTYPES: Final = ("bfloat16", "float32", "float64")
_START_UP_S: Final = 15  # of ranks, and a round to find out how long one takes
_TIMEOUT: Final = timedelta(seconds=120)


def calibrate(
    num_ranks: int | None = None,
    *,
    budget_s: float = 45,
    name: str | None = None,
    progress: Progress = lambda _what, _done: None,
) -> Hardware:
    """Measure matrix products, memory and exchanges of this machine.

    All ranks measure beside each other, as in a step. On a CPU each has one thread. Where
    there are more ranks than cores, rates are those of a rank times the ranks that share a core: so
    the turns, and the caches that others leave behind, are in them. In the end all of them are
    scaled so that the prediction of a reference step is what it takes.

    Args:
        num_ranks: Ranks of a node. None means one per GPU, or one per core.
        budget_s: Seconds to take, about; at least 20.
        name: What to call it. None means the machine's name.
        progress: Told what goes on.

    Returns:
        The hardware, to be written by
        :func:`~hyper_parallel.core.optimizer.hardware.save_hardware`.

    Raises:
        ValueError: If ``num_ranks`` or ``budget_s`` is too small.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    at_once = torch.cuda.device_count() if device_type == "cuda" else (cores or 1)
    num_ranks = at_once if num_ranks is None else num_ranks
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
    if budget_s < _START_UP_S + 5:
        raise ValueError(f"budget_s: expected at least {_START_UP_S + 5}, got {budget_s}")
    progress(f"matrix products, memory and exchanges, on {num_ranks} ranks at once", 0.0)
    is_crowded = device_type == "cpu" and num_ranks > (cores or 1)
    seen = _on_ranks(_Task(num_ranks, device_type, budget_s - _START_UP_S, is_crowded))
    link = Link(latency_s=0.0, bytes_per_s=seen[0]["memory"])  # a rank alone exchanges nothing
    if num_ranks > 1:
        link = fit_link(seen[0]["exchanges"], num_ranks - 1)
    in_effect = None
    if device_type == "cpu":
        alone_s, together_s = seen[0]["crowd"]
        in_effect = cores_in_effect(alone_s, together_s, num_ranks=num_ranks, num_cores=cores or 1)
    turns = num_ranks / in_effect if in_effect and is_crowded else 1.0  # ranks that share a core
    hardware = Hardware(
        name=name or platform.node() or device_type,
        source=f"measured by hyper-parallel calibrate on {platform.platform(terse=True)}, "
        f"torch {torch.__version__}, {num_ranks} ranks",
        device_type=device_type,
        matrix_rates={d: _mean_rate([rank[d] for rank in seen]).faster(turns) for d in DTYPES},
        memory_bytes_per_s=statistics.fmean(rank["memory"] for rank in seen) * turns,
        memory_bytes=_memory_bytes(device_type) / (num_ranks if device_type == "cpu" else 1),
        operation_s=statistics.fmean(rank["operation"] for rank in seen) / turns,
        within_node=link,
        between_nodes=link,
        ranks_per_node=num_ranks,
        cores_per_node=in_effect,
    )
    plan, step_s = seen[0]["step"]
    progress("done", 1.0)
    return scaled(hardware, step_s / simulate(plan, hardware).step_s)


def _mean_rate(rates: list[MatrixRate]) -> MatrixRate:
    """Ranks measure the same sizes; their rates at each are averaged."""
    columns = zip(*(rate.measured for rate in rates), strict=True)
    return MatrixRate(
        peak_flops_per_s=statistics.fmean(rate.peak_flops_per_s for rate in rates),
        half_size=statistics.fmean(rate.half_size for rate in rates),
        measured=tuple(
            (points[0][0], statistics.fmean(rate for _, rate in points)) for points in columns
        ),
    )


def _memory_bytes(device_type: str) -> float:
    if device_type == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@dataclass(frozen=True, slots=True)
class _Task:
    num_ranks: int
    device_type: str
    budget_s: float
    is_crowded: bool  # more ranks than cores


def _on_ranks(task: _Task) -> list[Any]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(  # type: ignore[no-untyped-call]
            _measure, args=(task, folder), nprocs=task.num_ranks
        )
        paths = [Path(folder) / f"{rank}.pt" for rank in range(task.num_ranks)]
        return [torch.load(path, weights_only=False) for path in paths]


def _measure(rank: int, task: _Task, folder: str) -> None:
    device = torch.device("cpu")
    if task.device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if task.device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=task.num_ranks,
        timeout=_TIMEOUT,
    )
    crowd = Crowd(rank, task.num_ranks, device)
    torch.save(_found(crowd, task), Path(folder) / f"{rank}.pt")
    crowd.meet()  # nobody leaves early
    dist.destroy_process_group()
    # A thread of gloo's was seen to abort an interpreter that tidied up.
    os._exit(0)


def _found(crowd: Crowd, task: _Task) -> dict[str, Any]:
    crowded, on_cpu = task.is_crowded, crowd.device.type == "cpu"
    exchanges = exchange_probes(crowd)
    operation, num_launches = operation_probe(crowd.device, waits_for_all=crowded)
    memory, nbytes = memory_probe(crowd.device, waits_for_all=crowded)
    matrices = {d: MatrixProbes(d, crowd.device, waits_for_all=crowded) for d in DTYPES}
    optimizer = reference_optimizer(crowd.num_ranks, crowd.device)
    step = Probe(call=optimizer.step, once=True, waits_for_all=True)
    probes = {"operation": operation, "memory": memory, "step": step}
    probes |= {f"exchange of {size}": probe for size, probe in exchanges.items()}
    if on_cpu:
        probes["alone"], probes["together"] = crowd_probes()
    for one in matrices.values():
        probes |= one.probes
    times = time_in_turn(probes, crowd, budget_s=task.budget_s)
    operation_s = times["operation"] / num_launches
    return {
        "operation": operation_s,
        "memory": nbytes / times["memory"],
        "exchanges": [(size, times[f"exchange of {size}"]) for size in exchanges],
        "step": (optimizer.plan, times["step"]),
        "crowd": (times["alone"], times["together"]) if on_cpu else None,
        **{d: one.rate(times, operation_s=operation_s) for d, one in matrices.items()},
    }
