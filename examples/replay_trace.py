"""Replay of a trace: how large must the pool be, and which policy keeps the prompts that come back?

A trace has one JSON object a line. `hash_ids` names the blocks of a prompt; equal ids mean an equal prompt up to that
block. Mooncake's published traces have this format. `pagedkv replay FILE` does the same from a shell.
Run: python examples/replay_trace.py
"""

import json
import random
import tempfile
from pathlib import Path

from pagedkv.core.replay import replay


def requests(num_requests: int) -> list[dict[str, list[int]]]:
    """Return a synthetic day of a chat service: conversations that grow, and long documents with one question each."""
    rng, names = random.Random(0), iter(range(10**6))
    system = [next(names) for _ in range(4)]  # the blocks of a system prompt, which every conversation begins with
    conversations = [[*system, next(names)] for _ in range(20)]
    trace = []
    for _ in range(num_requests):
        if rng.random() < 0.2:  # a document: 30 blocks that never come back
            trace.append({"hash_ids": [next(names) for _ in range(30)]})
            continue
        number = min(int(rng.expovariate(0.2)), 19)  # a few conversations are busy, most are not
        conversations[number] = [*conversations[number], next(names)]  # each turn repeats the turns before
        trace.append({"hash_ids": list(conversations[number])})
        if len(conversations[number]) > 25:
            conversations[number] = [*system, next(names)]  # it has ended, and another one begins
    return trace


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "trace.jsonl"
    path.write_text("\n".join(json.dumps(request) for request in requests(400)))
    # None as a size is a pool that never evicts; "belady" is the optimum that knows the future.
    results = replay(path, num_frames=[100, 200, 400, None], policies=["lru", "2q", "belady"])

hit_rate = {(row["num_frames"], row["policy"]): row["hit_rate"] for row in results}
sizes = sorted({size for size, _ in hit_rate})
print("frames    lru     2q belady   share of prompt blocks that are found")
for size in sizes:
    print(f"{size:6} " + " ".join(f"{hit_rate[size, policy]:6.3f}" for policy in ("lru", "2q", "belady")))

for size in sizes:
    for policy in ("lru", "2q"):
        assert hit_rate[size, policy] <= hit_rate[size, "belady"]  # no policy beats the optimum
lru = [hit_rate[size, "lru"] for size in sizes]
assert lru == sorted(lru)  # under LRU a larger pool finds at least as much
assert (
    len({hit_rate[sizes[-1], policy] for policy in ("lru", "2q", "belady")}) == 1
)  # nothing is evicted: all are equal
assert hit_rate[100, "2q"] > hit_rate[100, "lru"]  # 2Q does not let the documents push out the conversations
