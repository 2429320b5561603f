# SPDX-License-Identifier: Apache-2.0
"""What a plan is made of: parameters, matrices with owners, buckets. Frozen records, no torch.

[Note: owner-based exchange]
Storage layout   each rank holds a region of every tensor (see [Note: regions] in ``regions.py``).
Compute layout   the *owner* of a matrix holds it whole; every other rank holds nothing of it.
gather           storage to compute: every piece travels once, from a rank that holds it.
scatter          compute to storage: every holder, replicas included, gets its piece of the update.

Both directions are one all-to-all per bucket, with a header of ``HEADER_BYTES`` for each peer.
A bucket whose matrices all lie whole on their owners has no gather; one whose owners alone hold
them has no exchange at all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from hyper_parallel.core.optimizer.cost_model import ITEMSIZE
from hyper_parallel.core.optimizer.forms import Form, choose_form, form_flops
from hyper_parallel.core.optimizer.layout import ParamLayout
from hyper_parallel.core.optimizer.matrix_view import MatrixBox, MatrixView

HEADER_BYTES: Final = 16
"""Bytes that head every packet, for the sender's status and a fingerprint of what it steps on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonalization:
    """How a matrix is orthogonalized.

    Attributes:
        coefficients: ``(a, b, c)`` of each Newton-Schulz step.
        method: ``"auto"``, ``"standard"``, ``"gram"`` or ``"standard+quack"``.
        eps: Floor of the norm.
        dtype: Name of the dtype that the iteration runs in.
        device_type: Where it runs: ``"cpu"``, ``"cuda"``.
    """

    coefficients: tuple[tuple[float, float, float], ...]
    method: str
    eps: float
    dtype: str
    device_type: str

    @property
    def wire_dtype(self) -> str:
        """Dtype of a matrix on its way, which is that of the iteration.

        Float16 is the exception: an update is only scaled into its range once it is whole.
        """
        return "float32" if self.dtype == "float16" else self.dtype

    def form(self, num_rows: int, num_cols: int) -> Form:
        """The form that matrices of a shape take."""
        return choose_form(
            num_rows,
            num_cols,
            self.coefficients,
            method=self.method,
            dtype=self.dtype,
            device_type=self.device_type,
        )

    def flops(self, matrix: MatrixBox) -> int:
        """Operations that one matrix takes."""
        return _flops(self, matrix.num_rows, matrix.num_cols)


@lru_cache(maxsize=4096)
def _flops(work: Orthogonalization, num_rows: int, num_cols: int) -> int:
    form = work.form(num_rows, num_cols)
    return form_flops(form, num_rows, num_cols, len(work.coefficients))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedParam:
    """One parameter, as far as a plan needs to know it.

    Attributes:
        name: Name in the model, or its position and shape if it was given none.
        layout: Where weight and gradient live, and where the update has to go.
        source: Where momentum lives, and where the update comes from. The same as ``layout``, or
            cut further over its replicas.
        view: What its matrices are.
        work: How they are orthogonalized.
    """

    name: str
    layout: ParamLayout
    source: ParamLayout
    view: MatrixView
    work: Orthogonalization


@dataclass(frozen=True, slots=True)
class PlannedMatrix:
    """One matrix and its owner.

    Attributes:
        param: Index into the plan's parameters.
        matrix: Which box of the parameter it is.
        owner: Global rank that orthogonalizes it.
    """

    param: int
    matrix: MatrixBox
    owner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Matrices that travel together.

    Attributes:
        ranks: Global ranks that take part, ascending.
        route: ``"direct"``: updates go from the owner to every holder in one all-to-all.
            ``"staged"``: to the holders of the owner's copy first, and from each of them along the
            replicate axes to those that hold the same. The bytes are equal, the groups smaller.
        wire_dtype: Dtype on the wire.
        gathers: Whether anything travels to an owner.
        scatters: Whether anything travels back.
        matrices: What is in it, in packing order.
    """

    ranks: tuple[int, ...]
    route: str
    wire_dtype: str
    gathers: bool
    scatters: bool
    matrices: tuple[PlannedMatrix, ...]

    @property
    def relays(self) -> bool:
        """Whether updates pass on along the replicate axes in a stage of their own."""
        return self.scatters and self.route == "staged"

    @property
    def num_collectives(self) -> int:
        """All-to-alls of this bucket in one step."""
        return int(self.gathers) + int(self.scatters) + int(self.relays)

    @property
    def itemsize(self) -> int:
        """Bytes of one element on the wire."""
        return ITEMSIZE[self.wire_dtype]


def owner_loads(
    params: Sequence[PlannedParam], buckets: Iterable[Bucket], ranks: Sequence[int]
) -> dict[int, int]:
    """FLOPs that each rank owns.

    Args:
        params: The plan's parameters.
        buckets: Buckets of one set of ranks.
        ranks: The set.

    Returns:
        Operations of one step, by global rank.
    """
    loads = dict.fromkeys(ranks, 0)
    for bucket in buckets:
        for planned in bucket.matrices:
            loads[planned.owner] += params[planned.param].work.flops(planned.matrix)
    return loads
