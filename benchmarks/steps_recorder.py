# SPDX-License-Identifier: Apache-2.0
"""Count what one rank does in a step: operations, collectives, bytes from others, new memory.

One dispatch mode sees every operation below DTensor, the native ``c10d`` collectives and the
functional ones. It changes nothing; only its time is not a step's time.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_NO_COLLECTIVES = (
    "wait_tensor",
    "_wrap_tensor_autograd",
    "barrier",
    "monitored_barrier_",
    "check_for_nan",
    "send",
    "isend",
)


class StepRecorder(TorchDispatchMode):
    """Records everything that runs within its block.

    Attributes:
        flops: Operations, by ``torch.utils.flop_counter``'s formulas.
        received: Bytes that reached this rank from others.
        collectives: Number of each collective, by its name in torch.
        peak: Most bytes alive at once, of those allocated within the block. Memory is followed by
            storage: from the operation that returns a tensor on new storage until that storage is
            freed. What a kernel allocates and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.received = 0.0
        self.collectives: Counter[str] = Counter()
        self.peak = 0
        self._alive = 0
        self._known: set[int] = set()  # ids of storages; those freed are taken out

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # let them become plain operations first
        kwargs = kwargs or {}
        self._note(tree_leaves((args, kwargs)), is_new=False)
        out = func(*args, **kwargs)
        self._note(tree_leaves(out), is_new=True)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        namespace, name = str(packet).split(".")[0], packet.__name__
        if namespace in _NAMESPACES and name not in _NO_COLLECTIVES:
            self.collectives[name] += 1
            self.received += received_bytes(name, args, out)
        return out

    def _note(self, values: Iterable[Any], *, is_new: bool) -> None:
        for value in values:
            if not isinstance(value, Tensor) or value.device.type == "meta":
                continue
            storage = value.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            self._known.add(key)
            nbytes = storage.nbytes() if is_new else 0
            self._alive += nbytes
            self.peak = max(self.peak, self._alive)
            weakref.finalize(storage, self._freed, key, nbytes)

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._alive -= nbytes


def received_bytes(name: str, args: Sequence[Any], out: Any) -> float:
    """What one collective brings to this rank from others.

    An all-gather brings all but this rank's own part, an all-reduce twice that (a reduce-scatter
    and an all-gather), an all-to-all its output without the own split; a gather and a reduce bring
    something to the root alone, a scatter and a broadcast to all but the root.

    Args:
        name: Name of the operation in torch.
        args: Its arguments.
        out: What it returned.

    Returns:
        The bytes.

    Raises:
        NotImplementedError: If the operation is not known here.
    """
    group = _group(args)
    place = _Place(dist.get_world_size(group), dist.get_rank(group))
    rule = _RULES.get(name.removesuffix("_").removesuffix("_coalesced"))
    if rule is None:
        raise NotImplementedError(f"how many bytes does {name} receive?")
    return rule(args, out, place)


@dataclass(frozen=True)
class _Place:
    size: int
    rank: int

    @property
    def others(self) -> float:
        return (self.size - 1) / self.size


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    for value in args:
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    names = [value for value in args if isinstance(value, str)]
    return _resolve_process_group(GroupName(names[-1]))


def _nbytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def _but_own(output: Tensor, splits: Sequence[int], place: _Place) -> float:
    if not splits:
        return _nbytes(output) * place.others
    row = output.element_size() * math.prod(output.shape[1:])
    return float(_nbytes(output) - splits[place.rank] * row)


_Rule = Callable[[Sequence[Any], Any, _Place], float]


def _share_of(position: int, times: int = 1) -> _Rule:
    return lambda args, _, place: times * _nbytes(args[position]) * place.others


def _share_of_result(_: Sequence[Any], out: Any, place: _Place) -> float:
    return _nbytes(out) * place.others


def _at_root(args: Sequence[Any], _: Any, place: _Place) -> float:
    return _nbytes(args[0]) * place.others if place.rank == args[3] else 0.0


# By name, without the suffixes for "in place" and "coalesced".
_RULES: dict[str, _Rule] = {
    "alltoall_base": lambda args, _, place: _but_own(args[0], args[3], place),
    "all_to_all_single": lambda args, out, place: _but_own(out, args[1], place),
    "_allgather_base": _share_of(0),
    "allgather": _share_of(0),
    "allgather_into_tensor": _share_of(0),
    "all_gather_into_tensor": _share_of_result,
    "all_gather_into_tensor_out": _share_of_result,
    "shard_dim_alltoall": _share_of_result,
    "allreduce": _share_of(0, times=2),
    "all_reduce": _share_of(0, times=2),
    "reduce_scatter": _share_of(1),
    "_reduce_scatter_base": _share_of(1),
    "reduce_scatter_tensor": _share_of(0),
    "gather": _at_root,
    "scatter": lambda args, _, place: float(place.rank != args[3]) * _nbytes(args[0]),
    "broadcast": lambda args, _, place: (
        float(place.rank != next(a for a in args if isinstance(a, int))) * _nbytes(args[0])
    ),
    "recv": lambda args, _, __: float(_nbytes(args[0])),
}
