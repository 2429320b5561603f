# SPDX-License-Identifier: Apache-2.0
"""Parameters of a real module on the meta device, from a function or a Hugging Face config.

Which optimizer a parameter goes to is what ``muon_param_groups`` says.
"""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.optimizer.param_groups import muon_param_groups
from hyper_parallel.models.errors import InputError, unknown
from hyper_parallel.models.model_param import Model, ModelParam


def module_params(module: nn.Module) -> tuple[ModelParam, ...]:
    """The trainable parameters of a module.

    Args:
        module: Any module; on the meta device it takes no memory.

    Returns:
        The parameters, in its order, a tied one once.
    """
    types = {name: type(child).__name__ for name, child in module.named_modules()}
    return tuple(
        ModelParam(
            name=record.fqn,
            shape=record.shape,
            algorithm=record.algorithm,
            role=record.reason,
            view=record.matrix_view,
            is_transposed=len(record.shape) == 2
            and types.get(record.fqn.rpartition(".")[0]) == "Conv1D",
        )
        for record in muon_param_groups(module).report
        if record.algorithm != "frozen"
    )


def built_model(target: str) -> Model:
    """A model that a function builds.

    Args:
        target: ``"package.module:function"``, the function without arguments. The working
            directory is searched, too.

    Returns:
        The model.

    Raises:
        InputError: If it cannot be imported, called, or does not return a module.
    """
    module_name, _, function_name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{target}: cannot import {module_name}: {error}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise InputError(unknown(f"function in {module_name}:", function_name, names))
    try:
        with torch.device("meta"):
            built = function()
    except Exception as error:  # a stranger's code may raise anything
        raise InputError(f"{target}() raised {type(error).__name__}: {error}") from error
    if not isinstance(built, nn.Module):
        raise InputError(f"{target}() must return a torch.nn.Module, got {type(built).__name__}")
    config = getattr(built, "config", None)
    return _model(target, built, target, config)


def config_model(config: Mapping[str, Any], path: Path) -> Model:
    """A model from a Hugging Face ``config.json``.

    Args:
        config: What the file holds.
        path: The file.

    Returns:
        The model that ``transformers`` makes of it: the one with a language-modelling head if the
        architecture has one.

    Raises:
        InputError: If ``transformers`` is not there, does not know the architecture or cannot build
            it.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise InputError(
            f"{path}: reading a Hugging Face config needs transformers: "
            "pip install 'hyper-parallel[models]'"
        ) from None
    transformers.logging.set_verbosity_error()
    values = dict(config)
    model_type = str(values.pop("model_type"))
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        raise InputError(unknown(f"model_type in {path}:", model_type, known))
    try:
        read = transformers.AutoConfig.for_model(model_type, **values)
        # Shapes do not depend on it, and not every attention exists without a GPU.
        with torch.device("meta"):
            built = _build(transformers, read)
    except Exception as error:  # whatever a config may be wrong in
        told = " ".join(str(error).split())
        raise InputError(f"{path}: transformers cannot build {model_type}: {told}") from error
    name = str(config.get("_name_or_path") or "") or f"{path.parent.name}/{path.name}"
    return _model(name, built, str(path), read)


def _build(transformers: Any, config: Any) -> nn.Module:
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM):
        if type(config) in auto._model_mapping:
            built: nn.Module = auto.from_config(config)
            return built
    whole: nn.Module = transformers.AutoModel.from_config(config)
    return whole


def _model(name: str, module: nn.Module, source: str, config: Any) -> Model:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None)
    return Model(
        name=name,
        params=module_params(module),
        source=source,
        num_heads=heads if isinstance(heads, int) else None,
        num_kv_heads=kv_heads if isinstance(kv_heads, int) else None,
    )
