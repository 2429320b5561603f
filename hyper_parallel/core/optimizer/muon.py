# SPDX-License-Identifier: Apache-2.0
"""The optimizer: parameter groups, state and ``step``. What a step does is in its plan."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Final, Never, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from hyper_parallel.core.optimizer.adamw import adamw_step
from hyper_parallel.core.optimizer.engine import Engine, basis_of, build_engine
from hyper_parallel.core.optimizer.hyperparameters import (
    ADAMW_KEYS,
    check_arguments,
    check_group,
    complete_group,
)
from hyper_parallel.core.optimizer.local_step import LocalStep
from hyper_parallel.core.optimizer.nonfinite import POLICIES
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.planner import REPLICA_ROUTES
from hyper_parallel.core.optimizer.saved_state import (
    copied_state,
    fit_state_dict,
    frozen_state,
    with_dtype_names,
)
from hyper_parallel.core.optimizer.state import fill_adamw_state, fill_muon_state, has_state
from hyper_parallel.core.optimizer.stepped_param import check_new_params, param_names
from hyper_parallel.core.optimizer.weight_rounding import RESIDUAL

ParamGroup = dict[str, Any]
Params = Iterable[Tensor | tuple[str, Tensor] | ParamGroup]

_SETTINGS: Final = (
    "_bucket_bytes",
    "_nonfinite",
    "_replica_route",
    "_replicate_mesh",
    "_warned_idle",
)

DEFAULT_BUCKET_BYTES: Final = 64 * 2**20
"""Large enough to keep an exchange near the link's rate, small beside a model's weights."""


class Muon(Optimizer):
    r"""Muon on whole matrices, however the parameters are sharded.

    Hidden matrices are updated with their orthogonalized momentum:

    .. math::
        m \leftarrow m + (1 - \mu)(g - m), \quad
        u = \mathrm{NS}(g + \mu (m - g)), \quad
        p \leftarrow (1 - \gamma\lambda)\, p - \gamma\, r(p)\, u

    where :math:`\mathrm{NS}` is a Newton-Schulz iteration and :math:`r` the factor that
    ``adjust_lr_fn`` gives a matrix of its shape (global, not local). The first nine arguments are
    those of :class:`torch.optim.Muon`, with its meaning. Parameters may be plain tensors or
    DTensors of any mesh and placement; the result is what one process would compute on whole
    tensors. Each matrix is orthogonalized by one rank; the rest is exchanged in
    :attr:`plan`'s buckets. Build it on every rank, after ``fully_shard`` or
    ``parallelize_module``.

    Args:
        params: Tensors, ``(name, tensor)`` pairs, or groups of either. A group with
            ``algorithm="adamw"`` is stepped by PyTorch's AdamW and takes ``betas``, ``eps``
            (1e-8) and ``amsgrad``. Any argument below up to ``weight_rounding`` may differ per
            group; ``lr``, ``weight_decay``, ``maximize`` and ``weight_rounding`` given here hold
            for the groups of AdamW, too.
        lr: Learning rate; a number or a tensor with one element.
        weight_decay: Decoupled weight decay, applied with the unadjusted learning rate before the
            update.
        momentum: Momentum coefficient, from 0 to 1.
        nesterov: Whether to use Nesterov momentum.
        ns_coefficients: One ``(a, b, c)``, a list of them (one a step) or the name of a preset:
            ``"jordan"``, ``"you"``, ``"polar_express"``, ...
        eps: Floor of the norm in the orthogonalization.
        ns_steps: Newton-Schulz steps.
        adjust_lr_fn: ``"original"`` or None, ``"match_rms_adamw"`` or ``"spectral"``; see
            :func:`~hyper_parallel.core.optimizer.update_rule.lr_ratio`.
        ns_method: Form of the iteration; see :func:`~hyper_parallel.orthogonalize`.
        ns_dtype: Dtype of the iteration and of what travels.
        momentum_dtype: Dtype of ``momentum_buffer``; the parameter's if None.
        share_replicas: Whether replicas of a parameter (HSDP, DDP) split its work between them:
            True, False or ``"auto"``, by cost. With False no message crosses the replicate axes, so
            nobody notices either if a gradient is missing on one of the replicas.
        shard_momentum: Whether replicas split the momentum between them.
        matrix_view: What the matrices of a parameter are: None (the last two dims, every leading
            dim is a batch), ``"flatten"``, ``("split", (rows, ...))`` or ``("heads", num_heads)``.
        maximize: Whether to go up instead of down, as in torch's optimizers.
        weight_rounding: ``"nearest"``, or ``"compensated"`` to keep in the state what rounding to
            bfloat16 or float16 leaves out of a weight, so that small updates add up
            (``weight_residual``, as large as the weight). AdamW's moments are in float32 then.
        nonfinite: What a gradient with inf or NaN entries does to a step: ``"raise"``, an error on
            all ranks that names the parameter; ``"skip"``, the step is left out on all ranks that
            exchange with each other, with a warning that names it; in both, no weight and no
            state is written. ``"propagate"``: nobody looks, and its own matrix becomes NaN.
        bucket_bytes: Most bytes that a rank holds of one bucket; bounds the extra memory.
        replica_route: How updates reach the other replicas: ``"direct"`` (one all-to-all over
            shard and replicate ranks), ``"staged"`` (within the shard ranks, then along the
            replicate axes) or ``"auto"`` (staged beyond 64 ranks).
        replicate_mesh: Mesh over which plain tensors are replicated (DDP). Without it, plain
            tensors are taken as this rank's alone.
        **others: None. ``foreach``, ``fused``, ``capturable`` and ``differentiable`` are taken
            where they change nothing; what else there is in other optimizers is refused with
            what to do instead.

    Raises:
        ValueError: If a parameter cannot be stepped on, or a hyperparameter makes no sense; the
            message names the parameter or the group and what to do.
        TypeError: If an argument has the wrong type.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4, 8))
        >>> optimizer = Muon([("weight", weight)], lr=0.02)
        >>> weight.sum().backward()
        >>> optimizer.step()

    References:
        Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
        https://kellerjordan.github.io/posts/muon/
    """

    # A gradient scaler then calls step() on every rank, whatever this rank has found.
    _step_supports_amp_scaling = True

    def __init__(  # noqa: PLR0913, PLR0917 -- torch.optim.Muon's nine, in its order
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,  # noqa: FBT001, FBT002 -- positional in torch.optim.Muon
        ns_coefficients: str | tuple[float, float, float] | Sequence[tuple[float, float, float]] = (
            3.4445,
            -4.7750,
            2.0315,
        ),
        eps: float = 1e-7,
        ns_steps: int | None = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_method: str = "auto",
        ns_dtype: torch.dtype = torch.bfloat16,
        momentum_dtype: torch.dtype | None = None,
        share_replicas: bool | str = "auto",
        shard_momentum: bool = False,
        matrix_view: Any = None,
        maximize: bool = False,
        weight_rounding: str = "nearest",
        nonfinite: str = "raise",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        replica_route: str = "auto",
        replicate_mesh: DeviceMesh | None = None,
        **others: Never,
    ) -> None:
        if isinstance(params, set):
            raise TypeError(
                "params must be in an order that all ranks share, got a set; use a list"
            )
        if replicate_mesh is not None and not isinstance(replicate_mesh, DeviceMesh):
            raise TypeError(f"replicate_mesh must be a DeviceMesh, got {replicate_mesh!r}")
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be a positive integer, got {bucket_bytes!r}")
        self._bucket_bytes = bucket_bytes
        if nonfinite not in POLICIES:
            raise ValueError(f"nonfinite must be one of {POLICIES}, got {nonfinite!r}")
        self._nonfinite = nonfinite
        if replica_route not in REPLICA_ROUTES:
            raise ValueError(
                f"replica_route must be one of {REPLICA_ROUTES}, got {replica_route!r}"
            )
        self._replica_route = replica_route
        self._replicate_mesh = replicate_mesh
        self._engine: Engine | None = None
        self._warned_idle = False
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_method": ns_method,
            "ns_dtype": ns_dtype,
            "momentum_dtype": momentum_dtype,
            "share_replicas": share_replicas,
            "shard_momentum": shard_momentum,
            "matrix_view": matrix_view,
            "maximize": maximize,
            "weight_rounding": weight_rounding,
        }
        check_arguments(others)
        check_group({**defaults, "algorithm": "muon"}, "Muon")
        super().__init__(cast(ParamsT, params), defaults)
        self._ready()

    @property
    def plan(self) -> Plan:
        """What a step does on this rank; ``print(optimizer.plan)`` is a readable table."""
        return self._ready().plan

    @override
    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group of parameters; call it on every rank.

        Args:
            param_group: As in the constructor.

        Raises:
            ValueError: As in the constructor. The optimizer is then as it was before.
            TypeError: As in the constructor.
        """
        number = len(self.param_groups)
        group = complete_group(param_group, self.defaults, f"parameter group {number}")
        taken = {
            param: name
            for i, other in enumerate(self.param_groups)
            for name, param in zip(param_names(other, i), other["params"], strict=True)
        }
        check_new_params(group, number, taken)
        super().add_param_group(group)
        if group["algorithm"] == "adamw":
            for key in set(self.defaults) - set(ADAMW_KEYS):
                del group[key]  # torch fills in all defaults
        if self._engine is None:  # the constructor adds its groups one by one
            return
        try:
            self._ready()
        except BaseException:
            del self.param_groups[number]
            raise

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Called on every rank, whatever gradients it has. A parameter without a gradient on all
        ranks is left alone.

        Args:
            closure: Computes the loss again and returns it; called once, with gradients enabled.

        Returns:
            What the closure returns; None without one.

        Raises:
            RuntimeError: On all ranks that exchange with each other, if one of them cannot step
                (or has a gradient that is not finite, unless ``nonfinite`` says otherwise), they
                disagree about gradients or hyperparameters, or one does not arrive. Unless
                the message says otherwise, no weight and no state was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._ready()
        if not all(has_state(entry, self.state) for entry in [*engine.entries, *engine.others]):
            self._fill_state(engine)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and engine.executor.any_rank(bool(found_inf)):
            return loss
        states = [self.state[entry.param] for entry in engine.entries]
        local_step = LocalStep(
            engine.entries,
            [state["momentum_buffer"] for state in states],
            engine.others,
            residuals=[state.get(RESIDUAL) for state in states],
            loss_scale=getattr(self, "grad_scale", None),
            nonfinite=self._nonfinite,
        )
        left_out = engine.executor.run(local_step)
        if left_out is not None:
            # Past torch's two wrappers, to who called step().
            warnings.warn(f"this step was left out on all ranks: {left_out}", stacklevel=4)
            return loss
        others = zip(engine.others, local_step.other_gradients(), strict=True)
        active = [(entry, grad) for entry, grad in others if grad is not None]
        for _, run in groupby(active, key=lambda pair: id(pair[0].group)):
            entries, grads = zip(*run, strict=True)
            states = [self.state[entry.param] for entry in entries]
            adamw_step([e.param for e in entries], grads, states, entries[0].group)
        self._warn_if_idle()
        return loss

    @override
    def state_dict(self) -> dict[str, Any]:
        """State and settings as tensors, numbers, strings and tuples of them; dtypes by name."""
        self._ready()  # a framework may have exchanged the parameters in the groups for shards
        return with_dtype_names(super().state_dict())

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, here or on other ranks. Called on every rank.

        Saved settings take the place of this optimizer's, but for ``share_replicas`` and
        ``shard_momentum``, which belong to the ranks that run now. Parameters are matched by name
        where both sides have names. After an error the optimizer is as it was before.

        Args:
            state_dict: The state. Whole plain tensors are cut to the parameter's layout. Momentum
                keeps ``momentum_dtype`` whatever the parameter's dtype.

        Raises:
            ValueError: If groups, names, algorithms, settings or shapes do not fit, or a state
                lies on another mesh than its parameter; the message names it.
        """
        before = self.param_groups, self.state, self._engine
        frozen = frozen_state(self.state, self.param_groups)
        fitted: dict[str, Any] = {}

        def fit(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            fitted.update(fit_state_dict(saved, self.param_groups))
            return fitted

        # As a hook, since it comes after the user's own, and before anything is written.
        handle = self.register_load_state_dict_pre_hook(fit)
        try:
            super().load_state_dict(state_dict)
            self.state.update(copied_state(fitted, self.param_groups))
            for param, state in frozen.items():
                self.state[param] = self.state.get(param) or state
            self._ready()
        except BaseException:
            self.param_groups, self.state, self._engine = before
            raise
        finally:
            handle.remove()

    @override
    def __getstate__(self) -> dict[str, Any]:
        # The engine holds process groups, which cannot be pickled; it is built when it is needed.
        state: dict[str, Any] = super().__getstate__()
        settings = {key: self.__dict__[key] for key in _SETTINGS}
        return {**state, **settings}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch adds it, and the constructor has no such argument.
        self.defaults.pop("differentiable", None)
        self._engine = None

    def _ready(self) -> Engine:
        """The engine for the parameters and settings as they are now."""
        if self._engine is None or self._engine.basis != basis_of(self.param_groups):
            engine = build_engine(
                self.param_groups,
                bucket_bytes=self._bucket_bytes,
                replica_route=self._replica_route,
                replicate_mesh=self._replicate_mesh,
            )
            kept = {entry.param for entry in [*engine.entries, *engine.others]}
            for param in [key for key in self.state if key not in kept]:
                del self.state[param]  # exchanged for another, and no state dict can name it
            self._fill_state(engine)
            self._engine = engine
        return self._engine

    def _fill_state(self, engine: Engine) -> None:
        """State for each parameter, in its layout; what is there already is kept."""
        for entry in engine.entries:
            fill_muon_state(entry, self.state[entry.param], self._replicate_mesh)
        for entry in engine.others:
            fill_adamw_state(entry, self.state[entry.param])

    def _warn_if_idle(self) -> None:
        if self._warned_idle or any(
            p.grad is not None for group in self.param_groups for p in group["params"]
        ):
            return
        self._warned_idle = True
        warnings.warn(
            "step() found no gradient on any parameter of the optimizer. If the model was sharded "
            "or moved, or its parameters were exchanged (load_state_dict(assign=True), to_empty), "
            "after the optimizer was built, the optimizer holds dead tensors: build it after "
            "fully_shard or parallelize_module, and before the first forward. If gradients are "
            "accumulated without being reduced (set_requires_gradient_sync(False), "
            "set_requires_all_reduce(False)), step after the backward that reduces them",
            stacklevel=5,  # past torch's two wrappers, to who called step()
        )
