# SPDX-License-Identifier: Apache-2.0
"""What a machine can do, as numbers, and the file that holds them. No torch.

[Note: four rates]
A step is made of matrix products, passes over memory, messages, and the launch of each of these.

product    ``flops / peak * (1 + half_size / size)`` seconds, where ``size`` is the geometric mean
           of its three dims: at ``half_size`` it reaches half of the peak; or as measured
pass       ``bytes / memory_bytes_per_s``, counting what is read and what is written
message    ``latency_s`` for each peer, and ``bytes / bytes_per_s`` of the link that they cross
launch     ``operation_s`` for each operation

Ranks ``k * ranks_per_node`` to ``(k + 1) * ranks_per_node - 1`` share node ``k``.
"""

import json
import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

SCHEMA_VERSION: Final = 1
_FILE_KEY: Final = "hyper_parallel_hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRate:
    """How fast one rank multiplies matrices of one dtype.

    Attributes:
        peak_flops_per_s: Rate that very large products approach.
        half_size: Geometric mean of a product's dims at which it reaches half of that.
        measured: Sizes, ascending, and the rate measured at each. Where there are any, they take
            the place of the formula, as straight lines between logarithms: real rates also fall
            again, where a matrix leaves a cache.
    """

    peak_flops_per_s: float
    half_size: float
    measured: tuple[tuple[float, float], ...] = ()

    def seconds(self, flops: float, size: float) -> float:
        """Time of one product.

        Args:
            flops: Its operations.
            size: Geometric mean of its three dims.

        Returns:
            Seconds.

        Example:
            >>> MatrixRate(peak_flops_per_s=2e12, half_size=100).seconds(2e12, size=100)
            2.0
        """
        if self.measured:
            return flops / self._measured_at(size)
        return flops / self.peak_flops_per_s * (1 + self.half_size / size)

    def faster(self, factor: float) -> "MatrixRate":
        """The same at every size, times a factor.

        Args:
            factor: The factor.

        Returns:
            Another rate.
        """
        return replace(
            self,
            peak_flops_per_s=self.peak_flops_per_s * factor,
            measured=tuple((size, flops * factor) for size, flops in self.measured),
        )

    def _measured_at(self, size: float) -> float:
        sizes = [known for known, _ in self.measured]
        above = bisect(sizes, size)
        if above in (0, len(sizes)):
            return self.measured[max(0, above - 1)][1]
        (low, slow), (high, fast) = self.measured[above - 1], self.measured[above]
        share = math.log(size / low) / math.log(high / low)
        return slow * math.exp(share * math.log(fast / slow))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The alpha-beta model of a link, as one rank sees it.

    Attributes:
        latency_s: Seconds that a message to one more peer takes, however short.
        bytes_per_s: Rate at which one rank receives.

    References:
        Hockney, "The communication challenge for MPP", 1994.
        https://doi.org/10.1016/S0167-8191(06)80021-9
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What predictions are made from; see [Note: four rates].

    Attributes:
        name: Short name.
        source: Where the numbers come from.
        device_type: ``"cpu"``, ``"cuda"`` or another that torch knows.
        matrix_rates: By name of the dtype.
        memory_bytes_per_s: Rate of reading and writing, together.
        memory_bytes: Memory of one rank.
        operation_s: Seconds that launching one operation takes.
        within_node: Link between ranks of a node.
        between_nodes: Link between ranks of different nodes.
        ranks_per_node: Ranks of a node.
        cores_per_node: Cores that the ranks of a node share, in effect: less than there are where
            ranks wait for their turn. None if each has its own device.
    """

    name: str
    source: str
    device_type: str
    matrix_rates: Mapping[str, MatrixRate]
    memory_bytes_per_s: float
    memory_bytes: float
    operation_s: float
    within_node: Link
    between_nodes: Link
    ranks_per_node: int
    cores_per_node: float | None = None

    def matrix_rate(self, dtype: str) -> MatrixRate:
        """The rate for a dtype.

        Args:
            dtype: Name of the dtype.

        Returns:
            Its rate.

        Raises:
            ValueError: If the hardware has none.
        """
        if dtype not in self.matrix_rates:
            known = ", ".join(self.matrix_rates)
            raise ValueError(
                f"hardware {self.name}: no matrix rate for {dtype}, only for {known}; add it to "
                "matrix_rates in a hardware file, or plan with another ns_dtype"
            )
        return self.matrix_rates[dtype]

    def link(self, left: int, right: int) -> str:
        """Which link two ranks use: ``"within_node"`` or ``"between_nodes"``."""
        same = left // self.ranks_per_node == right // self.ranks_per_node
        return "within_node" if same else "between_nodes"


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write a hardware file.

    Args:
        hardware: What to write.
        path: Where.
    """
    text = json.dumps({_FILE_KEY: SCHEMA_VERSION, **asdict(hardware)}, indent=2)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load_hardware(path: str | Path) -> Hardware:
    """Read a hardware file.

    Args:
        path: A file that :func:`save_hardware` wrote, or one written by hand.

    Returns:
        The hardware.

    Raises:
        ValueError: If it is no such file; the message names file and field, what was expected and
            what was found.
        OSError: If it cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a hardware file in JSON, got {error}") from None
    if not isinstance(data, dict) or _FILE_KEY not in data:
        raise ValueError(
            f"{path}: expected a hardware file, an object with {_FILE_KEY!r}; make one with "
            "`hyper-parallel calibrate`"
        )
    if data[_FILE_KEY] != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: {_FILE_KEY}: expected version {SCHEMA_VERSION}, got {data[_FILE_KEY]!r}"
        )
    return _hardware({key: value for key, value in data.items() if key != _FILE_KEY}, str(path))


def _hardware(data: Mapping[str, Any], where: str) -> Hardware:
    _check_keys(data, Hardware, where)
    rates = data["matrix_rates"]
    if not isinstance(rates, dict) or not rates:
        raise ValueError(
            f"{where}: matrix_rates: expected an object from dtype to rate, such as "
            f'{{"bfloat16": {{...}}}}, got {rates!r}'
        )
    cores = data.get("cores_per_node")
    return Hardware(
        name=_text(data, "name", where),
        source=_text(data, "source", where),
        device_type=_text(data, "device_type", where),
        matrix_rates={
            dtype: _matrix_rate(rate, f"{where}: matrix_rates.{dtype}")
            for dtype, rate in rates.items()
        },
        memory_bytes_per_s=_number(data, "memory_bytes_per_s", where),
        memory_bytes=_number(data, "memory_bytes", where),
        operation_s=_number(data, "operation_s", where),
        within_node=Link(**_numbers(data["within_node"], Link, f"{where}: within_node")),
        between_nodes=Link(**_numbers(data["between_nodes"], Link, f"{where}: between_nodes")),
        ranks_per_node=_whole(data, "ranks_per_node", where),
        cores_per_node=None if cores is None else _number(data, "cores_per_node", where),
    )


def _matrix_rate(data: Any, where: str) -> MatrixRate:
    _check_keys(data, MatrixRate, where)
    points = data.get("measured", [])
    pairs = isinstance(points, list) and all(isinstance(p, list) and len(p) == 2 for p in points)
    if not pairs:
        raise ValueError(f"{where}: measured: expected a list of [size, rate], got {points!r}")
    measured = tuple(
        (_number({"size": size}, "size", where), _number({"rate": rate}, "rate", where))
        for size, rate in points
    )
    if any(low >= high for (low, _), (high, _) in pairwise(measured)):
        raise ValueError(f"{where}: measured: expected ascending sizes, got {points!r}")
    return MatrixRate(
        peak_flops_per_s=_number(data, "peak_flops_per_s", where),
        half_size=_number(data, "half_size", where),
        measured=measured,
    )


def _check_keys(data: Any, kind: Any, where: str) -> None:
    fields = kind.__dataclass_fields__
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object with {', '.join(fields)}, got {data!r}")
    needed = [key for key in fields if key not in ("cores_per_node", "measured")]
    missing = [key for key in needed if key not in data]
    unknown = [key for key in data if key not in fields]
    if missing or unknown:
        found = [f"{key} is missing" for key in missing]
        found += [f"{key} is not known" for key in unknown]
        raise ValueError(f"{where}: expected {', '.join(fields)}; {', '.join(found)}")


def _numbers(data: Any, kind: Any, where: str) -> dict[str, float]:
    _check_keys(data, kind, where)
    return {key: _number(data, key, where) for key in data}


def _text(data: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(data[key], str):
        raise ValueError(f"{where}: {key}: expected text, got {data[key]!r}")
    return str(data[key])


def _number(data: Mapping[str, Any], key: str, where: str) -> float:
    value = data[key]
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    least = 0 if key in ("latency_s", "half_size", "operation_s") else math.ulp(0.0)
    if not good or value < least:
        kind = "number of at least 0" if least == 0 else "positive number"
        raise ValueError(f"{where}: {key}: expected a {kind}, got {value!r}")
    return float(value)


def _whole(data: Mapping[str, Any], key: str, where: str) -> int:
    value = data[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {key}: expected a whole number of at least 1, got {value!r}")
    return value
