"""vLLM's parts and ours in one engine: a byte of a shared file chooses the variant of each step.

Attention and linear layers of a step are vLLM's or ours. The two attentions keep K and V in different forms, so the
tokens after a change mean nothing. The times do.
"""

from __future__ import annotations

import mmap
import os
from functools import wraps
from pathlib import Path
from typing import Any, Final

from vllm.model_executor.layers import utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from pagedkv import linear
from pagedkv.integrations.vllm import linears
from pagedkv.integrations.vllm.attention import PagedAttentionBackend, PagedAttentionImpl, PagedMetadataBuilder
from pagedkv.integrations.vllm.pages import PagedMetadata

FILE: Final = "PAGEDKV_BENCH_TOGGLE"
"""The environment variable with the path of the file. Its first byte is a place in VARIANTS."""
VARIANTS: Final = ("vLLM", "pagedkv")


class Extension:
    """An extension of vLLM's worker. The worker imports this file for it, and so our backend becomes CUSTOM."""


class ToggleBuilder(CPUAttentionMetadataBuilder):
    """Makes the metadata of the attention that runs the next step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ours = PagedMetadataBuilder(*args)

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Return the metadata of a step."""
        return self._ours.build(*args, **kwargs) if _is_ours() else super().build(*args, **kwargs)


class ToggleImpl(PagedAttentionImpl):
    """One layer of both."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend as the metadata says whose step it is."""
        metadata = args[5] if len(args) > 5 else kwargs["attn_metadata"]
        ours = isinstance(metadata, PagedMetadata)
        return (PagedAttentionImpl if ours else CPUAttentionBackendImpl).forward(self, *args, **kwargs)

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Store K and V."""
        (PagedAttentionImpl if _is_ours() else CPUAttentionBackendImpl).do_kv_cache_update(self, *args, **kwargs)


class ToggleBackend(PagedAttentionBackend):
    """CUSTOM in a benchmark."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return the class of layers."""
        return ToggleImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the class that makes metadata."""
        return ToggleBuilder


def of_both(ours: Any) -> Any:
    """Return a function that gives a layer both ways to compute. ours: our function, which is in front of vLLM's."""

    @wraps(ours)  # with its mark, or else our platform would put it in front of this one
    def choose(layer: Any, remove_weight: bool) -> None:
        ours.__wrapped__(layer, remove_weight=False)
        theirs, is_served = layer.cpu_linear, linears.is_served(layer.weight)
        layer.cpu_linear = lambda *operands: (linear if is_served and _is_ours() else theirs)(*operands)

    return choose


def flag(path: Path) -> mmap.mmap:
    """Return the shared byte of the file at `path`."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), mmap.PAGESIZE)


_FLAG = flag(Path(os.environ[FILE])) if FILE in os.environ else None


def _is_ours() -> bool:
    return VARIANTS[-1 if _FLAG is None else _FLAG[0]] == "pagedkv"


if _FLAG is not None:
    linears.install()
    utils.dispatch_cpu_unquantized_gemm = of_both(utils.dispatch_cpu_unquantized_gemm)
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.ToggleBackend")
