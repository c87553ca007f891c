"""Replicas of an engine behind Ray Serve, each prompt sent to the replica that knows most of it. Needs extra `ray`.

    from pagedkv.integrations.ray import generate, replicas
    handle = serve.run(replicas(3, "Qwen/Qwen3-0.6B"))
    async for token in generate(handle, token_ids, {"max_tokens": 100}): ...

    index.py     which replica has which blocks, from KV events
    router.py    Ray Serve's interface for routers
    replica.py   an engine, its thread, and its events
    client.py    a reply that outlives its replica

Each file knows the ones above it.
"""

try:
    import ray  # noqa: F401
    from ray import serve  # noqa: F401
except ImportError as _error:
    raise ImportError("pagedkv.integrations.ray needs ray; install pagedkv[ray]") from _error

from pagedkv.integrations.ray.client import generate
from pagedkv.integrations.ray.index import PrefixIndex
from pagedkv.integrations.ray.replica import PagedReplica, replicas
from pagedkv.integrations.ray.router import PrefixRouter

__all__ = ["PagedReplica", "PrefixIndex", "PrefixRouter", "generate", "replicas"]
