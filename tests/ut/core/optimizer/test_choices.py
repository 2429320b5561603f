# SPDX-License-Identifier: Apache-2.0
"""Choices: what is compared, which one the plan takes, and sentences that say why."""

import pytest

from hyper_parallel.core.optimizer.choices import GroupChoice, explain
from hyper_parallel.core.optimizer.hardware_presets import PRESETS
from hyper_parallel.core.optimizer.layout import AxisPlacement
from hyper_parallel.core.optimizer.planner import build_plan
from hyper_parallel.core.optimizer.simulation import simulate
from hyper_parallel.core.optimizer.strategies import STRATEGIES
from tests.planned import LARGE, S0, S1, R, experts, mesh_of, plan_of, planned, transformer

H100 = PRESETS["h100"]


def only(choices: tuple[GroupChoice, ...]) -> GroupChoice:
    (choice,) = choices
    return choice


def test_sharded_matrices_have_owners() -> None:
    params = transformer(mesh_of(8), (S0,), num_layers=8, width=1024)
    choice = only(explain(plan_of(params), H100))
    assert choice.chosen == "owner, direct"
    assert [s.name for s in choice.strategies] == ["owner, direct", "gather and repeat"]
    ours, repeat = choice.strategies
    assert ours.seconds < repeat.seconds / 4
    assert repeat.flops == pytest.approx(8 * ours.flops, rel=0.01)
    assert "1/8 " in choice.reason
    assert choice.bound == "The work is even."
    assert choice.advice == ""


def test_gathering_and_repeating_takes_one_matrix_after_the_other() -> None:
    """As those do who ship it: the launches of small matrices are not shared in a batch."""
    few = transformer(mesh_of(1), (S0,), num_layers=2, width=128)
    many = transformer(mesh_of(1), (S0,), num_layers=20, width=128)
    seconds = []
    for params in (few, many):
        (choice,) = explain(plan_of(params), H100)
        seconds.append({s.name: s.seconds for s in choice.strategies})
    repeat = [found["gather and repeat"] for found in seconds]
    together = [found["local"] for found in seconds]
    assert repeat[1] == pytest.approx(10 * repeat[0])
    assert together[1] < 5 * together[0]


def test_what_is_predicted_for_owners_is_what_the_plan_counts() -> None:
    params = transformer(mesh_of(8), (S0,), num_layers=8, width=1024)
    plan = plan_of(params)
    choice, said = only(explain(plan, H100)), simulate(plan, H100)
    assert choice.strategies[0].flops == said.max_flops
    headers = 2 * 7 * 16
    assert choice.strategies[0].received_bytes + headers == pytest.approx(
        max(said.received_bytes), rel=0.02
    )
    assert choice.imbalance == said.imbalance


def test_whole_stacks_stay_where_they_are() -> None:
    stacks = [planned((16, 256, 128), mesh_of(8), (S0,))]
    choice = only(explain(plan_of(stacks), H100))
    assert choice.chosen == "local"
    assert choice.strategies[0].received_bytes == 0
    assert choice.reason == "Each rank holds its matrices whole, so nothing has to travel."


def test_replicas_share_or_repeat_as_the_plan_has_it() -> None:
    mesh = mesh_of(2, 4)
    shared = transformer(mesh, (R, S0), num_layers=4, width=512)
    staged = build_plan(shared, rank=0, bucket_bytes=LARGE, replica_route="staged")
    assert only(explain(staged, H100)).chosen == "owner, staged"
    direct = only(explain(plan_of(shared), H100))
    assert direct.chosen == "owner, direct"
    assert {s.name for s in direct.strategies} == set(STRATEGIES) - {"local"}
    by_name = {s.name: s for s in direct.strategies}
    alone = by_name["owner in each replica"]
    assert alone.flops == pytest.approx(2 * by_name["owner, direct"].flops, rel=0.2)


def test_whole_matrices_on_replicas_compare_sharing_with_repeating() -> None:
    choice = only(explain(plan_of(transformer(mesh_of(8), (R,), num_layers=2, width=512)), H100))
    assert choice.chosen == "owner, direct"
    by_name = {s.name: s for s in choice.strategies}
    assert by_name["local"].flops == by_name["gather and repeat"].flops
    assert by_name["local"].flops > 6 * by_name["owner, direct"].flops
    assert "one message back" in choice.reason


def test_idle_ranks_get_advice() -> None:
    choice = only(explain(plan_of([planned((64, 64), mesh_of(8), (S0,))]), H100))
    assert choice.num_idle == 7
    assert "7 ranks have nothing to do" in choice.advice
    assert "no owner can do less" in choice.bound


def test_groups_on_the_same_ranks_are_balanced_together() -> None:
    """Each alone has too few matrices for eight ranks; together they have eight."""
    mesh = mesh_of(8)
    params = [planned((64, 64), mesh, (axis,)) for axis in (S0, S1) for _ in range(4)]
    choices = explain(plan_of(params), H100)
    assert len(choices) == 2
    assert {choice.num_idle for choice in choices} == {0}
    assert {choice.imbalance for choice in choices} == {1.0}


def test_every_group_has_one_choice_and_plain_sentences() -> None:
    params = experts(mesh_of(2, 8), num_layers=1, num_experts=16)
    params.append(planned((64, 64), mesh_of(2, 8), (AxisPlacement(dim=0), R), "other"))
    choices = explain(plan_of(params), H100)
    assert sum(choice.num_params for choice in choices) == len(params)
    for choice in choices:
        assert choice.chosen == choice.strategies[0].name
        assert {s.name for s in choice.strategies} <= set(STRATEGIES)
        for sentence in (choice.reason, choice.bound):
            assert sentence[0].isupper()
            assert sentence.endswith(".")
        times = [s.seconds for s in choice.strategies[1:]]
        assert times == sorted(times)


def test_an_empty_plan_has_no_choices() -> None:
    assert explain(plan_of([]), H100) == ()
