"""ModelRunner: the forward pass of an engine's steps, over memory that exists before the step begins.

    decode step                     one token of each sequence: results lie in a Workspace, one for each power of two
    decode step, with graphs        the inputs too (FixedBatch): the first step of a size runs, the second is captured
                                    in a graph, and from then on the graph is replayed
    any other step                  new memory: a prompt computes far longer than it allocates

A graph reads its inputs at the addresses they had when it was captured. So it is captured anew when the pool is resized
or the page tables have moved. Graphs are for GPUs, where a launch costs more than a small kernel; a CPU calls the same
function. A model with recurrent states runs without graphs: its kernels look at the steps from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from pagedkv import debug
from pagedkv.engine.model.workspace import Workspace

if TYPE_CHECKING:
    from pagedkv.cache import PagedKVCache, PlannedBatch
    from pagedkv.cache.fixed import FixedBatch
    from pagedkv.core import AddressSpace
    from pagedkv.engine.model.decoder import BoundLayers, Decoder

Watch = Callable[[Callable[[Sequence[int]], Tensor]], None]
"""A function that is called in a step with a function from tokens of the step to their logits, float32 [N, V]."""

MOST_SEQUENCES: Final = 256
"""Beyond it a decode step allocates its memory, and runs without a graph."""
LEAST_LENGTH: Final = 1024
"""A graph serves sequences of up to a power of two of tokens, and of at least so many."""


class _Graph(Protocol):
    """A recording of work on a device, which can be repeated on the same memory."""

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        """Record the work of `call`; return the tensor to which `replay` will write its result."""

    def replay(self) -> None:
        """Do the recorded work."""


class _CudaGraph:
    """A graph of CUDA kernels. `beside`: a graph that never runs at the same time, whose memory it shares."""

    def __init__(self, beside: Any) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), None if beside is None else beside._graph.pool()

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        """Record the kernels of `call`, which do not run; return the tensor of their result. Other threads may copy."""
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            return call()

    def replay(self) -> None:
        """Launch the recorded kernels."""
        self._graph.replay()


class _Bucket:
    """Inputs and results of the steps of up to `num_sequences` sequences, at fixed addresses, and their graph."""

    def __init__(self, fixed: FixedBatch, memory: Workspace) -> None:
        self.fixed: FixedBatch = fixed
        self.memory: Workspace = memory
        device = memory.x.device
        self._host = torch.zeros(fixed.num_sequences, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._array = self._host.numpy()
        self.token_ids: Tensor = torch.zeros(fixed.num_sequences, dtype=torch.int64, device=device)
        self.graph: _Graph | None = None
        self.result: Tensor = memory.logits
        self.tables: Any = None
        """The addresses and sizes of the pool and the page tables that the graph reads; None before the first step."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Write the tokens of a step. The tokens of padding are those of the last step."""
        self._array[: len(token_ids)] = token_ids
        self.token_ids.copy_(self._host, non_blocking=True)


