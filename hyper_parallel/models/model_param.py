# SPDX-License-Identifier: Apache-2.0
"""A model as a list of parameters: names, shapes and what they are for. No torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hyper_parallel.core.optimizer.matrix_view import MatrixView

_NUMBER: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParam:
    """One parameter, before anything has cut it.

    Attributes:
        name: Name in the model.
        shape: Global shape.
        algorithm: ``"muon"`` or ``"adamw"``, as ``muon_param_groups`` decides.
        role: Why, in plain words.
        view: What its matrices are.
        is_transposed: Whether rows are inputs, as in GPT-2's ``Conv1D``.
        placements: What a file says about mesh axes, by name; recipes decide about the others.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: str
    role: str
    view: MatrixView = None
    is_transposed: bool = False
    placements: Mapping[str, str] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Index of the layer that it belongs to: the first number in its name."""
        found = _NUMBER.search(self.name)
        return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's parameters.

    Attributes:
        name: What to call it.
        params: The parameters; a tied one once.
        source: Where the numbers come from: a URL, a file or a function.
        num_heads: Attention heads, if known.
        num_kv_heads: Heads of keys and values, if known.
    """

    name: str
    params: tuple[ModelParam, ...]
    source: str
    num_heads: int | None = None
    num_kv_heads: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(param.numel for param in self.params)
