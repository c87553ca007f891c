"""Prefix reuse and forks: a prompt that comes back is not computed again, and samples of one prompt share its memory.

Run: python examples/prefix_and_forks.py
"""

from pagedkv import AddressSpace, KVSpec, PagedKVCache

spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=16, block_size=4, dtype="float32")
cache = PagedKVCache(spec, num_frames=64, events=1024)


def compute(space: AddressSpace, tokens: list[int]) -> None:
    """Stand in for a model's step. A real engine writes the tokens' keys and values between plan and commit."""
    batch = cache.plan([space], [len(tokens)])
    cache.commit(batch, tokens)


# A system prompt of 20 tokens, and two questions about it.
system = list(range(100, 120))
first = cache.open([*system, 1, 2, 3])
assert len(first) == 0  # the cache is empty: every token must be computed
compute(first, [*system, 1, 2, 3])
second = cache.open([*system, 7, 8, 9])
print(f"second question: {len(second)} of {len(system) + 3} tokens are found in the cache")
assert len(second) == 20  # whole pages of 4 tokens
assert second.pages.tolist() == first.pages[:5].tolist()  # the same frames, mapped twice
compute(second, [7, 8, 9])

# A released prompt stays findable until its frames are needed for something else.
first.release()
second.release()
print("after both have ended:", cache.stats().cached, "cached frames")
third = cache.open([*system, 1, 2, 3, 4])
assert len(third) == 20  # five full pages; the sixth page had three tokens and was not kept
compute(third, [1, 2, 3, 4])

# Tenants never see each other's prompts, and `why` tells what happened to a prompt that was not found.
other = cache.open([*system, 5], tenant=b"acme")
assert len(other) == 0
print("why tenant acme found nothing:", cache.why([*system, 5], tenant=b"acme"))

# Three samples of one prompt: a fork copies no KV. The first write to a shared page copies that page only.
compute(third, [41, 42])  # the tail page is half full
samples = [third, third.fork(), third.fork()]
before = cache.stats()
batch = cache.plan(samples, [1, 1, 1])
cache.commit(batch, [51, 52, 53])
after = cache.stats()
print(f"three samples of {len(third)} tokens: {after.copies - before.copies} copies, {after.mapped} frames mapped")
assert after.copies - before.copies == 2
assert after.mapped == 6 + 3  # six shared pages, and a tail for each sample; without sharing 21

for space in (*samples, other):
    space.release()
cache.check()
assert cache.stats().mapped == 0