class ModelRunner:
    """The forward passes of a decoder over one cache.

    graphs: makes a graph for devices that have them, beside one that lives; None to call the decoder in each step.
    A model with recurrent states has no graphs.
    """

    def __init__(
        self, decoder: Decoder, cache: PagedKVCache, *, graphs: Callable[[_Graph | None], _Graph] | None = None
    ) -> None:
        self.layers: BoundLayers = decoder.bind(cache)
        self.decoder: Decoder = decoder
        self._cache, self._graphs = cache, None if decoder.config.linear else graphs
        self._workspaces: dict[int, Workspace] = {}
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._planned: tuple[PlannedBatch, _Bucket] | None = None
        cache.on_resize(lambda _: self._forget())

    def _forget(self) -> None:
        """Drop all graphs: they name the old pool."""
        for bucket in self._buckets.values():
            bucket.graph = bucket.tables = None

    def plan(
        self, spaces: Sequence[AddressSpace], counts: Sequence[int], certain: Sequence[int] | None = None
    ) -> PlannedBatch:
        """Plan a step of the cache. certain: see PagedKVCache.plan, which raises"""
        self._planned = None
        if certain is not None:
            return self._cache.plan(spaces, counts, certain=certain)
        if self._graphs is None or len(counts) != sum(counts) or not 0 < len(counts) <= MOST_SEQUENCES:
            return self._cache.plan(spaces, counts)
        bucket = self._bucket(len(counts), 1 + max(map(len, spaces)))
        batch = self._cache.plan(spaces, counts, into=bucket.fixed)
        self._planned = batch, bucket
        return batch

    def _bucket(self, num_sequences: int, longest: int) -> _Bucket:
        """Return the memory of steps of so many sequences, of up to `longest` tokens."""
        size, length = _power_of_two(num_sequences), max(LEAST_LENGTH, _power_of_two(longest))
        if (size, length) not in self._buckets:
            fixed = self._cache.fixed_batch(size, length)
            self._buckets[size, length] = _Bucket(fixed, self._workspace(size))
        return self._buckets[size, length]

    def _workspace(self, num_tokens: int) -> Workspace:
        """Return memory for the results of a step of `num_tokens` tokens."""
        if num_tokens not in self._workspaces:
            whole = _power_of_two(num_tokens)
            if whole not in self._workspaces:
                d = self.decoder
                self._workspaces[whole] = Workspace.of(d.config, whole, d.dtype, d.device)
            self._workspaces[num_tokens] = self._workspaces[whole].first(num_tokens)
        return self._workspaces[num_tokens]

    def __call__(
        self, token_ids: Sequence[int], batch: PlannedBatch, logits_of: Sequence[int], watch: Watch | None = None
    ) -> Tensor:
        """Compute a step, and return the logits of some of its tokens. The next step may overwrite them.

        logits_of: indices into the tokens, rising. Shapes: returns float32 [N, V]
        watch: called once with a function that returns the logits of given tokens, for some at a time
        """
        device, backend = self.decoder.device, self._cache.kernel.name
        if self._planned is not None and self._planned[0] is batch:
            logits = self._in_bucket(self._planned[1], token_ids, batch)
            if watch is not None:
                watch(lambda rows: logits[torch.tensor(rows, dtype=torch.int64, device=device)])
            if len(logits_of) == len(logits):
                return logits
            return logits[torch.tensor(logits_of, dtype=torch.int64, device=device)]  # a chunk of one token is no last

        def watched(x: Tensor) -> None:
            assert watch is not None
            watch(lambda rows: self.decoder.logits(x[torch.tensor(rows, device=device)], backend))

        is_decode = len(logits_of) == len(token_ids) <= MOST_SEQUENCES
        return self.decoder.forward(
            torch.tensor(token_ids, device=device),
            batch,
            self.layers,
            logits_of=None if is_decode else torch.tensor(logits_of, dtype=torch.int64, device=device),
            backend=backend,
            memory=self._workspace(len(token_ids)) if is_decode else None,
            watch=None if watch is None else watched,
        )

    def _in_bucket(self, bucket: _Bucket, token_ids: Sequence[int], batch: PlannedBatch) -> Tensor:
        """Compute a decode step over a bucket: call the decoder in the first one, then capture, then replay."""
        bucket.take(token_ids)
        layers, kernel = self.layers, self._cache.kernel.name

        def call() -> Tensor:
            return self.decoder.forward(bucket.token_ids, batch, layers, backend=kernel, memory=bucket.memory)

        frames = self._cache.storage.frames  # an interrupt of a resize may skip `_forget`
        read = [frames, *(batch[i].block_table for i in range(len(layers)))]
        tables = [(tensor.data_ptr(), tensor.shape) for tensor in read]
        if tables != bucket.tables:
            bucket.graph = None
            result = call()
            bucket.tables = tables
            return result[: len(token_ids)]
        if bucket.graph is None:
            assert self._graphs is not None
            beside = (other.graph for other in self._buckets.values() if other.graph is not None)
            graph = self._graphs(next(beside, None))  # memory of which no graph lives cannot be shared again
            bucket.result = graph.capture(call)
            bucket.graph = graph
        bucket.graph.replay()
        return bucket.result[: len(token_ids)]


def runner_of(decoder: Decoder, cache: PagedKVCache) -> ModelRunner:
    """Return the runner of one process, with graphs on a GPU unless checks read values back from it."""
    graphs = _CudaGraph if decoder.device.type == "cuda" and not debug.level() else None
    return ModelRunner(decoder, cache, graphs=graphs)


def _power_of_two(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
