# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of Muon on one process, and what each is told.

Read the tables as documentation: what is refused, and the words of the message that help. Each row
gives its name, the mistake, the error and what its message must contain, in that order.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyper_parallel import Muon, clip_grad_norm_, orthogonalize

Mistake = Callable[[], object]
Row = tuple[str, Mistake, type[Exception], list[str]]

NAN, INF = math.nan, math.inf
POINTS_TO_ADAMW = "algorithm='adamw'"


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (4, 8), dtype=dtype), requires_grad=False)


def muon(**settings: Any) -> Muon:
    """Settings of the constructor."""
    return Muon([weight()], **settings)


def untyped(params: Any) -> Muon:
    """Parameters that a type checker refuses, too."""
    return Muon(params)


def group(**settings: Any) -> Muon:
    """Settings of a second group, of Muon."""
    first: dict[str, Any] = {"params": [weight(), weight()]}
    return Muon([first, {"params": [weight()], **settings}])


def adamw(**settings: Any) -> Muon:
    """Settings of a group of AdamW."""
    return Muon([{"params": [weight()], "algorithm": "adamw", **settings}])


def repeated(*, groups: int) -> Muon:
    """A parameter that is listed twice."""
    p = weight()
    if groups == 1:
        return Muon([("first", p), ("second", p)])
    return Muon([{"params": [p]}, {"params": [p]}])


def ids(rows: list[Row]) -> list[Any]:
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


