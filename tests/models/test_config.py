"""Invalid sizes are rejected by name; valid sizes determine every shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cukit.errors import ConfigError
from cukit.models import TransformerConfig
from tests.models.small import SMALL


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_layers": -1}, "num_layers"),
        ({"vocab_size": 2.5}, "vocab_size"),
        ({"num_layers": True}, "num_layers"),
        ({"head_dim": 5}, "head_dim"),
        ({"num_heads_q": 3}, "num_heads_q"),
        ({"norm_eps": float("nan")}, "norm_eps"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_errors_name_the_invalid_size(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(SMALL, **change)


def test_dictionary_round_trip() -> None:
    assert TransformerConfig.from_dict(SMALL.to_dict()) == SMALL


@pytest.mark.parametrize("change", [{"colour": 1}, None])
def test_foreign_dictionary_is_rejected(change: dict[str, Any] | None) -> None:
    values = SMALL.to_dict()
    if change is None:
        del values["head_dim"]
    else:
        values |= change
    with pytest.raises(ConfigError, match=r"colour|head_dim"):
        TransformerConfig.from_dict(values)


def test_untied_head_is_one_more_matrix() -> None:
    untied = replace(SMALL, tie_embeddings=False)
    assert untied.num_parameters - SMALL.num_parameters == SMALL.vocab_size * SMALL.hidden_size
    assert untied.head_name in untied.parameter_shapes()
    assert SMALL.head_name == "embed_tokens.weight"
