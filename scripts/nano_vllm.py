"""Run nano-vllm on a CPU, with its sources as they are. It was written for CUDA and flash_attn.

    python scripts/nano_vllm.py SOURCES MODEL "a prompt"

SOURCES is a checkout of https://github.com/GeeeekExplorer/nano-vllm, MODEL a folder with a Qwen3 checkpoint. Attention
is `pagedkv.integrations.flash_attn`. `PATCHES` lists the other places where the engine needs CUDA.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed

from pagedkv import KVLayer, write_kv
from pagedkv.integrations import flash_attn

KV_BYTES = 1 << 30


def store_kvcache(k: torch.Tensor, v: torch.Tensor, k_cache: Any, v_cache: Any, slot_mapping: torch.Tensor) -> None:
    """Store K and V of new tokens, as the Triton kernel of nano-vllm does. A slot < 0 is skipped."""
    write_kv(k, v, KVLayer(k_cache, v_cache), slot_mapping.long())


def without_pinning(make: Any) -> Any:
    """Return `make`, a function that makes tensors, without its argument pin_memory."""
    return lambda *args, pin_memory=False, **options: make(*args, **options)


def patches(kv_bytes: int) -> list[tuple[str, str, Any]]:
    """Return where, why, and the object that replaces what is there.

    kv_bytes: memory for K and V. nano-vllm takes 0.9 of what it believes to be the memory of the GPU.
    """
    memory = {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": 0}
    gloo = torch.distributed.init_process_group
    return [
        ("torch.distributed.init_process_group", "nccl is for GPUs", lambda _, *args, **kw: gloo("gloo", *args, **kw)),
        ("torch.set_default_device", "the device is named cuda", lambda device: None),
        ("torch.cuda.set_device", "there is none", lambda device: None),
        ("torch.cuda.synchronize", "nothing runs beside the host", lambda: None),
        ("torch.cuda.empty_cache", "no allocator of CUDA", lambda: None),
        ("torch.cuda.reset_peak_memory_stats", "no allocator of CUDA", lambda: None),
        ("torch.cuda.mem_get_info", "the memory that K and V may have", lambda: (kv_bytes, kv_bytes)),
        ("torch.cuda.memory_stats", "no allocator of CUDA", lambda: memory),
        ("torch.tensor", "pinned memory is for copies to a GPU", without_pinning(torch.tensor)),
        ("torch.Tensor.cuda", "tensors are where they shall be", lambda tensor, non_blocking=False: tensor),
        # A compiled sampler may divide inference tensors in place; run as it is, it must be in that mode.
        ("torch.compile", "compiling takes longer than these runs", torch.inference_mode()),
        ("nanovllm.layers.attention.store_kvcache", "a Triton kernel without a GPU", store_kvcache),
    ]


def load(sources: Path, model: Path, kv_bytes: int = KV_BYTES, **options: Any) -> Any:
    """Return the engine, `nanovllm.LLM`, patched for the rest of this process.

    options: options of the engine, such as max_model_len and max_num_batched_tokens.
    """
    flash_attn.install()
    sys.path.insert(0, str(sources))
    for where, _, new in patches(kv_bytes):
        mock.patch(where, new).start()
    from nanovllm import LLM  # type: ignore[import-not-found]

    return LLM(str(model), enforce_eager=True, **options)


def main() -> None:
    """Print the text that follows each prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sources", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompt", nargs="+")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    engine = load(args.sources, args.model)
    from nanovllm import SamplingParams

    for result in engine.generate(args.prompt, SamplingParams(temperature=1e-6, max_tokens=args.max_tokens)):
        print(result["text"])


if __name__ == "__main__":
    main()