def assert_told(mistake: Mistake, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        mistake()
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


# --- Parameters -----------------------------------------------------------------------------

PARAMETERS: list[Row] = [
    (
        "a bias",
        lambda: Muon([("layer.bias", weight(3))]),
        ValueError,
        ["layer.bias", "at least 2 dimensions", "(3,)", POINTS_TO_ADAMW, "muon_param_groups"],
    ),
    (
        "a scalar",
        lambda: Muon([("scale", nn.Parameter(torch.ones(())))]),
        ValueError,
        ["scale", "at least 2 dimensions", "()", POINTS_TO_ADAMW],
    ),
    (
        "a bias without a name",
        lambda: Muon([{"params": [weight()]}, {"params": [weight(), weight(3)]}]),
        ValueError,
        ["parameter 1 of group 1", "(shape (3,))", POINTS_TO_ADAMW],
    ),
    (
        "complex",
        lambda: Muon([("w", weight(dtype=torch.complex64))]),
        ValueError,
        ["w:", "real floating-point", "torch.complex64", "leave it out"],
    ),
    (
        "complex, for AdamW",
        lambda: Muon(
            [{"params": [("w", weight(dtype=torch.complex64))], "algorithm": "adamw"}],
        ),
        ValueError,
        ["w:", "real floating-point", "torch.complex64"],
    ),
    (
        "integer",
        lambda: Muon([("w", weight(dtype=torch.int32))]),
        ValueError,
        ["w:", "real floating-point", "torch.int32", "leave it out"],
    ),
    (
        "bool",
        lambda: Muon([weight(dtype=torch.bool)]),
        ValueError,
        ["parameter 0 of group 0", "torch.bool"],
    ),
    (
        "sparse",
        lambda: Muon([("w", torch.ones(4, 8).to_sparse())]),
        ValueError,
        ["w:", "dense", "torch.sparse_coo"],
    ),
    (
        "sparse, for AdamW",
        lambda: Muon([{"params": [torch.ones(4, 8).to_sparse()], "algorithm": "adamw"}]),
        ValueError,
        ["parameter 0 of group 0", "dense", "torch.sparse_coo"],
    ),
    (
        "the result of an operation",
        lambda: Muon([nn.Parameter(torch.ones(4, 8)) * 2]),
        ValueError,
        ["non-leaf"],
    ),
    (
        "twice in a group",
        lambda: repeated(groups=1),
        ValueError,
        ["second", "more than once", "list a tied parameter once"],
    ),
    (
        "in two groups",
        lambda: repeated(groups=2),
        ValueError,
        ["more than once", "list a tied parameter once"],
    ),
    ("no parameters", lambda: Muon([]), ValueError, ["empty"]),
    (
        "no parameters in a group",
        lambda: untyped([{"params": [weight()]}, {"params": []}]),
        ValueError,
        ["parameter group 1", "empty", "leave it out"],
    ),
    (
        "a generator that is used up",
        lambda: Muon([{"params": iter(())}]),
        ValueError,
        ["parameter group 0", "empty"],
    ),
    (
        "a set in a group",
        lambda: untyped([{"params": {weight()}}]),
        TypeError,
        ["parameter group 0", "order that all ranks share", "a set"],
    ),
    ("a tensor", lambda: Muon(weight()), TypeError, ["iterable of Tensors"]),
    (
        "no tensors",
        lambda: untyped([1, 2]),
        TypeError,
        ["Tensors", "int"],
    ),
    (
        "a group that is no dict",
        lambda: muon().add_param_group([weight()]),  # type: ignore[arg-type]
        TypeError,
        ["parameter group 1", "dict", "list"],
    ),
    (
        "names for some",
        lambda: untyped([("w", weight()), weight()]),
        ValueError,
        ["names are missing"],
    ),
    (
        "names in one group only",
        lambda: untyped([{"params": [("w", weight())]}, {"params": [weight()]}]),
        ValueError,
        ["groups", "with/without names"],
    ),
]


@pytest.mark.parametrize(("mistake", "error", "words"), ids(PARAMETERS))
def test_a_wrong_parameter_is_told_what_is_wrong(
    mistake: Mistake, error: type[Exception], words: list[str]
) -> None:
    """C07, C16, C22: at construction, by name or by place and shape."""
    assert_told(mistake, error, words)


# --- Hyperparameters ------------------------------------------------------------------------

HYPERPARAMETERS: list[Row] = [
    ("lr negative", lambda: muon(lr=-1e-3), ValueError, ["lr", "at least 0", "-0.001"]),
    ("lr nan", lambda: muon(lr=NAN), ValueError, ["lr", "finite", "nan"]),
    ("lr infinite", lambda: muon(lr=INF), ValueError, ["lr", "finite", "inf"]),
    ("lr text", lambda: muon(lr="0.1"), TypeError, ["lr", "number", "'0.1'"]),
    ("lr missing", lambda: muon(lr=None), TypeError, ["lr", "number", "None"]),
    ("lr bool", lambda: muon(lr=True), TypeError, ["lr", "number", "True"]),
    ("lr complex", lambda: muon(lr=1j), TypeError, ["lr", "number", "1j"]),
    (
        "lr of two elements",
        lambda: muon(lr=torch.ones(2)),
        ValueError,
        ["lr", "one element", "(2,)"],
    ),
    (
        "lr of no elements",
        lambda: muon(lr=torch.ones(0)),
        ValueError,
        ["lr", "one element", "(0,)"],
    ),
    ("lr tensor negative", lambda: muon(lr=torch.tensor(-1.0)), ValueError, ["lr", "at least 0"]),
    ("lr tensor nan", lambda: muon(lr=torch.tensor(NAN)), ValueError, ["lr", "finite", "nan"]),
    (
        "lr in a group",
        lambda: group(lr=-1.0),
        ValueError,
        ["parameter group 1", "lr", "at least 0", "-1.0"],
    ),
    (
        "lr in a group of AdamW",
        lambda: adamw(lr=NAN),
        ValueError,
        ["parameter group 0", "lr", "finite", "nan"],
    ),
    (
        "weight_decay negative",
        lambda: muon(weight_decay=-0.1),
        ValueError,
        ["weight_decay", "at least 0", "-0.1"],
    ),
    ("weight_decay nan", lambda: muon(weight_decay=NAN), ValueError, ["weight_decay", "finite"]),
    (
        "weight_decay as a tensor",
        lambda: muon(weight_decay=torch.tensor(0.1)),
        TypeError,
        ["weight_decay", "plain number", "tensor"],
    ),
    ("momentum negative", lambda: muon(momentum=-0.1), ValueError, ["momentum", "at least 0"]),
    (
        "momentum above one",
        lambda: muon(momentum=1.01),
        ValueError,
        ["momentum", "at most 1", "1.01"],
    ),
    ("momentum nan", lambda: muon(momentum=NAN), ValueError, ["momentum", "nan"]),
    (
        "momentum in a group",
        lambda: group(momentum=95),
        ValueError,
        ["parameter group 1", "momentum", "at most 1", "95"],
    ),
    ("nesterov a number", lambda: muon(nesterov=1), TypeError, ["nesterov", "True or False", "1"]),
    ("eps negative", lambda: muon(eps=-1e-7), ValueError, ["eps", "at least 0", "-1e-07"]),
    ("eps text", lambda: muon(eps="tiny"), TypeError, ["eps", "number", "'tiny'"]),
    (
        "adjust_lr_fn unknown",
        lambda: muon(adjust_lr_fn="match_rms_adam"),
        ValueError,
        ["adjust_lr_fn", "'spectral'", "did you mean 'match_rms_adamw'?"],
    ),
    (
        "adjust_lr_fn a function",
        lambda: muon(adjust_lr_fn=len),
        ValueError,
        ["adjust_lr_fn", "'original'", "len"],
    ),
    (
        "ns_method unknown",
        lambda: muon(ns_method="newton"),
        ValueError,
        ["ns_method", "'auto'", "'standard'", "'newton'"],
    ),
    (
        "ns_method misspelt",
        lambda: group(ns_method="standart"),
        ValueError,
        ["parameter group 1", "ns_method", "did you mean 'standard'?"],
    ),
    (
        "ns_dtype text",
        lambda: muon(ns_dtype="bfloat16"),
        ValueError,
        ["ns_dtype", "torch.bfloat16", "got 'bfloat16'"],
    ),
    (
        "ns_dtype an integer type",
        lambda: muon(ns_dtype=torch.int8),
        ValueError,
        ["ns_dtype", "torch.float32", "torch.int8"],
    ),
    (
        "momentum_dtype complex",
        lambda: group(momentum_dtype=torch.complex64),
        ValueError,
        ["parameter group 1", "momentum_dtype", "None", "torch.float32", "torch.complex64"],
    ),
    (
        "ns_steps zero",
        lambda: muon(ns_steps=0),
        ValueError,
        ["ns_steps", "from 1 to 99", "0", "5 is usual"],
    ),
    ("ns_steps hundred", lambda: muon(ns_steps=100), ValueError, ["ns_steps", "from 1 to 99"]),
    ("ns_steps fraction", lambda: muon(ns_steps=2.5), TypeError, ["ns_steps", "integer", "2.5"]),
    (
        "ns_steps bool",
        lambda: group(ns_steps=True),
        TypeError,
        ["parameter group 1", "ns_steps", "integer", "True"],
    ),
    (
        "preset misspelt",
        lambda: muon(ns_coefficients="polar_expres", ns_steps=None),
        ValueError,
        ["ns_coefficients", "'polar_expres'", "did you mean", "'polar_express'"],
    ),
    (
        "preset unknown, in a group",
        lambda: group(ns_coefficients="?"),
        ValueError,
        ["parameter group 1", "ns_coefficients", "'jordan'", "'you'", "triple"],
    ),
    (
        "preset that diverges",
        lambda: muon(ns_coefficients="aol", ns_steps=None),
        ValueError,
        ["ns_coefficients", "'aol'", "wrong sign", "use 'you'"],
    ),
    (
        "preset of another length",
        lambda: muon(ns_coefficients="deepseek_v4"),
        ValueError,
        ["deepseek_v4", "exactly 10 steps", "ns_steps=5", "ns_steps=None"],
    ),
    (
        "coefficients of two numbers",
        lambda: muon(ns_coefficients=(3.0, -4.0)),
        ValueError,
        ["ns_coefficients", "exactly 3 numbers", "got 2"],
    ),
    (
        "coefficients with text",
        lambda: muon(ns_coefficients=(3.0, "x", 1.0)),
        TypeError,
        ["ns_coefficients", "real numbers", "'x'"],
    ),
    (
        "coefficients with nan",
        lambda: muon(ns_coefficients=[(3.0, NAN, 1.0)], ns_steps=None),
        ValueError,
        ["ns_coefficients[0]", "finite", "nan"],
    ),
    (
        "coefficients a number",
        lambda: muon(ns_coefficients=3.0),
        TypeError,
        ["ns_coefficients", "triple", "float"],
    ),
    (
        "more steps than triples",
        lambda: muon(ns_coefficients=[(2.0, -1.5, 0.5)] * 2),
        ValueError,
        ["ns_steps=5", "the 2 triples", "ns_steps=2"],
    ),
    (
        "share_replicas unknown",
        lambda: muon(share_replicas="always"),
        ValueError,
        ["share_replicas", "True", "False", "'auto'", "'always'"],
    ),
    (
        "shard_momentum text",
        lambda: muon(shard_momentum="auto"),
        TypeError,
        ["shard_momentum", "True or False", "'auto'"],
    ),
    (
        "nonfinite unknown",
        lambda: muon(nonfinite="ignore"),
        ValueError,
        ["nonfinite", "'raise', 'skip', 'propagate'", "'ignore'"],
    ),
    ("bucket_bytes zero", lambda: muon(bucket_bytes=0), ValueError, ["bucket_bytes", "positive"]),
    (
        "bucket_bytes negative",
        lambda: muon(bucket_bytes=-1),
        ValueError,
        ["bucket_bytes", "positive integer", "-1"],
    ),
    (
        "bucket_bytes fraction",
        lambda: muon(bucket_bytes=1.5),
        ValueError,
        ["bucket_bytes", "positive integer", "1.5"],
    ),
    (
        "bucket_bytes bool",
        lambda: muon(bucket_bytes=True),
        ValueError,
        ["bucket_bytes", "positive integer", "True"],
    ),
    (
        "argument unknown",
        lambda: muon(learning_rate=1.0),
        TypeError,
        ["Muon", "'learning_rate'", "Known keys"],
    ),
    (
        "argument misspelt",
        lambda: muon(maximise=True),
        TypeError,
        ["'maximise'", "did you mean 'maximize'?"],
    ),
    (
        "argument of AdamW",
        lambda: muon(betas=(0.9, 0.95)),
        TypeError,
        ["'betas'", "belongs to groups with algorithm='adamw'"],
    ),
    (
        "argument of a group",
        lambda: muon(algorithm="adamw"),
        TypeError,
        ["'algorithm'", "parameter group", "Muon([{'params'"],
    ),
    ("maximize a number", lambda: muon(maximize=1), TypeError, ["maximize", "True or False", "1"]),
    (
        "weight_rounding unknown",
        lambda: muon(weight_rounding="compensate"),
        ValueError,
        ["weight_rounding", "'nearest'", "did you mean 'compensated'?"],
    ),
    (
        "weight_rounding bool",
        lambda: muon(weight_rounding=True),
        ValueError,
        ["weight_rounding", "'compensated'", "True"],
    ),
    ("fused", lambda: muon(fused=True), TypeError, ["fused=True", "leave it out", "kernel"]),
    (
        "capturable",
        lambda: muon(capturable=True),
        TypeError,
        ["capturable=True", "not offered", "outside of the CUDA graph"],
    ),
    (
        "differentiable",
        lambda: muon(differentiable=True),
        TypeError,
        ["differentiable=True", "orthogonalize()"],
    ),
    (
        "weight decay that is coupled",
        lambda: muon(decoupled_weight_decay=False),
        TypeError,
        ["decoupled_weight_decay=False", "weight_decay * p"],
    ),
    ("foreach text", lambda: muon(foreach="yes"), TypeError, ["foreach='yes'", "leave it out"]),
]


@pytest.mark.parametrize(("mistake", "error", "words"), ids(HYPERPARAMETERS))
def test_a_wrong_hyperparameter_is_told_what_is_allowed(
    mistake: Mistake, error: type[Exception], words: list[str]
) -> None:
    """A18, A31, C27: its name, what is allowed and what was given."""
    assert_told(mistake, error, words)


# --- Groups ---------------------------------------------------------------------------------

GROUPS: list[Row] = [
    (
        "algorithm unknown",
        lambda: group(algorithm="adam"),
        ValueError,
        ["parameter group 1", "algorithm", "'muon'", "'adamw'", "'adam'"],
    ),
    (
        "algorithm not text",
        lambda: group(algorithm=None),
        ValueError,
        ["parameter group 1", "algorithm", "None"],
    ),
    (
        "key misspelt",
        lambda: group(weigth_decay=0.0),
        ValueError,
        ["parameter group 1", "'weigth_decay'", "did you mean 'weight_decay'?"],
    ),
    (
        "key unknown",
        lambda: group(zzz=0.0),
        ValueError,
        ["parameter group 1", "'zzz'", "Known keys", "ns_coefficients"],
    ),
    (
        "key of AdamW for Muon",
        lambda: group(betas=(0.9, 0.95)),
        ValueError,
        ["parameter group 1", "'betas'", "algorithm 'muon'"],
    ),
    (
        "key of Muon for AdamW",
        lambda: adamw(nesterov=True),
        ValueError,
        ["parameter group 0", "'nesterov'", "algorithm 'adamw'", "algorithm='muon'"],
    ),
    (
        "key of torch's AdamW that is not taken",
        lambda: adamw(fused=True),
        ValueError,
        ["parameter group 0", "fused=True", "not offered", "leave it out"],
    ),
    (
        "betas a number",
        lambda: adamw(betas=0.9),
        TypeError,
        ["parameter group 0", "betas", "two numbers", "0.9"],
    ),
    ("betas of three", lambda: adamw(betas=(0.9, 0.9, 0.9)), TypeError, ["betas", "two numbers"]),
    ("betas with one", lambda: adamw(betas=(0.9, 1.0)), ValueError, ["betas", "less than 1"]),
    ("betas negative", lambda: adamw(betas=(-0.1, 0.9)), ValueError, ["betas", "at least 0"]),
    ("betas nan", lambda: adamw(betas=(NAN, 0.9)), ValueError, ["betas", "nan"]),
    ("betas text", lambda: adamw(betas=("high", 0.9)), TypeError, ["betas", "'high'"]),
    ("amsgrad a number", lambda: adamw(amsgrad=1), TypeError, ["amsgrad", "True or False"]),
    ("maximize text", lambda: adamw(maximize="no"), TypeError, ["maximize", "True or False"]),
    ("eps of AdamW", lambda: adamw(eps=-1.0), ValueError, ["parameter group 0", "eps"]),
    (
        "weight_rounding of AdamW",
        lambda: adamw(weight_rounding="stochastic"),
        ValueError,
        ["parameter group 0", "weight_rounding", "'nearest'", "'stochastic'"],
    ),
    (
        "capturable in a group",
        lambda: group(capturable=True),
        ValueError,
        ["parameter group 1", "capturable=True", "leave it out"],
    ),
    (
        "matrix_view unknown",
        lambda: group(matrix_view="rows"),
        ValueError,
        ["parameter group 1", "matrix_view", "'flatten'", "('heads', num_heads)", "'rows'"],
    ),
    (
        "matrix_view of no heads",
        lambda: muon(matrix_view=("heads", 0)),
        ValueError,
        ["matrix_view", "('heads', num_heads)", "('heads', 0)"],
    ),
    (
        "matrix_view of a fraction of heads",
        lambda: muon(matrix_view=("heads", 2.0)),
        ValueError,
        ["matrix_view", "('heads', 2.0)"],
    ),
    (
        "matrix_view of empty blocks",
        lambda: muon(matrix_view=("split", ())),
        ValueError,
        ["matrix_view", "('split', (rows, ...))"],
    ),
    (
        "matrix_view of negative blocks",
        lambda: muon(matrix_view=("split", (5, -1))),
        ValueError,
        ["matrix_view", "('split', (5, -1))"],
    ),
    (
        "matrix_view for AdamW",
        lambda: adamw(matrix_view="flatten"),
        ValueError,
        ["'matrix_view'", "algorithm 'adamw'"],
    ),
    (
        "heads that do not divide",
        lambda: Muon([("qkv", weight())], matrix_view=("heads", 3)),
        ValueError,
        ["qkv", "('heads', 3)", "divides", "4 rows"],
    ),
    (
        "more heads than rows",
        lambda: Muon([("qkv", weight())], matrix_view=("heads", 8)),
        ValueError,
        ["qkv", "('heads', 8)", "4 rows"],
    ),
    (
        "blocks that do not add up",
        lambda: Muon([("qkv", weight())], matrix_view=("split", (2, 1))),
        ValueError,
        ["qkv", "sums to 3 rows", "has 4", "list every block"],
    ),
    (
        "blocks that do not add up, in a group",
        lambda: group(matrix_view=("split", (4, 4))),
        ValueError,
        ["parameter 0 of group 1", "sums to 8 rows", "has 4"],
    ),
]


@pytest.mark.parametrize(("mistake", "error", "words"), ids(GROUPS))
def test_a_wrong_group_is_told_which_and_why(
    mistake: Mistake, error: type[Exception], words: list[str]
) -> None:
    """A17, A31: its number, the key, and what there is."""
    assert_told(mistake, error, words)


# --- A group that is added later -------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "word"),
    [
        ({"lr": -1.0}, ValueError, "lr"),
        ({"nesterov": None}, TypeError, "nesterov"),
        ({"algorithm": "sgd"}, ValueError, "algorithm"),
        ({"algorithm": "adamw", "betas": 0.9}, TypeError, "betas"),
        ({"momentun": 0.9}, ValueError, "did you mean 'momentum'?"),
        ({"ns_coefficients": "jordon"}, ValueError, "did you mean 'jordan'?"),
        ({"matrix_view": "rows"}, ValueError, "matrix_view"),
        ({"params": [weight(3)]}, ValueError, "at least 2 dimensions"),
        ({"params": [weight(dtype=torch.int32)]}, ValueError, "real floating-point"),
        ({"params": []}, ValueError, "empty"),
        ({"params": [1]}, TypeError, "Tensors"),
    ],
)
def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(
    settings: dict[str, Any], error: type[Exception], word: str
) -> None:
    params = [nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(8, 2))]
    optimizer = Muon(params)
    groups, plan = list(optimizer.param_groups), optimizer.plan
    before = repr(optimizer), repr(optimizer.state_dict()), repr(optimizer.defaults)
    with pytest.raises(error, match=word.replace("?", r"\?")):
        optimizer.add_param_group({"params": [weight()], **settings})
    assert (repr(optimizer), repr(optimizer.state_dict()), repr(optimizer.defaults)) == before
    assert len(optimizer.param_groups) == len(groups)
    assert optimizer.param_groups[0] is groups[0]
    assert optimizer.plan == plan
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.add_param_group({"params": [weight()]})
    assert len(optimizer.plan.params) == 3


