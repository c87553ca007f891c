"""Hostile input for `pagedkv generate`: edits of the bundled checkpoint, each with words of the refusal it must get."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Edit = Callable[[Path], Any]
HUGE = 10**9


def edit(file: str, **changes: Any) -> Edit:
    """Return an edit that sets fields of a JSON file, which may be absent."""

    def apply(folder: Path) -> None:
        path = folder / file
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | changes))

    return apply


def config(**changes: Any) -> Edit:
    return edit("config.json", **changes)


def rope(**values: Any) -> Edit:
    return config(rope_parameters={"rope_theta": 1e4, **values})


def write(file: str, content: bytes | str) -> Edit:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(data)


def replace(file: str, make: Callable[[Path], Any]) -> Edit:
    """Return an edit that puts something else in the place of a file."""

    def apply(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return apply


def pipe(file: str) -> Edit:
    return replace(file, os.mkfifo)


def device(file: str) -> Edit:
    return replace(file, lambda path: path.symlink_to("/dev/zero"))


def hole(file: str) -> Edit:
    """Return an edit that makes a file of 1 TiB that takes no space."""
    return replace(file, lambda path: (path.write_bytes(b"{"), os.truncate(path, 2**40)))


def header(*, length: int | None = None, size: int = 0, **tensors: Any) -> Edit:
    """Return an edit that writes a safetensors file with these entries, and a body of `size` zeros."""

    def apply(folder: Path) -> None:
        text = json.dumps(tensors).encode()
        path = folder / "model.safetensors"
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)
        os.truncate(path, path.stat().st_size + size)

    return apply


def tensor(shape: list[int], begin: int, end: int, dtype: str = "BF16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def index(*names: Any, **fields: Any) -> Edit:
    weights = {f"tensor {number}": name for number, name in enumerate(names)}
    return write("model.safetensors.index.json", json.dumps({"weight_map": weights, **fields}))


def tokenizer(**changes: Any) -> Edit:
    return edit("tokenizer.json", **changes)


def poisoned(folder: Path) -> None:
    """Make all weights NaN, from the end of the header on."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:begin] + b"\xff\x7f" * ((len(data) - begin) // 2))


NESTED = "[" * 100_000
UNK = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
NO_SUCH_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "none", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
NOT_ONE_MODEL = "config.json and safetensors are not of one model"
NOT_WHOLE = "is no whole safetensors file"

CHECKPOINTS: dict[str, tuple[Edit, str]] = {
    # the files themselves
    "config is a pipe": (pipe("config.json"), "config.json cannot be read: it is a pipe"),
    "config is a device": (device("config.json"), "it is a device, not a regular file"),
    "config is a folder": (replace("config.json", Path.mkdir), "it is a folder, not a regular file"),
    "config is huge": (hole("config.json"), "it has 1,099,511,627,776 bytes, at most"),
    "config links to itself": (
        replace("config.json", lambda path: path.symlink_to(path)),
        "config.json cannot be read: Too many levels",
    ),
    "config is not UTF-8": (write("config.json", b'{"a": "\xff"}'), "cannot be read as UTF-8"),
    "config is a list": (write("config.json", "[]"), "holds a list"),
    "config is nested": (write("config.json", NESTED), "nested too deeply"),
    "config has half a pair": (config(model_type="\ud800"), "half of a surrogate pair"),
    "tokenizer is a pipe": (pipe("tokenizer.json"), "tokenizer.json cannot be read: it is a pipe"),
    "tokenizer is huge": (hole("tokenizer.json"), "at most 134,217,728 are read"),
    "tokenizer config is nested": (write("tokenizer_config.json", NESTED), "nested too deeply"),
    "template is a pipe": (pipe("chat_template.jinja"), "chat_template.jinja cannot be read: it is a pipe"),
    "template is huge": (hole("chat_template.jinja"), "at most 16,777,216 are read"),
    "weights are a pipe": (pipe("model.safetensors"), f"{NOT_WHOLE} (it is a pipe"),
    # sizes and other fields of config.json
    "layers": (
        config(num_hidden_layers=HUGE),
        "num_hidden_layers is 1000000000; it must be an integer from 1 to 4,096",
    ),
    "fewer layers": (config(num_hidden_layers=3), "tensors that config.json does not account for"),
    "vocabulary": (config(vocab_size=10**12), "vocab_size is 1000000000000; it must be an integer from 1 to"),
    "head_dim": (config(head_dim=HUGE), NOT_ONE_MODEL),
    "context": (config(max_position_embeddings=2**63), "max_position_embeddings is"),
    "a long size": (config(hidden_size=10**4000), "hidden_size is 1000"),
    "a size that is true": (config(num_hidden_layers=True), "num_hidden_layers is True"),
    "a size that is no number": (config(hidden_size=float("nan")), "hidden_size is nan"),
    "eps is infinite": (config(rms_norm_eps=float("inf")), "rms_norm_eps is inf"),
    "type is a long text": (config(model_type="a" * 10**6), "model_type is 'aaa"),
    "text part is a list": (config(model_type="gemma3", text_config=[]), "model_type is 'gemma3'"),
    "layer types are lists": (config(model_type="qwen3", layer_types=[[]] * 4), "layer_types is [[], []"),
    "theta is 1": (rope(rope_type="yarn", factor=2, rope_theta=1), "rope_theta is 1"),
    "rope has a type": (rope(model_type=[], rope_type=[]), "rope_type is []"),
    "rope is half an object": (rope(full_attention=5, sliding_attention={}), "the rope of full_attention is 5"),
    "beta is tiny": (rope(rope_type="yarn", factor=2, beta_fast=5e-324), "beta_fast is 5e-324"),
    "frequencies are equal": (
        rope(rope_type="llama3", factor=2, low_freq_factor=1, high_freq_factor=1),
        "high_freq_factor is 1; it must be above low_freq_factor",
    ),
    # shards and their index
    "length of the header": (header(length=2**63), NOT_WHOLE),
    "header is nested": (write("model.safetensors", struct.pack("<Q", 99_999) + b'{"a":' + b"[" * 99_994), NOT_WHOLE),
    "tensors overlap": (header(size=8, a=tensor([2], 0, 4), b=tensor([2], 2, 6)), NOT_WHOLE),
    "shape overflows": (header(a=tensor([2**62, 2**62], 0, 4), size=4), NOT_WHOLE),
    "index names the folder": (index("."), "names the file '.'"),
    "index names nothing": (index(""), "names the file ''"),
    "index has half a pair": (index("\ud800"), "half of a surrogate pair"),
    "index names a config": (index("config.json"), NOT_WHOLE),
    "index is nested": (write("model.safetensors.index.json", NESTED), "nested too deeply"),
    # the tokenizer
    "tokenizer is nested": (write("tokenizer.json", NESTED), "cannot be read as a tokenizer"),
    "tokenizer has no unknown token": (tokenizer(model=UNK), "cannot encode the text"),
    "tokenizer has bad regex": (
        tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": False}),
        "cannot be read as a tokenizer",
    ),
    "tokenizer makes its library panic": (
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "cannot be read as a tokenizer",
    ),
    "tokenizer makes its library panic at a text": (tokenizer(post_processor=NO_SUCH_TOKEN), "cannot encode the text"),
    "tokenizer has other ids": (
        tokenizer(model={**UNK, "vocab": {"?": 10**6}}, added_tokens=[]),
        "outside the vocabulary of 660 tokens",
    ),
    "a special token is half a pair": (edit("tokenizer_config.json", bos_token="\ud800"), "half of a surrogate pair"),
    "the end is true": (edit("generation_config.json", eos_token_id=True), "eos_token_id is True"),
    # values
    "weights are NaN": (poisoned, "the prompt: the logits hold NaN"),
}

