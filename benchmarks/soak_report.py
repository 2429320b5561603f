# SPDX-License-Identifier: Apache-2.0
"""What is left of a run under kills, beside the same run without them."""

import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from examples.checkpoint import newest_checkpoint
from examples.run_log import read_steps

Event = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run that has come to its end.

    Attributes:
        run_dir: Folder of ``examples/train_gpt.py``.
        steps: Optimizer steps of the whole run.
        starts: One event for each time that the ranks began to step.
        faults: One event for each kill.
        wall_s: Seconds from the first start to the end.
    """

    run_dir: Path
    steps: int
    starts: list[Event]
    faults: list[Event]
    wall_s: float

    def losses(self) -> list[float]:
        """Training loss of each step, over all ranks.

        Returns:
            One value a step.

        Raises:
            RuntimeError: If a step is missing from the metrics, or is there twice.
        """
        records = read_steps(self.run_dir / "metrics.jsonl")
        if [record["step"] for record in records] != list(range(1, self.steps + 1)):
            raise RuntimeError(f"the metrics in {self.run_dir} do not hold each step once")
        return [record["loss"] for record in records]

    def final_state(self) -> dict[str, Tensor]:
        """Weights and optimizer state at the end, whole, by their path in the checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "state.pt"
            dcp_to_torch_save(newest_checkpoint(self.run_dir), file)
            state = torch.load(file, weights_only=False)["training"]
        if state["step"] != self.steps:
            raise RuntimeError(f"the last checkpoint in {self.run_dir} is of step {state['step']}")
        return dict(tensors_of({key: state[key] for key in ("model", "optimizer")}))

    def recomputed(self) -> list[int]:
        """Steps that were done again after each kill."""
        counts = []
        for fault, start in self._pairs():
            blow = fault["fault"]
            done = blow["step"] if blow["place"] == "save" else blow["step"] - 1
            counts.append(done - start["step"])
        return counts

    def restart_s(self) -> list[float]:
        """Seconds from each kill to the next step."""
        return [start["time_s"] - fault["time_s"] for fault, start in self._pairs()]

    def first_step_on_other_ranks(self) -> int:
        """The first step that another number of ranks did than the one before."""
        first = self.starts[0]["world_size"]
        moves = [start["step"] for start in self.starts if start["world_size"] != first]
        return moves[0] + 1 if moves else self.steps + 1

    def _pairs(self) -> Iterator[tuple[Event, Event]]:
        for fault in self.faults:
            later = [start for start in self.starts if start["time_s"] > fault["time_s"]]
            yield fault, later[0]


def tensors_of(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Walk a state dict.

    Args:
        tree: Nested mappings and lists.
        path: Of ``tree`` itself.

    Yields:
        Path and tensor.
    """
    for key, value in tree.items():
        here = f"{path}/{key}"
        if isinstance(value, Tensor):
            yield here, value
        elif isinstance(value, Mapping):
            yield from tensors_of(value, here)
        elif isinstance(value, list):
            yield from tensors_of({str(i): item for i, item in enumerate(value)}, here)


def compare(soaked: Outcome, *, moved: Outcome, undisturbed: Outcome) -> Result:
    """Hold a run under kills to those without.

    Args:
        soaked: The run under kills.
        moved: On the same numbers of ranks, changed at the same steps.
        undisturbed: On the first number of ranks throughout.

    Returns:
        Figures, as JSON holds them. ``bitwise`` is whether ``soaked`` has the bits of ``moved``.
    """
    change = soaked.first_step_on_other_ranks()
    losses, moved_losses, plain = soaked.losses(), moved.losses(), undisturbed.losses()
    state, moved_state = soaked.final_state(), moved.final_state()
    plain_state = undisturbed.final_state()
    assert state.keys() == moved_state.keys() == plain_state.keys()
    other_tensors = sum(not torch.equal(state[key], moved_state[key]) for key in state)
    other_losses = sum(a != b for a, b in zip(losses, moved_losses, strict=True))
    before = [a != b for a, b in zip(losses[: change - 1], plain[: change - 1], strict=True)]
    after = [abs(a - b) for a, b in zip(losses[change - 1 :], plain[change - 1 :], strict=True)]
    recomputed = soaked.recomputed()
    weights = [key for key in state if key.startswith("/model")]
    return {
        "steps": soaked.steps,
        "ranks": list(dict.fromkeys(start["world_size"] for start in soaked.starts)),
        "kills": dict(Counter(event["fault"]["place"] for event in soaked.faults)),
        "starts": len(soaked.starts),
        "recomputed": sum(recomputed),
        "most_recomputed": max(recomputed),
        "restart_s": statistics.median(soaked.restart_s()),
        "wall_s": {
            "undisturbed": undisturbed.wall_s,
            "moved": moved.wall_s,
            "soaked": soaked.wall_s,
        },
        "tensors": len(state),
        "other_tensors": other_tensors,
        "other_losses": other_losses,
        "bitwise": not (other_tensors or other_losses or any(before)),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "first_step_on_other_ranks": change,
        "other_losses_before_the_change": sum(before),
        "loss_distance_after_the_change": max(after, default=0.0),
        "weight_distance_after_the_change": distance(
            [state[key] for key in weights], [plain_state[key] for key in weights]
        ),
    }


def distance(tensors: list[Tensor], others: list[Tensor]) -> float:
    """Norm of the difference over the norm.

    Args:
        tensors: Any shapes.
        others: The same shapes.

    Returns:
        A relative distance, 0 for the same bits.
    """
    difference = sum((a - b).double().square().sum() for a, b in zip(tensors, others, strict=True))
    return float((difference / sum(b.double().square().sum() for b in others)) ** 0.5)


def report(result: Result) -> str:
    """Write the figures as a Markdown table.

    Args:
        result: Of :func:`compare`.

    Returns:
        The table.
    """
    kills = ", ".join(f"{count} in {place}" for place, count in sorted(result["kills"].items()))
    wall_s = result["wall_s"]
    rows = {
        "optimizer steps": f"{result['steps']:,}",
        "ranks, one after the other": ", ".join(map(str, result["ranks"])),
        "kills survived": f"{sum(result['kills'].values())}: {kills}",
        "steps done again": (
            f"{result['recomputed']} in all, at most {result['most_recomputed']} a kill"
        ),
        "state lost": f"{result['other_tensors']} of {result['tensors']} tensors",
        "losses that differ": f"{result['other_losses']} of {result['steps']:,}",
        "loss, first and last step": f"{result['first_loss']:.4f}, {result['last_loss']:.4f}",
        "bits of the undisturbed run kept": (
            f"up to step {result['first_step_on_other_ranks'] - 1}, where the ranks change"
            if not result["other_losses_before_the_change"]
            else f"no: {result['other_losses_before_the_change']} losses differ before any change"
        ),
        "distance from it afterwards": (
            f"loss {result['loss_distance_after_the_change']:.1e}, "
            f"final weights {result['weight_distance_after_the_change']:.1e} of their norm"
        ),
        "from a kill to the next step": f"{result['restart_s']:.1f} s, median",
        "wall time": f"{wall_s['soaked']:.0f} s; without kills {wall_s['moved']:.0f} s",
    }
    lines = ["| figure | value |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows.items()])