# --- Gradients and parameters that change ---------------------------------------------------


def stepped(spoil: Callable[[nn.Parameter], object]) -> Mistake:
    """A step on two parameters, the second spoilt; nothing may have been written."""

    def run() -> None:
        params = [nn.Parameter(torch.ones(4, 8)) for _ in range(2)]
        optimizer = Muon([("fine", params[0]), ("spoilt", params[1])])
        for param in params:
            param.grad_dtype = None  # any dtype of gradient can be assigned
            param.grad = torch.ones(4, 8)
        spoil(params[1])
        try:
            optimizer.step()
        finally:
            assert torch.equal(params[0], torch.ones(4, 8))
            for state in optimizer.state.values():
                assert not state["momentum_buffer"].any()

    return run


def set_grad(param: nn.Parameter, grad: Tensor) -> None:
    param.grad = grad


def set_grad_data(param: nn.Parameter, grad: Tensor) -> None:
    assert param.grad is not None
    param.grad.data = grad


def shrink(param: nn.Parameter) -> None:
    param.data = torch.ones(2, 8)
    param.grad = torch.ones(2, 8)


UNCHANGED = "No weight and no optimizer state was changed"
STEPS: list[Row] = [
    (
        "sparse gradient",
        stepped(lambda p: set_grad(p, torch.ones(4, 8).to_sparse())),
        RuntimeError,
        ["spoilt", "gradient", "torch.sparse_coo", "make it dense", UNCHANGED],
    ),
    (
        "complex gradient",
        stepped(lambda p: set_grad(p, torch.ones(4, 8, dtype=torch.complex64))),
        RuntimeError,
        ["spoilt", "gradient", "complex", "real numbers", UNCHANGED],
    ),
    (
        "gradient of another shape",
        stepped(lambda p: set_grad_data(p, torch.ones(2, 2))),
        RuntimeError,
        ["spoilt", "gradient", "(2, 2)", "(4, 8)", UNCHANGED],
    ),
    (
        "parameter of another shape",
        stepped(shrink),
        RuntimeError,
        ["spoilt", "of shape (4, 8)", "of shape (2, 8) now", "cast and sharded", UNCHANGED],
    ),
]


