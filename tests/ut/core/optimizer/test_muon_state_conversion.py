# SPDX-License-Identifier: Apache-2.0
"""From and to other optimizers: a run goes on as it would have with the optimizer it began with."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel import Muon
from hyper_parallel.core.optimizer import export_state, import_state
from tests.reference import JORDAN, newton_schulz

MATRICES = {"up": (12, 6), "down": (6, 12), "square": (6, 6)}
VECTORS = {"table": (7, 6), "bias": (4,)}
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.05, "betas": (0.8, 0.95)}
StateDict = dict[str, Any]


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = MATRICES | VECTORS
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


def ours(params: dict[str, nn.Parameter], **settings: Any) -> Muon:
    """All parameters in one optimizer, matrices in another order and in two groups."""
    groups: list[dict[str, Any]] = [
        {"params": [(name, params[name]) for name in ("square", "up")]},
        {"params": [(name, params[name]) for name in ("bias", "table")], "algorithm": "adamw"},
        {"params": [("down", params["down"])]},
    ]
    groups[1] |= ADAMW
    return Muon(groups, **MUON | settings)


def torchs(params: dict[str, nn.Parameter]) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
    muon = torch.optim.Muon([params[name] for name in MATRICES], **MUON)
    return muon, torch.optim.AdamW([params[name] for name in VECTORS], **ADAMW)


def give_gradients(params: dict[str, nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for p in params.values():
        p.grad = torch.randn(p.shape, generator=generator)


def train(
    params: dict[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], steps: range
) -> None:
    for number in steps:
        give_gradients(params, number)
        for optimizer in optimizers:
            optimizer.step()


def error(have: dict[str, nn.Parameter], due: dict[str, nn.Parameter]) -> float:
    return max((have[name] - due[name]).abs().max().item() for name in due)


def imported(muon: StateDict, adamw: StateDict, into: Muon, **options: Any) -> StateDict:
    state = import_state(into.state_dict(), muon, names=list(MATRICES), **options)
    return import_state(state, adamw, names=list(VECTORS), **options)


def test_a_run_of_torchs_muon_and_adamw_goes_on_here() -> None:
    """State has the same bits; after three more steps AdamW's weights too, Muon's to bfloat16."""
    params = parameters()
    muon, adamw = torchs(params)
    train(params, [muon, adamw], range(3))
    copied = copy.deepcopy(params)
    optimizer = ours(copied)
    optimizer.load_state_dict(imported(muon.state_dict(), adamw.state_dict(), optimizer))
    for name, p in copied.items():
        theirs = (muon if name in MATRICES else adamw).state[params[name]]
        assert optimizer.state[p].keys() == theirs.keys()
        assert all(torch.equal(optimizer.state[p][key], theirs[key]) for key in theirs)
    train(params, [muon, adamw], range(3, 6))
    train(copied, [optimizer], range(3, 6))
    assert all(torch.equal(params[name], copied[name]) for name in VECTORS)
    assert error(copied, params) < 3 * MUON["lr"] * 0.02


def test_a_run_here_goes_on_with_torchs_muon_and_adamw() -> None:
    params = parameters()
    optimizer = ours(params)
    train(params, [optimizer], range(3))
    copied = copy.deepcopy(params)
    state = optimizer.state_dict()
    order = ("square", "up", "down"), ("bias", "table")
    muon = torch.optim.Muon([copied[name] for name in order[0]], lr=9.0)
    muon.load_state_dict(merged(export_state(state, "muon")))
    adamw = torch.optim.AdamW([copied[name] for name in order[1]], lr=9.0)
    adamw.load_state_dict(export_state(state, "adamw"))
    for name, p in params.items():
        theirs = (muon if name in MATRICES else adamw).state[copied[name]]
        assert optimizer.state[p].keys() == theirs.keys()
        assert all(torch.equal(optimizer.state[p][key], theirs[key]) for key in theirs)
    train(params, [optimizer], range(3, 6))
    train(copied, [muon, adamw], range(3, 6))
    assert all(torch.equal(params[name], copied[name]) for name in VECTORS)
    assert error(copied, params) < 3 * MUON["lr"] * 0.02


def merged(state: StateDict) -> StateDict:
    """Groups of equal settings as one, for an optimizer that was given a list of parameters."""
    first, second = state["param_groups"]
    assert {k: first[k] for k in MUON} == {k: second[k] for k in MUON}
    params = [*first["params"], *second["params"]]
    names = [*first["param_names"], *second["param_names"]]
    return {**state, "param_groups": [{**first, "params": params, "param_names": names}]}


def sum_steps(
    params: dict[str, nn.Parameter], buffers: dict[str, Tensor], steps: range, *, nesterov: bool
) -> None:
    """Muon with a sum for momentum, as first published: ``b = mu b + g``; float64 iteration."""
    mu, lr = MUON["momentum"], MUON["lr"]
    for number in steps:
        give_gradients(params, number)
        with torch.no_grad():
            for name in MATRICES:
                p, g = params[name], params[name].grad
                assert g is not None
                buffers[name] = mu * buffers[name] + g
                direction = g + mu * buffers[name] if nesterov else buffers[name]
                update = newton_schulz(direction.double(), JORDAN)
                p.mul_(1 - lr * MUON["weight_decay"])
                p.add_(update.float(), alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_run_with_momentum_as_a_sum_goes_on_here_and_back(nesterov: bool) -> None:
    """Taken for an average, the sum would be ten times too large, and the run another one."""
    params = parameters()
    buffers = {name: torch.zeros(shape) for name, shape in MATRICES.items()}
    sum_steps(params, buffers, range(3), nesterov=nesterov)
    saved = {
        "state": {i: {"momentum_buffer": buffers[n], "use_muon": True} for i, n in names_of()},
        "param_groups": [{"params": list(range(3)), "momentum": MUON["momentum"], "lr": 1.0}],
    }
    copied = copy.deepcopy(params)
    optimizer = ours(copied, ns_dtype=torch.float64, nesterov=nesterov)
    options: dict[str, Any] = {"names": list(MATRICES)}
    state = import_state(optimizer.state_dict(), saved, momentum_convention="sum", **options)
    wrong = import_state(optimizer.state_dict(), saved, **options)
    for due, number in ((state, 0), (wrong, 1)):
        there = copy.deepcopy(params)
        optimizer = ours(there, ns_dtype=torch.float64, nesterov=nesterov)
        optimizer.load_state_dict(due)
        here, sums = copy.deepcopy(params), dict(buffers)
        train(there, [optimizer], range(3, 6))
        sum_steps(here, sums, range(3, 6), nesterov=nesterov)
        difference = error({n: there[n] for n in MATRICES}, {n: here[n] for n in MATRICES})
        assert difference < 1e-5 if number == 0 else difference > 1e-3
        if number == 0:
            back = export_state(optimizer.state_dict(), "muon", momentum_convention="sum")
            names = ("square", "up", "down")
            for i, name in enumerate(names):
                torch.testing.assert_close(back["state"][i]["momentum_buffer"], sums[name])


def names_of() -> list[tuple[int, str]]:
    return list(enumerate(MATRICES))


def test_adamw_state_under_moonlights_names_is_read() -> None:
    params = parameters()
    saved = {
        "state": {0: {"moment1": torch.ones(7, 6), "moment2": torch.ones(7, 6), "step": 5}},
        "param_groups": [{"params": [0]}],
    }
    optimizer = ours(params)
    optimizer.load_state_dict(import_state(optimizer.state_dict(), saved, names=["table"]))
    state = optimizer.state[params["table"]]
    assert state["step"] == torch.tensor(5.0)
    assert torch.equal(state["exp_avg"], torch.ones(7, 6))
    train(params, [optimizer], range(1))


def test_parameters_that_were_added_start_at_zero_and_removed_ones_are_left_out() -> None:
    """Also after they moved to other groups, where positions say nothing."""
    params = parameters()
    optimizer = ours(params)
    train(params, [optimizer], range(2))
    more: dict[str, Any] = {name: params[name] for name in ("down", "up")}
    more["new"] = nn.Parameter(torch.randn(5, 5))
    other = Muon([{"params": list(more.items())}], lr=0.3)
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"3 parameter groups, this optimizer 1.*import_state"):
        other.load_state_dict(saved)
    other.load_state_dict(import_state(other.state_dict(), saved))
    assert other.param_groups[0]["lr"] == 0.3
    assert not other.state[more["new"]]["momentum_buffer"].any()
    for name in ("down", "up"):
        due = optimizer.state[params[name]]["momentum_buffer"]
        assert torch.equal(other.state[more[name]]["momentum_buffer"], due)


def test_names_are_compared_without_wrappers() -> None:
    params = parameters()
    optimizer = ours(params)
    train(params, [optimizer], range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    for load in (lambda o: saved, lambda o: import_state(o.state_dict(), saved)):
        fresh = ours(copied := copy.deepcopy(params))
        fresh.load_state_dict(load(fresh))
        assert torch.equal(
            fresh.state[copied["up"]]["momentum_buffer"],
            optimizer.state[params["up"]]["momentum_buffer"],
        )
        assert fresh.param_groups[0]["param_names"] == ["square", "up"]


def torch_muon_state() -> StateDict:
    params = parameters()
    muon, adamw = torchs(params)
    train(params, [muon, adamw], range(1))
    return muon.state_dict()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda own: import_state(own, torch_muon_state()),
            "the saved state has no parameter names; pass names=",
            id="no names",
        ),
        pytest.param(
            lambda own: import_state(own, torch_muon_state(), names=["up"]),
            "names has 1 names, but the saved state has 3 parameters",
            id="too few names",
        ),
        pytest.param(
            lambda own: import_state(own, torch_muon_state(), names=["a", "b", "c"]),
            "no parameter of this optimizer has a name of the saved state, which has a, b, c",
            id="other names",
        ),
        pytest.param(
            lambda own: import_state(own, torch_muon_state(), names=["up", "down", "table"]),
            r"table: algorithm 'adamw' needs state step, exp_avg, exp_avg_sq, but .* momentum_buf",
            id="another algorithm",
        ),
        pytest.param(
            lambda own: import_state(own, torch_muon_state(), momentum_convention="ema"),
            r"momentum_convention must be one of \('average', 'sum'\), got 'ema'",
            id="unknown convention",
        ),
        pytest.param(
            lambda own: import_state(Muon([nn.Parameter(torch.ones(2, 2))]).state_dict(), own),
            "this optimizer's state has no parameter names.*muon_param_groups",
            id="no names here",
        ),
        pytest.param(
            lambda own: export_state(own, "sgd"),
            "algorithm must be 'muon' or 'adamw', got 'sgd'",
            id="unknown algorithm",
        ),
        pytest.param(
            lambda own: export_state(
                ours(parameters(), ns_coefficients="you").state_dict(), "muon"
            ),
            "parameter group 0: its Newton-Schulz coefficients differ by step; torch.optim.Muon",
            id="a schedule",
        ),
        pytest.param(
            lambda own: export_state(
                ours(parameters(), adjust_lr_fn="spectral").state_dict(), "muon"
            ),
            "parameter group 0: adjust_lr_fn='spectral'; torch.optim.Muon has no such setting",
            id="another factor",
        ),
        pytest.param(
            lambda own: export_state(
                ours(parameters(), matrix_view=("heads", 2)).state_dict(), "muon"
            ),
            r"parameter group 0: matrix_view=\('heads', 2\); torch.optim.Muon has no such setting",
            id="a view",
        ),
        pytest.param(
            lambda own: export_state(
                ours(parameters(), momentum=1.0).state_dict(), "muon", momentum_convention="sum"
            ),
            "parameter group 0: with momentum 1.0 a sum is no multiple of an average",
            id="momentum 1",
        ),
        pytest.param(
            lambda own: export_state(
                Muon([("a", nn.Parameter(torch.ones(2, 2)))]).state_dict(), "adamw"
            ),
            "no parameter group has algorithm 'adamw'",
            id="no such group",
        ),
    ],
)
def test_what_cannot_be_converted_is_named(
    call: Callable[[StateDict], StateDict], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(ours(parameters()).state_dict())


def test_arguments_are_not_modified() -> None:
    params = parameters()
    optimizer = ours(params)
    own, saved = copy.deepcopy((optimizer.state_dict(), torch_muon_state()))
    kept = copy.deepcopy((own, saved))
    import_state(own, saved, names=list(MATRICES), momentum_convention="sum")
    export_state(own, "muon", momentum_convention="sum")
    for have, due in zip((own, saved), kept, strict=True):
        assert have["param_groups"] == due["param_groups"]
        for key, state in due["state"].items():
            assert all(torch.equal(have["state"][key][kind], state[kind]) for kind in state)
