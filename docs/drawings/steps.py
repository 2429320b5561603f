# SPDX-License-Identifier: Apache-2.0
"""Drawings of what travels in a step, and when."""

from typing import Final

import torch

from docs.drawings.canvas import Canvas

_RANKS: Final = range(4)


def sharding() -> str:
    """The polar factor of a matrix beside those of its two halves."""
    rows = [[3, 1, 2, 0, 1, 2], [1, 4, 0, 2, 2, 1], [2, 0, 5, 1, 0, 3], [0, 2, 1, 3, 2, 0]]
    matrix = torch.tensor(rows, dtype=torch.float64)
    whole = _polar(matrix)
    halves = torch.cat([_polar(half) for half in matrix.chunk(2)])
    error = float((halves - whole).norm() / whole.norm())
    canvas = Canvas(760, 214, "Orthogonalizing the halves of a matrix is not orthogonalizing it")
    tables = (
        (24, "momentum", matrix / 5, "on two ranks: two rows each"),
        (276, "orthogonalized whole", whole, "what Muon asks for"),
        (528, "each half by itself", halves, f"off by {error:.0%} of its length"),
    )
    for left, name, values, note in tables:
        canvas.text(left, 34, name, weight=600)
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                x, y = left + j * 34, 48 + i * 30
                canvas.box(x, y, 34, 30, fill="none")
                level = round(min(1.0, abs(value)) * 10) / 10
                if level:
                    canvas.box(x, y, 34, 30, fill="c0" if value > 0 else "c1", opacity=level)
        canvas.text(left, 196, note, size=12, fill="bad" if "off" in note else "soft")
    for left in (24, 528):
        canvas.line((left - 8, 108), (left + 212, 108), dashed=True)
    return canvas.svg()


def _polar(matrix: torch.Tensor) -> torch.Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    factor: torch.Tensor = left @ right
    return factor


def exchange() -> str:
    """Four matrices on four FSDP ranks: pieces go to the owner, are made whole, and go back."""
    canvas = Canvas(760, 300, "Pieces of four matrices travel to their owners and back")
    stages = ((90, "stored: a quarter of each"), (350, "owned: one whole"), (610, "stored again"))
    for left, name in stages:
        canvas.text(left, 34, name, weight=600)
    for rank in _RANKS:
        top = 52 + rank * 54
        canvas.text(24, top + 24, f"rank {rank}", fill="soft")
        for left in (90, 610):
            for matrix in _RANKS:
                canvas.box(left + matrix * 27, top, 25, 38, fill="none")
                canvas.box(left + matrix * 27, top + rank * 9.5, 25, 9.5, fill=f"c{matrix}")
        canvas.box(350, top, 106, 38, fill=f"c{rank}")
        canvas.text(403, top + 24, "Newton-Schulz", size=12, fill="on", anchor="middle")
        for other in _RANKS:
            end = 52 + other * 54 + 19
            canvas.arrow((204, top + 19), (344, end))
            canvas.arrow((462, top + 19), (604, end))
    canvas.text(274, 286, "gather: one all-to-all", size=12, fill="soft", anchor="middle")
    canvas.text(533, 286, "scatter: one all-to-all", size=12, fill="soft", anchor="middle")
    return canvas.svg()


def pipeline() -> str:
    """While a bucket is orthogonalized, the next travels in and the last travels back."""
    canvas = Canvas(760, 206, "Buckets in flight: exchanges beside orthogonalization")
    canvas.text(24, 34, "One rank, four buckets", weight=600)
    canvas.text(736, 34, "time →", size=12, fill="soft", anchor="end")
    for top, name in ((50, "gather"), (94, "orthogonalize"), (138, "scatter")):
        canvas.text(24, top + 22, name, fill="soft")
    slot = 100
    for bucket in range(4):
        for step, top in enumerate((50, 94, 138)):
            left = 130 + (bucket + step) * slot
            canvas.box(left, top, slot - 6, 34, fill=f"c{bucket}")
            words = f"bucket {bucket}"
            canvas.text(left + slot / 2 - 3, top + 22, words, size=12, fill="on", anchor="middle")
    canvas.line((224 + 3, 44), (224 + 3, 178), dashed=True)
    words = "the first exchange tells whether all are well; nothing is written before"
    canvas.text(236, 196, words, size=12, fill="soft")
    return canvas.svg()


