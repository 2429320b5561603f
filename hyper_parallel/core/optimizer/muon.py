# SPDX-License-Identifier: Apache-2.0
"""The optimizer: parameter groups, state and ``step``. What a step does is in its plan."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from hyper_parallel.core.optimizer.adamw import adamw_step, make_state
from hyper_parallel.core.optimizer.dtensor_layout import in_layout, local_tensor, zeros_like_param
from hyper_parallel.core.optimizer.engine import Engine, build_engine
from hyper_parallel.core.optimizer.hyperparameters import (
    ADAMW_KEYS,
    MUON_KEYS,
    check_group,
    complete_group,
)
from hyper_parallel.core.optimizer.local_step import LocalStep
from hyper_parallel.core.optimizer.matrix_view import normalize_view
from hyper_parallel.core.optimizer.plan import Plan
from hyper_parallel.core.optimizer.planner import REPLICA_ROUTES

ParamGroup = dict[str, Any]
Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[ParamGroup]

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
            (1e-8), ``amsgrad`` and ``maximize``. Any argument below up to ``matrix_view`` may
            differ per group; ``lr`` and ``weight_decay`` given here hold for all groups without
            their own.
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
            True, False (no message crosses the replicate axes) or ``"auto"``, by cost.
        shard_momentum: Whether replicas split the momentum between them.
        matrix_view: What the matrices of a parameter are: None (the last two dims, every leading
            dim is a batch), ``"flatten"``, ``("split", (rows, ...))`` or ``("heads", num_heads)``.
        bucket_bytes: Most bytes that a rank holds of one bucket; bounds the extra memory.
        replica_route: How updates reach the other replicas: ``"direct"`` (one all-to-all over
            shard and replicate ranks), ``"staged"`` (within the shard ranks, then along the
            replicate axes) or ``"auto"`` (staged beyond 64 ranks).
        replicate_mesh: Mesh over which plain tensors are replicated (DDP). Without it, plain
            tensors are taken as this rank's alone.

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
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        replica_route: str = "auto",
        replicate_mesh: DeviceMesh | None = None,
    ) -> None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be a positive integer, got {bucket_bytes!r}")
        self._bucket_bytes = bucket_bytes
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
        }
        check_group({**defaults, "algorithm": "muon"}, "Muon")
        super().__init__(params, defaults)
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
        label = f"parameter group {len(self.param_groups)}"
        group = complete_group(param_group, label)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch only warns of what check_params refuses
            super().add_param_group(group)
        try:
            self._accept(group, label)
        except BaseException:
            self.param_groups.remove(group)
            raise

    def _accept(self, group: ParamGroup, label: str) -> None:
        if group["algorithm"] == "adamw":
            for key in set(MUON_KEYS) - set(ADAMW_KEYS):
                del group[key]  # torch has filled in all defaults
        check_group(group, label)
        self._check_params(group, label)
        if group["algorithm"] == "muon":
            group["matrix_view"] = normalize_view(group["matrix_view"], label)
        if self._engine is not None:  # not while the constructor adds its groups
            self._engine = None
            self._ready()

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
            RuntimeError: On all ranks that exchange with each other, if one of them cannot step,
                they disagree about gradients or hyperparameters, or one does not arrive. Unless
                the message says otherwise, no weight and no state was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._ready()
        buffers = [self.state[entry.param]["momentum_buffer"] for entry in engine.entries]
        engine.executor.run(LocalStep(engine.entries, buffers))
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                active = [p for p in group["params"] if p.grad is not None]
                adamw_step(active, [self.state[p] for p in active], group)
        self._warn_if_idle()
        return loss

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Args:
            state_dict: The state; momentum keeps ``momentum_dtype`` whatever the parameter's.

        Raises:
            ValueError: If the groups do not match, or a state has another shape than its
                parameter.
        """
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id, {}).get("momentum_buffer")
            dtype = self._momentum_dtype(param)
            if saved is not None and dtype is not None:
                # torch casts every state to the dtype of the parameter: take the saved one.
                device = local_tensor(param).device
                self.state[param]["momentum_buffer"] = saved.to(dtype=dtype, device=device)
        self._ready()

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Process groups cannot be pickled; they are made again when they are needed.
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_settings": (self._bucket_bytes, self._replica_route)}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = state.pop("_settings", None)
        super().__setstate__(state)
        if settings is not None:
            self._bucket_bytes, self._replica_route = settings
        self._engine = None
        self.__dict__.setdefault("_replicate_mesh", None)
        self.__dict__.setdefault("_warned_idle", False)

    def _momentum_dtype(self, param: Tensor) -> torch.dtype | None:
        for group in self.param_groups:
            if group["algorithm"] == "muon" and any(param is p for p in group["params"]):
                return group["momentum_dtype"] or param.dtype
        return None

    def _names(self, group: ParamGroup) -> list[str]:
        if "param_names" in group:
            return list(group["param_names"])
        number = next(i for i, g in enumerate(self.param_groups) if g is group)
        return [
            f"parameter {i} of group {number} (shape {tuple(p.shape)})"
            for i, p in enumerate(group["params"])
        ]

    def _check_params(self, group: ParamGroup, label: str) -> None:
        seen: set[Tensor] = set()
        for name, param in zip(self._names(group), group["params"], strict=True):
            if param in seen:
                raise ValueError(f"{label}: {name} appears twice")
            seen.add(param)
            if param.layout != torch.strided:
                raise ValueError(f"{name}: expected a dense tensor, got layout {param.layout}")
            if not param.is_floating_point():
                raise ValueError(
                    f"{name}: expected real floating-point numbers, got {param.dtype}; leave it "
                    "out of the optimizer"
                )
            if group["algorithm"] == "muon" and param.ndim < 2:
                raise ValueError(
                    f"{name}: Muon needs at least 2 dimensions, got shape {tuple(param.shape)}; "
                    "put it into a group with algorithm='adamw', or let muon_param_groups(model) "
                    "sort the parameters"
                )

    def _ready(self) -> Engine:
        """The engine for the parameters as they are now; state for each of them."""
        current = [p for group in self.param_groups for p in group["params"]]
        engine = self._engine
        if (
            engine is not None
            and len(current) == len(engine.params)
            and all(p is q for p, q in zip(current, engine.params, strict=True))
        ):
            return engine
        named = [(group, self._names(group)) for group in self.param_groups]
        self._engine = build_engine(
            named,
            bucket_bytes=self._bucket_bytes,
            replica_route=self._replica_route,
            replicate_mesh=self._replicate_mesh,
        )
        self._make_state(self._engine)
        return self._engine

    def _warn_if_idle(self) -> None:
        if self._warned_idle or any(
            p.grad is not None for group in self.param_groups for p in group["params"]
        ):
            return
        self._warned_idle = True
        warnings.warn(
            "step() found no gradient on any parameter of the optimizer. If the model was sharded "
            "or moved after the optimizer was built, the optimizer holds dead tensors: build it "
            "after fully_shard or parallelize_module, and before the first forward",
            stacklevel=3,
        )

    def _make_state(self, engine: Engine) -> None:
        """State for each parameter, in its layout; what is there already is kept."""
        for entry in engine.entries:
            state = self.state[entry.param]
            dtype = entry.group["momentum_dtype"] or entry.param.dtype
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = zeros_like_param(entry.param, dtype)
            _check_shape(entry.name, "momentum_buffer", buffer, entry.param)
            if entry.source is not None:
                buffer = in_layout(buffer, entry.source, self._replicate_mesh, dtype)
            state["momentum_buffer"] = buffer
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                for name, param in zip(self._names(group), group["params"], strict=True):
                    state = self.state[param]
                    if not state:
                        state.update(make_state(param, amsgrad=group["amsgrad"]))
                    for key, value in state.items():
                        if key != "step":
                            _check_shape(name, key, value, param)


def _check_shape(name: str, key: str, state: Tensor, param: Tensor) -> None:
    if state.shape != param.shape:
        raise ValueError(
            f"{name}: state {key!r} has shape {tuple(state.shape)}, the parameter "
            f"{tuple(param.shape)}; it was saved for another parameter"
        )
