"""Decode steps of llama.cpp, through the C API of llama-cpp-python: each is one `llama_decode` and the greedy choice.

A GGUF file has the weights of the checkpoint, in bfloat16 or float16. A step decodes a token of each sequence. Each
sequence has a stream of its own in the cache; the context is computed once and copied to the streams. Each run begins
at the same context, because the tokens of the run before are removed.
This file must not import pagedkv, which the environment of llama.cpp lacks.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from typing import Any

import llama_cpp as c
import numpy as np
from gguf_file import write

CHUNK = 512
"""Tokens of context that are computed at once."""
SETS = ("AVX512_BF16", "AVX512", "AVX2", "NEON")
"""Instruction sets as llama.cpp names them, the best first."""
TYPES = {"f16": 1, "bf16": 30}
"""The dtypes of K and V as ggml numbers them."""


class Engine:
    """The model, and the context of the open sequences."""

    def __init__(self, load: Any) -> None:
        features = {name.split("=")[0].strip() for name in c.llama_print_system_info().decode().split("|")}
        if load.isa == "avx2" and "AVX512" in features:
            raise RuntimeError("this llama.cpp was built with AVX-512; `make peers` builds one without")
        path = load.folder / f"{load.weights}.gguf"
        if not path.exists():
            write(load.folder, path, load.weights)
        c.llama_log_set(SILENT, None)
        c.llama_backend_init()
        self.model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp could not load the GGUF file")
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.load, self.context, self.batch = load, None, c.llama_batch_init(CHUNK, 0, 1)
        self.about = {"version": f"llama-cpp-python {version('llama-cpp-python')}", "weights": load.weights}
        self.about |= {"kv": load.kv, "isa": next((name for name in SETS if name in features), "none")}

    def open(self, batch: int, context: int, steps: int) -> None:
        """Compute a context of random tokens, and give a copy to each sequence."""
        self.close()
        params = c.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = batch * _padded(context + steps), batch, False
        params.n_batch = params.n_ubatch = CHUNK
        params.n_threads = params.n_threads_batch = self.load.threads
        params.type_k = params.type_v = TYPES[self.load.kv]
        self.context = c.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context")
        self.memory, self.sequences, self.length = c.llama_get_memory(self.context), batch, context - 1
        prompt = np.random.default_rng(0).integers(3, self.vocabulary, self.length).tolist()
        for first in range(0, self.length, CHUNK):
            self._decode([(token, first + i, 0) for i, token in enumerate(prompt[first : first + CHUNK])])
        for sequence in range(1, batch):
            c.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        self.begin()

    def begin(self) -> None:
        """Remove the tokens behind the context."""
        for sequence in range(self.sequences):
            if not c.llama_memory_seq_rm(self.memory, sequence, self.length, -1):
                raise RuntimeError("llama.cpp could not remove the tokens of the run before")
        self.position, self.tokens = self.length, [3 + i for i in range(self.sequences)]

    def step(self) -> None:
        """Decode a token of each sequence, and choose the next ones."""
        self._decode([(token, self.position, i) for i, token in enumerate(self.tokens)])
        self.position += 1
        for i in range(self.sequences):
            row = c.llama_get_logits_ith(self.context, i)
            self.tokens[i] = int(np.ctypeslib.as_array(row, (self.vocabulary,)).argmax())

    def close(self) -> None:
        """Free the context."""
        if self.context:
            c.llama_free(self.context)
            self.context = None

    def _decode(self, work: list[tuple[int, int, int]]) -> None:
        """Compute tokens, (id, position, sequence) of each."""
        batch = self.batch
        batch.n_tokens = len(work)
        for i, (token, position, sequence) in enumerate(work):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, len(work) == self.sequences
        status = c.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")


def _padded(tokens: int) -> int:
    """Return the tokens of a stream: llama.cpp has them in steps of 256."""
    return -(-tokens // 256) * 256


@c.llama_log_callback
def SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drop a message."""
