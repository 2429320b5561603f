# SPDX-License-Identifier: Apache-2.0
"""What optimizer state a distributed checkpoint holds, from its ``.metadata`` alone.

Names are those of ``torch.distributed.checkpoint.state_dict``, flattened or not, or of a plain
``state_dict()``, whose parameters are numbers.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hyper_parallel.models.errors import InputError

# Both end in a word without a dot; what stands between is a parameter's name, or a group's number.
_STATE: Final = re.compile(r"(?P<prefix>|.*?\.)state\.(?P<param>.+)\.(?P<kind>[^.]+)")
_OPTION: Final = re.compile(r"(?P<prefix>|.*?\.)param_groups\.(?P<param>.+)\.(?P<key>[^.]+)")
_ONLY_MUON: Final = "ns_coefficients"
"""A setting that every group of Muon has, and no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        shape: Global shape.
        dtype: Name of its dtype.
        num_chunks: In how many parts it was written.
        nbytes: Bytes of all parts.
    """

    shape: tuple[int, ...]
    dtype: str
    num_chunks: int
    nbytes: int


@dataclass(kw_only=True)
class CheckpointSummary:
    """What a checkpoint holds.

    Attributes:
        path: Its folder.
        state: State tensors by parameter, then by kind.
        options: Names of the stored settings by group or, flattened, by parameter.
        weights: All other tensors.
    """

    path: Path
    state: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)
    weights: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def missing_momentum(self) -> list[str]:
        """Parameters in a group of Muon that have no momentum.

        Only a flattened state dict names the parameters of a group in its metadata.
        """
        return [
            param
            for param, keys in self.options.items()
            if _ONLY_MUON in keys
            and not param.isdigit()
            and "momentum_buffer" not in self.state.get(param, {})
        ]

    @property
    def stateless_weights(self) -> list[str]:
        """Weights that have no optimizer state: frozen, or lost. None if names are numbers."""
        if not self.state or all(param.isdigit() for param in self.state):
            return []
        return [name for name in self.weights if not self._has_state(name)]

    def _has_state(self, name: str) -> bool:
        """Whether a weight, whose name may have the model's in front, has state."""
        parts = name.split(".")
        return any(".".join(parts[i:]) in self.state for i in range(len(parts)))


def read_checkpoint(path: Path) -> CheckpointSummary:
    """Read the metadata of a checkpoint. No tensor is read.

    The metadata is a pickle, as torch writes it: do not open a checkpoint of a stranger.

    Args:
        path: Folder that ``torch.distributed.checkpoint.save`` wrote.

    Returns:
        What it holds.

    Raises:
        InputError: If it is no such folder.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    if not path.is_dir():
        raise InputError(
            f"{path} is a file; expected the folder that torch.distributed.checkpoint wrote"
        )
    if not (path / ".metadata").is_file():
        inside = sorted(p.parent.name for p in path.glob("*/.metadata"))
        hint = f"; did you mean one of those in it: {', '.join(inside[-3:])}?" if inside else ""
        raise InputError(
            f"{path} has no .metadata, which a checkpoint gets when it is complete{hint}"
        )
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        metadata = FileSystemReader(path).read_metadata()
        entries: Mapping[str, Any] = metadata.state_dict_metadata
    except Exception as error:  # unpickling may raise anything
        raise InputError(f"{path}/.metadata is damaged: {type(error).__name__}: {error}") from error
    summary = CheckpointSummary(path=path)
    for name, entry in entries.items():
        tensor = _stored(entry)
        if (option := _OPTION.fullmatch(name)) is not None:
            summary.options.setdefault(option["param"], []).append(option["key"])
        elif tensor is not None and (state := _STATE.fullmatch(name)) is not None:
            summary.state.setdefault(state["param"], {})[state["kind"]] = tensor
        elif tensor is not None:
            summary.weights[name] = tensor
    return summary


def _stored(entry: Any) -> StoredTensor | None:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    return StoredTensor(
        shape=tuple(entry.size),
        dtype=str(dtype).removeprefix("torch."),
        num_chunks=len(entry.chunks),
        nbytes=math.prod(entry.size) * dtype.itemsize,
    )