REFUSES, INVALID = "chat template refuses these messages: ", "chat template is not valid ("
LOOPS = "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}"

TEMPLATES: dict[str, tuple[Any, str]] = {
    "division": ("{{ 1/0 }}", f"{REFUSES}ZeroDivisionError: division by zero"),
    "encoding": ("{{ 'x'.encode('zzz') }}", f"{REFUSES}LookupError"),
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", f"{INVALID}it calls itself without end"),
    "long text": ("{{ 'a' * 2**25 }}", "chat template gives a text of more than 16,777,216 characters"),
    "endless text": ("{% for a in range(9**5) %}{{ 'a' * 2**20 }}{% endfor %}", "more than 16,777,216 characters"),
    "signs": ("{{ " + "-" * 10**5 + "1 }}", "it is nested too deeply"),
    "syntax": ("{% if %}", f"{INVALID}Expected an expression"),
    "private attribute": ("{{ ''.__class__.__mro__ }}", f"{REFUSES}access to attribute '__class__'"),
    "refusal in lines": ("{{ raise_exception('a\\nb\\x1b[2Jc') }}", f"{REFUSES}a b\\x1b[2Jc"),
    "undefined": ("{{ no.such.name }}", f"{REFUSES}'no' is undefined"),
    "half a pair": ("{{ '\\ud800' }}", "half of a surrogate pair"),
    "empty": ("", "the prompt is empty"),
    "no template": (None, "has no chat template"),
    "names are lists": ([{"name": [], "template": "a"}, 5], "has no chat template"),
}

PROMPTS: dict[str, tuple[bytes, str]] = {
    "not UTF-8": (b'{"prompt": "\xff"}', "is not UTF-8 text"),
    "nested": (b'{"prompt": ' + b"[" * 10**5, "line 1 is not JSON"),
    "a long integer": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
    "a large number": (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", "temperature is 1000"),
    "half a pair": (b'{"prompt": "\\ud800"}', "is not Unicode text"),
    "stop ids are lists": (b'{"prompt": "a", "stop_ids": [[1]]}', "stop_ids is"),
    "a flag that is a text": (b'{"prompt": "a", "ignore_eos": "no"}', "ignore_eos is 'no'"),
    "an option that is null": (b'{"prompt": "a", "max_tokens": null}', "max_tokens is None"),
    "a role is a list": (b'{"messages": [{"role": []}]}', 'messages are objects with a "role"'),
}
