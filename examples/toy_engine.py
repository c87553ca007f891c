"""A toy engine: changing batches, prefixes found again, preemption. Pages by pagedkv, attention as flash_attn's.

Run: python examples/toy_engine.py
"""

import torch
import torch.nn.functional as F

from pagedkv import KVLayer, write_kv
from pagedkv.core import MemoryManager
from pagedkv.errors import OutOfFrames
from pagedkv.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func

S, FRAMES, H, K, D = 4, 10, 4, 2, 16  # tokens of a page, pages of the pool, query heads, kv heads, head dim
torch.manual_seed(0)
embed, project, unembed = torch.randn(97, 32), torch.randn(32, (H + 2 * K) * D), torch.randn(H * D, 97)
manager = MemoryManager(num_frames=FRAMES, block_size=S)
k_pool, v_pool = torch.full((2, FRAMES, S, K, D), torch.nan).unbind(0)  # the engine's own memory


def step(running):
    """Compute the tokens that no page holds: whole prompts, rests of prompts, single tokens. Append the next ones."""
    new = [tokens[len(space) :] for tokens, space, _ in running]
    plan = manager.plan([space for _, space, _ in running], [len(tokens) for tokens in new])  # or OutOfFrames
    flat = [token for tokens in new for token in tokens]
    q, k, v = (embed[flat] @ project).view(len(flat), -1, D).split([H, K, K], dim=1)
    write_kv(k, v, KVLayer(k_pool, v_pool), torch.from_numpy(plan.slots))
    starts_q, lengths = torch.from_numpy(plan.cu_seqlens_q), torch.from_numpy(plan.seq_lens)
    starts_k = F.pad(lengths.cumsum(0), (1, 0)).int()
    table = torch.from_numpy(plan.block_table[plan.rows])  # int32 [sequences, pages]
    longest = (max(plan.counts), max(plan.seq_lens))
    out = flash_attn_varlen_func(q, k_pool, v_pool, starts_q, starts_k, *longest, causal=True, block_table=table)
    manager.commit(plan, flat)  # from now on other prompts find these pages
    logits = out[starts_q[1:].long() - 1].flatten(1) @ unembed
    for (tokens, _, _), token in zip(running, logits.argmax(-1).tolist(), strict=True):
        tokens.append(token)
    return len(flat)


sequences = [[*range(1, 10), 20 + i] for i in range(4)]  # four prompts of ten tokens, nine of them the same
waiting, running, computed, preempted = [(tokens, 22) for tokens in sequences], [], 0, 0
while waiting or running:
    if waiting and not (preempted and running):  # after a preemption, others finish first
        tokens, end = waiting.pop(0)
        running.append((tokens, manager.open(tokens), end))  # maps the pages that are known
    try:
        computed += step(running)
    except OutOfFrames:  # nothing was changed: the youngest gives its pages back and waits
        tokens, space, end = running.pop()
        waiting.insert(0, (tokens, end))
        space.release()
        preempted += 1
    for done in [one for one in running if len(one[0]) == one[2]]:
        running.remove(done)
        done[1].release()
for tokens in sequences:  # without pages
    q, k, v = (embed[tokens] @ project).view(1, len(tokens), -1, D).split([H, K, K], dim=2)
    dense = (flash_attn_func(q, k, v, causal=True).flatten(2) @ unembed).argmax(-1)
    assert dense[0, 9:-1].tolist() == tokens[10:]
print(f"{sum(map(len, sequences))} tokens, {computed} computed, {preempted} preempted; {manager}")
