# SPDX-License-Identifier: Apache-2.0
"""From what a person gives as a model to its parameters. No torch where none is needed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.models.catalog import PRESETS, preset
from hyper_parallel.models.errors import InputError
from hyper_parallel.models.model_param import Model
from hyper_parallel.models.shape_list import shape_list


def load_model(given: str) -> Model:
    """Find out what was given, and read it.

    Args:
        given: A preset's name, which comes first (``./gpt2`` is a folder); a Hugging Face
            ``config.json`` or a folder with one; a JSON list of names and shapes; or
            ``module:function``.

    Returns:
        The model.

    Raises:
        InputError: If it is none of these, or not what it seems.
    """
    path = Path(given)
    if given.lower() in PRESETS:
        return preset(given)
    if path.suffix == ".json" or os.sep in given or path.exists():
        return _from_file(path)
    if ":" in given:
        from hyper_parallel.models.module_source import built_model

        return built_model(given)
    return preset(given)


def _from_file(path: Path) -> Model:
    if path.is_dir():
        path = path / "config.json"
        if not path.exists():
            raise InputError(f"{path.parent} is a directory without a config.json")
    value = read_json(path)
    if isinstance(value, list):
        return shape_list(value, str(path))
    if isinstance(value, Mapping) and isinstance(value.get("model_type"), str):
        from hyper_parallel.models.module_source import config_model

        return config_model(value, path)
    what = "an object without model_type" if isinstance(value, Mapping) else repr(value)[:40]
    raise InputError(
        f"{path}: expected a Hugging Face config with model_type, or a list of objects with name "
        f"and shape, got {what}"
    )


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Args:
        path: The file.

    Returns:
        Its value.

    Raises:
        InputError: If it is no file, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