@pytest.mark.parametrize(("mistake", "error", "words"), ids(STEPS))
def test_a_step_that_cannot_be_done_writes_nothing(
    mistake: Mistake, error: type[Exception], words: list[str]
) -> None:
    """B03: and it names the parameter."""
    assert_told(mistake, error, words)


def test_a_step_can_be_done_once_the_reason_is_gone() -> None:
    param = nn.Parameter(torch.ones(4, 8))
    optimizer = Muon([param])
    param.grad = torch.ones(4, 8).to_sparse()
    with pytest.raises(RuntimeError, match="make it dense"):
        optimizer.step()
    param.grad = param.grad.to_dense()
    optimizer.step()
    assert not torch.equal(param, torch.ones(4, 8))


# --- orthogonalize --------------------------------------------------------------------------

MATRICES: list[Row] = [
    (
        "a vector",
        lambda: orthogonalize(torch.ones(3)),
        ValueError,
        ["(..., m, n)", "(3,)", "another optimizer"],
    ),
    (
        "no tensor",
        lambda: orthogonalize([[1.0]]),  # type: ignore[arg-type]
        TypeError,
        ["Tensor", "list"],
    ),
    (
        "sparse",
        lambda: orthogonalize(torch.ones(2, 2).to_sparse()),
        TypeError,
        ["dense", "torch.sparse_coo", "to_dense()"],
    ),
    (
        "integers",
        lambda: orthogonalize(torch.ones(2, 2, dtype=torch.int64)),
        TypeError,
        ["torch.float32", "torch.int64", "(2, 2)"],
    ),
    (
        "method",
        lambda: orthogonalize(torch.ones(2, 2), method="fast"),
        ValueError,
        ["method", "'auto'", "'standard'", "'fast'"],
    ),
    (
        "eps",
        lambda: orthogonalize(torch.ones(2, 2), eps=-1.0),
        ValueError,
        ["eps", "at least 0", "-1.0"],
    ),
    (
        "dtype",
        lambda: orthogonalize(torch.ones(2, 2), dtype=torch.int8),
        ValueError,
        ["dtype", "torch.bfloat16", "torch.int8"],
    ),
]


