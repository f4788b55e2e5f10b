"""Models on disk: one safetensors file each, with the config in its header."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cukit.core.files import read_arrays, write_arrays
from cukit.errors import ConfigError, DataError
from cukit.models.config import TransformerConfig
from cukit.models.parameters import Parameters
from cukit.models.transformer import Transformer


def save_model(path: Path, model: Transformer, **extra: Any) -> None:
    """Writes a model: its parameters in their dtype, its config and `extra` in the header."""
    description = {"config": model.config.to_dict(), **extra}
    write_arrays(path, model.parameters.to_host(), description)


def load_model(path: Path, xp: ModuleType = np, *, dtype: str | None = None) -> Transformer:
    """The model in a file that `save_model` wrote, or in a training checkpoint.

    Args:
        path: a .safetensors file.
        xp: numpy or cupy, for the parameters.
        dtype: dtype of the parameters; None: as in the file.

    Raises:
        DataError: the file is absent, damaged or contains no model.
    """
    arrays, description = read_arrays(path)
    try:
        values = dict(description["config"])
        config = TransformerConfig.from_dict(values if dtype is None else values | {"dtype": dtype})
    except (KeyError, TypeError, ConfigError) as error:
        raise DataError(f"{path}: contains no valid model config ({error})") from error
    stored = sum(array.size for array in arrays.values())
    # Checked before memory for the parameters is allocated.
    if config.num_layers > len(arrays) or config.num_parameters > stored:
        raise DataError(f"{path}: contains {stored:,} values, too few for the model it describes")
    parameters = Parameters(config.parameter_shapes(), config.array_dtype, xp)
    names = set(config.parameter_shapes())
    parameters.load({name: arrays[name] for name in arrays if name in names}, str(path))
    return Transformer(config, parameters)
