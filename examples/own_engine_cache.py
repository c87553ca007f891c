"""An engine over PagedKVCache: continuous batching of three requests through a toy model of two layers.

Run: python examples/own_engine_cache.py
"""

import torch
import torch.nn.functional as F

from pagedkv import AddressSpace, KVSpec, PagedKVCache

H, K, D, LAYERS, VOCABULARY = 4, 2, 32, 2, 50  # query heads, key heads, head dim
torch.manual_seed(0)
embedding, head = torch.randn(VOCABULARY, H * D), torch.randn(H * D, VOCABULARY)
projections = [torch.randn(H * D, (H + 2 * K) * D) / (H * D) ** 0.5 for _ in range(LAYERS)]
spec = KVSpec(num_layers=LAYERS, num_kv_heads=K, head_dim=D, block_size=4, dtype="float32")
cache = PagedKVCache(spec, num_frames=32)  # or memory="40GiB", device="cuda"
attend = [cache.attention(layer) for layer in range(LAYERS)]  # bound calls: each layer is checked here, once
write = [cache.write(layer) for layer in range(LAYERS)]


def qkv_of(x: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
    """Return q [T, H, D], k [T, K, D] and v [T, K, D] of the stream x [T, H * D]."""
    return torch.split((x @ projections[layer]).view(len(x), -1, D), [H, K, K], dim=1)


def next_tokens(spaces: list[AddressSpace], new: list[list[int]]) -> list[int]:
    """Run one step: `new[i]` are the tokens of sequence i that are not computed yet. Return the next token of each."""
    batch = cache.plan(spaces, [len(tokens) for tokens in new])
    flat = [token for tokens in new for token in tokens]
    x = embedding[flat]  # the sequences lie one after another: no padding
    for layer in range(LAYERS):
        q, k, v = qkv_of(x, layer)
        write[layer](k, v, batch[layer])  # first store the new tokens: each also attends to itself
        x = x + attend[layer](q, batch[layer]).flatten(1)
    cache.commit(batch, flat)
    last = x[batch.cu_seqlens_q[1:].long() - 1]  # the last new token of each sequence
    return (last @ head).argmax(-1).tolist()


def dense_next_token(tokens: list[int]) -> int:
    """Return the same for one sequence, without a cache: the definition that the engine is checked against."""
    x = embedding[tokens]
    for layer in range(LAYERS):
        q, k, v = (part.transpose(0, 1) for part in qkv_of(x, layer))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attended.transpose(0, 1).flatten(1)
    return int((x[-1] @ head).argmax())


prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
sequences = [list(prompt) for prompt in prompts]
spaces = [cache.open(prompt) for prompt in prompts]
for _ in range(6):  # the first step is a prefill of all prompts, the others decode one token of each
    new = [tokens[len(space) :] for tokens, space in zip(sequences, spaces, strict=True)]
    for tokens, token in zip(sequences, next_tokens(spaces, new), strict=True):
        assert token == dense_next_token(tokens)
        tokens.append(token)
for prompt, tokens in zip(prompts, sequences, strict=True):
    print(prompt, "->", tokens[len(prompt) :])
print(cache)