@pytest.mark.parametrize(("mistake", "error", "words"), ids(MATRICES))
def test_orthogonalize_is_told_what_it_takes(
    mistake: Mistake, error: type[Exception], words: list[str]
) -> None:
    assert_told(mistake, error, words)


# --- clip_grad_norm_ ------------------------------------------------------------------------


def sparse_gradient() -> nn.Parameter:
    p = weight()
    p.grad = torch.ones(4, 8).to_sparse()
    return p


CLIPPING: list[Row] = [
    (
        "max_norm negative",
        lambda: clip_grad_norm_([weight()], -1.0),
        ValueError,
        ["max_norm", "at least 0", "-1.0", "math.inf"],
    ),
    ("max_norm nan", lambda: clip_grad_norm_([weight()], NAN), ValueError, ["max_norm", "nan"]),
    (
        "max_norm text",
        lambda: clip_grad_norm_([weight()], "1.0"),  # type: ignore[arg-type]
        TypeError,
        ["max_norm", "a number", "'1.0'"],
    ),
    (
        "norm_type zero",
        lambda: clip_grad_norm_([weight()], 1.0, 0.0),
        ValueError,
        ["norm_type", "positive", "0.0", "2.0"],
    ),
    (
        "norm_type text",
        lambda: clip_grad_norm_([weight()], 1.0, "inf"),  # type: ignore[arg-type]
        TypeError,
        ["norm_type", "a number", "'inf'"],
    ),
    (
        "sparse gradient",
        lambda: clip_grad_norm_([weight(2, 2), sparse_gradient()], 1.0),
        ValueError,
        ["parameter 1 (shape (4, 8))", "dense", "torch.sparse_coo"],
    ),
]


@pytest.mark.parametrize(("mistake", "error", "words"), ids(CLIPPING))
def test_clipping_is_told_what_it_takes(
    mistake: Mistake, error: type[Exception], words: list[str]
) -> None:
    assert_told(mistake, error, words)


# --- Form of the table ----------------------------------------------------------------------


def every_row() -> Iterator[Row]:
    for rows in (PARAMETERS, HYPERPARAMETERS, GROUPS, STEPS, MATRICES, CLIPPING):
        yield from rows


def test_every_refusal_says_what_is_wrong_in_one_line() -> None:
    for name, mistake, error, _ in every_row():
        with pytest.raises(error) as caught:
            mistake()
        message = str(caught.value)
        assert "\n" not in message, name
        assert 10 < len(message) < 500, name
        assert caught.value.__cause__ is None, name
