"""A model as files: a folder in the format of Hugging Face is read and checked here, and nowhere else.

config           config.json as a ModelConfig; fields: its values, checked for type and range
weights          *.safetensors as the matrices of the kernels
tokenizer        tokenizer.json: text to token ids and back; token_reach: the fewest tokens of a text;
                 special_tokens: names and tokens in the files next to it
chat_template    messages to text
hub              the local cache of the Hugging Face hub
files            JSON, text and bytes of limited size; regular_files: no pipe, no device
fit              the memory that a config needs
demo             the prompt of `pagedkv generate` if the user gives none

Files come from strangers: each is a regular file of limited size, a fault in one is a CheckpointError that names the
file, and a template runs in a sandbox. This layer knows no pool, no sequence and no step. It imports the kernels'
formats of a matrix; `config`, `hub` and `fit` load no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

BUNDLED: Final = Path(__file__).parent / "bundled"
"""The checkpoint that ships inside the package."""
