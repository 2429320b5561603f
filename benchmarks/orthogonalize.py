# SPDX-License-Identifier: Apache-2.0
"""Time every method against ``torch.optim.Muon``'s own function, on one shape after the other.

    python -m benchmarks.orthogonalize --threads 1

Calls are interleaved in random order, so that a busy machine slows all of them alike, and the
numbers are ratios of medians. One thread is timed by its CPU time, several by the clock. torch's
function works in bfloat16; for float32 it is repeated here with the cast left out.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from hyper_parallel import orthogonalize
from hyper_parallel.core.optimizer.coefficients import PRESETS
from hyper_parallel.core.optimizer.forms import METHODS, choose_form

SHAPES = (
    (256, 256),
    (512, 512),
    (1024, 1024),
    (256, 1024),
    (1024, 4096),
    (512, 4096),
    (16, 64, 64),
)
JORDAN = PRESETS["jordan"]


def torch_muon(X: Tensor, dtype: torch.dtype) -> Tensor:
    """``torch.optim.Muon``'s function, or the same lines in another dtype."""
    if X.ndim > 2:
        return torch.stack([torch_muon(matrix, dtype) for matrix in X])
    if dtype == torch.bfloat16:
        return _zeropower_via_newtonschulz(X, JORDAN[0], len(JORDAN), 1e-7)
    Y = X.to(dtype)
    Y = Y.T if Y.size(0) > Y.size(1) else Y
    Y = Y / Y.norm().clamp(min=1e-7)
    for a, b, c in JORDAN:
        A = Y @ Y.T
        A = torch.addmm(A, A, A, beta=b, alpha=c)
        Y = torch.addmm(Y, A, Y, beta=a)
    return Y.T if X.size(0) > X.size(1) else Y


def ratios(
    calls: dict[str, Callable[[], Tensor]], base: str, *, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median time of each call over that of one of them."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name in random.sample(sorted(calls), len(calls)):
            start = clock()
            calls[name]()
            if number:  # the first round warms up
                times[name].append(clock() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {name: median / medians[base] for name, median in medians.items()}


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    print(f"Time over that of torch.optim.Muon's function, {arguments.threads} thread(s).\n")
    print(f"| shape | dtype | {' | '.join(METHODS)} | auto takes |")
    print(f"|{' --- |' * (len(METHODS) + 3)}")
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            X = torch.randn(shape)
            calls: dict[str, Callable[[], Tensor]] = {"torch": partial(torch_muon, X, dtype)}
            for method in METHODS:
                calls[method] = partial(orthogonalize, X, method=method, dtype=dtype)
            found = ratios(calls, "torch", rounds=arguments.rounds, clock=clock)
            name = str(dtype).removeprefix("torch.")
            form = choose_form(*shape[-2:], JORDAN, method="auto", dtype=name, device_type="cpu")
            cells = " | ".join(f"{found[method]:.2f}" for method in METHODS)
            print(f"| {'x'.join(map(str, shape))} | {name} | {cells} | {form} |", flush=True)


if __name__ == "__main__":
    main()
