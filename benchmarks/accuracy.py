# SPDX-License-Identifier: Apache-2.0
"""Print the tables of ``docs/accuracy.md``: how near each form comes to the polar factor.

    python -m benchmarks.accuracy

Takes less than a minute on one core. The oracle is a float64 SVD.
"""

from dataclasses import replace

import torch
from torch import Tensor

from hyper_parallel.core.optimizer.coefficients import PRESETS, Schedule
from hyper_parallel.core.optimizer.forms import Form, choose_form
from hyper_parallel.core.optimizer.polar import orthogonalize_with_schedule

NUM_ROWS, NUM_COLUMNS = 128, 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def inputs() -> dict[str, Tensor]:
    """Matrices of one shape: an easy one, two ill-conditioned ones, low rank and rank one."""
    n = NUM_ROWS
    spectra = {
        "condition 1e3": torch.logspace(0, -3, n, dtype=torch.float64),
        "condition 1e6": torch.logspace(0, -6, n, dtype=torch.float64),
        "rank 10": torch.ones(10, dtype=torch.float64),
        "rank 1": torch.ones(1, dtype=torch.float64),
    }
    made = {"Gaussian": torch.randn(n, NUM_COLUMNS, dtype=torch.float64)}
    for name, S in spectra.items():
        U = torch.linalg.qr(torch.randn(n, len(S), dtype=torch.float64))[0]
        V = torch.linalg.qr(torch.randn(NUM_COLUMNS, len(S), dtype=torch.float64))[0]
        made[name] = U @ torch.diag(S) @ V.mT
    return made


def factors(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The SVD without the directions that ``X`` does not have."""
    U, S, Vh = torch.linalg.svd(X, full_matrices=False)
    rank = int(torch.count_nonzero(S / S[0] > 1e-9))
    return U[:, :rank], S[:rank], Vh[:rank]


def polynomial(S: Tensor, schedule: Schedule) -> Tensor:
    """What exact arithmetic does to singular values."""
    S = S / S.norm()
    for a, b, c in schedule:
        S = a * S + b * S**3 + c * S**5
    return S


def distance(X: Tensor, Y: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((X - Y).norm() / Y.norm())


def measure(X: Tensor, schedule: Schedule, form: Form, dtype: torch.dtype) -> tuple[str, str]:
    """Band and distance to the polar factor; distance to the polynomial."""
    U, S, Vh = factors(X)
    result = orthogonalize_with_schedule(X, schedule, method=form, dtype=dtype)
    smallest = float(torch.linalg.svdvals(U.mT @ result @ Vh.mT).min())
    largest = float(torch.linalg.matrix_norm(result, 2))
    rounding = distance(result, U @ torch.diag(polynomial(S, schedule)) @ Vh)
    return f"{smallest:.2f}-{largest:.2f}, {distance(result, U @ Vh):.3f}", f"{rounding:.0e}"


def forms_of(schedule: Schedule, dtype: str) -> dict[Form, str]:
    """Every form that some method takes, and which methods those are."""
    found: dict[Form, list[str]] = {}
    for method, device_type in (
        ("standard", "cpu"),
        ("gram", "cpu"),
        ("auto", "cpu"),
        ("auto", "cuda"),
    ):
        form = choose_form(
            NUM_ROWS, NUM_COLUMNS, schedule, method=method, dtype=dtype, device_type=device_type
        )
        name = "auto on CUDA" if device_type == "cuda" else method
        found.setdefault(replace(form, batched=True), []).append(name)
    return {
        form: ", ".join(methods).replace("auto, auto on CUDA", "auto")
        for form, methods in found.items()
    }


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """As Markdown."""
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |")
    print()


def main() -> None:
    """Print two tables: what comes out, and how much of it is rounding."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    matrices = inputs()
    results: list[list[str]] = []
    roundings: list[list[str]] = []
    for name, schedule in PRESETS.items():
        for dtype in DTYPES:
            dtype_name = str(dtype).removeprefix("torch.")
            for form, methods in forms_of(schedule, dtype_name).items():
                cells = [measure(X, schedule, form, dtype) for X in matrices.values()]
                label = [name, dtype_name, methods, str(form)]
                results.append([*label, *(cell[0] for cell in cells)])
                roundings.append([*label, *(cell[1] for cell in cells)])
    header = ["preset", "dtype", "methods", "form", *matrices]
    print("### Singular values, and distance to the polar factor\n")
    print_table(header, results)
    print("### Distance to the polynomial: rounding alone\n")
    print_table(header, roundings)


if __name__ == "__main__":
    main()
