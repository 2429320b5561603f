# SPDX-License-Identifier: Apache-2.0
"""Bytes to train on: any folder of text, by default the Python standard library's own source.

Nothing is downloaded. Files are split whole into train and validation, and every batch is a
function of ``(split, seed, index)`` alone: no state to save, and the same for any number of ranks.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "validation"]

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_VALIDATION_SHARE = 0.1  # of the files
_MAX_BYTES = 2**28  # of text held in memory; a larger folder is sampled by whole files


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text of the two splits, held as one byte a token.

    Attributes:
        train: ``(num_bytes,)`` uint8, whole files one after the other.
        validation: The same for the files kept apart.
        num_files: Files read, both splits together.
    """

    train: NDArray[np.uint8]
    validation: NDArray[np.uint8]
    num_files: int

    def batch(
        self, split: Split, *, index: int, seed: int, size: int, context: int
    ) -> NDArray[np.int64]:
        """Draw the global batch number ``index``.

        Args:
            split: ``"train"`` or ``"validation"``.
            index: Number of the batch. The same index gives the same batch.
            seed: Seed of the order.
            size: Sequences in the batch, over all ranks.
            context: Bytes a sequence predicts.

        Returns:
            ``(size, context + 1)`` int64: a rank takes its rows; inputs are ``[:, :-1]`` and
            targets ``[:, 1:]``.
        """
        text = self.train if split == "train" else self.validation
        starts = np.random.default_rng([seed, index]).integers(len(text) - context, size=size)
        return text[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def load_text(folder: Path | None, *, context: int) -> TextData:
    """Read the text below ``folder``, split by file.

    A file's place is decided by a hash of its relative path, so the split is the same on every
    machine and for every rank.

    Args:
        folder: Folder of text files, searched recursively. None takes the standard library.
        context: Each split must hold at least one sequence of ``context + 1`` bytes.

    Returns:
        The two splits. At most 256 MiB of text; of a larger folder, a sample of its files.

    Raises:
        ValueError: If ``folder`` is no folder or a split is too small.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    if not root.is_dir():
        raise ValueError(f"data: {root} is not a folder; pass --data FOLDER with text files in it")
    paths = _python_sources(root) if folder is None else _visible_files(root)
    texts = list(_read_texts(sorted(paths, key=lambda path: _digest(path.relative_to(root)))))
    num_validation = max(1, round(_VALIDATION_SHARE * len(texts)))
    data = TextData(
        train=_join(texts[num_validation:]),
        validation=_join(texts[:num_validation]),
        num_files=len(texts),
    )
    for split, text in (("training", data.train), ("validation", data.validation)):
        if len(text) <= context:
            raise ValueError(
                f"data: {root} gives {len(text)} bytes of {split} text from {len(texts)} files, "
                f"--context {context} needs at least {context + 1}; pass a folder with more text"
            )
    return data


def _python_sources(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            yield path


def _visible_files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not hidden:
            yield path


def _read_texts(paths: list[Path]) -> Iterator[bytes]:
    total = 0
    for path in paths:
        if total + path.stat().st_size <= _MAX_BYTES:
            text = path.read_bytes()
            if b"\0" not in text:  # a NUL byte means a binary file
                total += len(text)
                yield text


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.as_posix().encode()).digest()


def _join(texts: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(texts), dtype=np.uint8)