def replicas() -> str:
    """HSDP of two replicas of two shards: routes of an update, and momentum kept once."""
    canvas = Canvas(760, 296, "How an update reaches the other replica, and momentum kept once")
    panels = (
        (24, "direct", ((0, 1), (0, 2), (0, 3))),
        (276, "staged", ((0, 1), (0, 2), (1, 3))),
    )
    for left, name, arrows in panels:
        canvas.text(left, 34, name, weight=600)
        places = [(left + 8 + rank % 2 * 116, 72 + rank // 2 * 104) for rank in _RANKS]
        for rank, (x, y) in enumerate(places):
            canvas.box(x, y, 76, 44, fill="c0" if rank == 0 else "none")
            words, fill = ("owner", "on") if rank == 0 else (f"rank {rank}", "ink")
            canvas.text(x + 38, y + 27, words, size=12, fill=fill, anchor="middle")
        for source, target in arrows:
            (x0, y0), (x1, y1) = places[source], places[target]
            start = (x0 + (38 if x0 == x1 else 76), y0 + (44 if y0 != y1 else 22))
            end = (x1 + (38 if x0 == x1 else -2), y1 + (-2 if y0 != y1 else 22))
            canvas.arrow(start, end)
        for row, top in enumerate((62, 236)):
            canvas.text(left + 8, top, f"replica {row}", size=11, fill="soft")
    canvas.text(24, 262, "one all-to-all over all ranks", size=12, fill="soft")
    canvas.text(276, 262, "within the replica first, then", size=12, fill="soft")
    canvas.text(276, 279, "along the replicate axis", size=12, fill="soft")
    canvas.text(528, 34, "shard_momentum=True", weight=600)
    for rank in _RANKS:
        x, y = 536 + rank % 2 * 104, 58 + rank // 2 * 98
        canvas.box(x, y, 76, 76, fill="none")
        part = rank % 2 * 2 + rank // 2
        canvas.box(x, y + part * 19, 76, 19, fill=f"c{rank}")
        canvas.text(x + 38, y + 91, f"rank {rank}", size=11, fill="soft", anchor="middle")
    canvas.text(528, 279, "momentum: a quarter each", size=12, fill="soft")
    return canvas.svg()


def agreement() -> str:
    """A gradient that is missing on one rank becomes the same error on all."""
    canvas = Canvas(760, 232, "A missing gradient on one rank becomes the same error on all")
    for left, name in ((110, "prepare"), (270, "first exchange"), (420, "verdict"), (600, "end")):
        canvas.text(left, 34, name, weight=600)
    for rank in range(3):
        top = 50 + rank * 56
        bad = rank == 1
        canvas.text(24, top + 25, f"rank {rank}", fill="soft")
        canvas.box(110, top, 120, 40, fill="none")
        words = "no gradient of w" if bad else "all gradients"
        canvas.text(170, top + 25, words, size=12, fill="bad" if bad else "ink", anchor="middle")
        for other in range(3):
            if other != rank:
                canvas.arrow((234, top + 20), (416, 50 + other * 56 + 20))
        canvas.box(420, top, 150, 40, fill="none")
        canvas.text(495, top + 25, "rank 1 cannot step", size=12, anchor="middle")
        canvas.box(600, top, 136, 40, fill="none")
        canvas.text(668, top + 25, "RuntimeError", size=12, fill="bad", anchor="middle")
    words = "16 bytes head each packet: status and a fingerprint. Weights and state are as before."
    canvas.text(24, 220, words, size=12, fill="soft")
    return canvas.svg()
