# SPDX-License-Identifier: Apache-2.0
"""Data of the training example: split by file, the same everywhere."""

from pathlib import Path

import numpy as np
import pytest

from examples.text_data import load_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(20):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * 100)
    return tmp_path


def test_each_file_is_in_one_split(folder: Path) -> None:
    data = load_text(folder, context=16)
    train, validation = set(data.train.tolist()), set(data.validation.tolist())
    assert len(validation) == 2  # a tenth of the files
    assert train | validation == {65 + i for i in range(20)}
    assert not train & validation
    assert len(data.train) + len(data.validation) == 2000


def test_the_split_does_not_depend_on_where_the_folder_is(folder: Path, tmp_path: Path) -> None:
    before = load_text(folder, context=16).validation
    after = load_text(folder.rename(tmp_path.with_name("moved")), context=16).validation
    np.testing.assert_array_equal(before, after)


def test_binary_and_hidden_files_are_left_out(folder: Path) -> None:
    (folder / "image.bin").write_bytes(b"a\0b")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_bytes(b"text")
    assert load_text(folder, context=16).num_files == 20


def test_a_batch_is_a_function_of_its_index_and_seed(folder: Path) -> None:
    data = load_text(folder, context=16)
    first = data.batch("train", index=3, seed=1, size=4, context=16)
    assert first.shape == (4, 17)
    np.testing.assert_array_equal(first, data.batch("train", index=3, seed=1, size=4, context=16))
    for index, seed in ((4, 1), (3, 2)):
        assert (first != data.batch("train", index=index, seed=seed, size=4, context=16)).any()


def test_the_standard_library_is_the_default_text() -> None:
    data = load_text(None, context=128)
    assert len(data.train) > len(data.validation) > 100_000
    assert b"import" in data.validation.tobytes()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere is not a folder; pass --data"):
        load_text(tmp_path / "nowhere", context=16)


def test_too_little_text_is_counted(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"200 bytes of validation text .* at least 1001"):
        load_text(folder, context=1000)
