"""Random edits of config.json give a model that answers or a PagedKVError, never another exception, and soon."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pagedkv.engine.checkpoint import BUNDLED
from pagedkv.engine.checkpoint.config import FAMILIES
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.errors import PagedKVError

SECONDS = 10.0
"""The most seconds of a processor that an edit may take."""
BASE: dict[str, Any] = json.loads((BUNDLED / "config.json").read_text())

ROPE_FIELDS = """rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings
beta_fast beta_slow attention_factor mscale mscale_all_dim truncate partial_rotary_factor full_attention
sliding_attention model_type""".split()
FIELDS = [
    *BASE,
    *"""text_config quantization_config rope_scaling layer_types sliding_window use_sliding_window max_window_layers
sliding_window_pattern hidden_activation query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping
rope_local_base_freq partial_rotary_factor use_bidirectional_attention original_max_position_embeddings
full_attention_interval attn_output_gate linear_num_key_heads linear_num_value_heads linear_key_head_dim
linear_value_head_dim linear_conv_kernel_dim""".split(),
]
WORDS = [
    *FAMILIES,
    "gemma3",
    "qwen3_5",
    "silu",
    "gelu_pytorch_tanh",
    "float16",
    "float32",
    "yarn",
    "llama3",
    "linear",
    "",
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 3, 4, 128, 512, 660, -1, 2**31 - 1, 2**31, 2**63, 10**400]),
    st.integers(),
    st.sampled_from([0.5, 1.0, 4.0, 5e-324, 1e-30, 1e30, 1.7e308]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(st.sampled_from(["full_attention", "sliding_attention", "linear_attention"]), min_size=4, max_size=4),
        st.dictionaries(st.sampled_from(ROPE_FIELDS), inner, max_size=5),
        st.dictionaries(st.text(max_size=8), inner, max_size=3),
    ),
    max_leaves=8,
)
ROPES = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "llama3", "yarn"])},
    optional=dict.fromkeys(ROPE_FIELDS[2:12], SCALARS),
)
EDITS = st.tuples(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    st.one_of(st.none(), ROPES),
    st.sets(st.sampled_from(list(BASE)), max_size=2),
)


def answer(folder: Path, changes: dict[str, Any], rope: dict[str, Any] | None, removed: set[str]) -> None:
    """Write the edited config, load the model, and generate three tokens. A PagedKVError is an answer, too."""
    values = {name: value for name, value in BASE.items() if name not in removed} | changes
    if rope is not None:
        values["rope_parameters"] = rope
    (folder / "config.json").write_text(json.dumps(values))
    began = time.process_time()
    with suppress(PagedKVError):
        engine = Engine.load(folder, num_frames=8)
        engine.generate(["Where is the lamp?"], SamplingParams(max_tokens=3))
    assert time.process_time() - began < SECONDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with links to the files of the bundled checkpoint, but for config.json."""
    folder = tmp_path_factory.mktemp("fuzz")
    for path in BUNDLED.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    return folder


def few_or_many(examples: int) -> Any:
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=examples < 1000
    )


@few_or_many(25)
@given(edits=EDITS)
@example(edits=({}, {"rope_type": "yarn", "factor": 1e-30, "beta_fast": 1e30}, set()))
@example(edits=({"model_type": "gemma2", "layer_types": [[]]}, None, set()))
@example(edits=({"model_type": "gemma3", "text_config": {"layer_types": {}}}, None, set()))
@example(
    edits=({"model_type": "qwen3_5_text", "head_dim": 2**31 - 2, "layer_types": ["full_attention"] * 4}, None, set())
)
@example(edits=({"model_type": "qwen3_5_text", "linear_key_head_dim": 2**31 - 1}, None, set()))
def test_a_random_config_gives_a_model_or_a_clear_error(folder: Path, edits: Any) -> None:
    answer(folder, *edits)


@pytest.mark.slow
@few_or_many(3000)
@given(edits=EDITS)
def test_many_random_configs_give_a_model_or_a_clear_error(folder: Path, edits: Any) -> None:
    answer(folder, *edits)
