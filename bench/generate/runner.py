"""Time of the reference engine: its steps against the speed of memory, its prefill against torch's matrix products.

    decode      ms of one `Engine.step` that gives each sequence a token, after a context that lies in the pool
    prefill     ms of the step that takes in a prompt of random ids; llama.cpp leaves the last of its tokens out
    overhead    ms of a step whose forward pass computes nothing: schedule, plan, sample, commit, deliver

The variants take turns: the engine, generate() of transformers with its caches, per token, and other engines, each in a
process of its own (peers/). Before and after each variant memory is read: all weights, as fast as this machine reads. A
step's bound is (bytes of weights + bytes of K and V) / that speed, for every variant with its own bytes; a prefill's
bound is its operations / the speed of a matrix product of torch, measured before and after it. A figure is the median
over turns, and so is a ratio of two figures. A turn of steps is clean if half of its steps are, or all of them
together; the median of the clean ones is its figure (clock.py).
"""

from __future__ import annotations

import inspect
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from pagedkv.bench.clock import Timing, Turns, compare, on_this_cpu, settled, together, track
from pagedkv.bench.generate import models
from pagedkv.bench.generate.peers.process import Lost, Peer, opened, size_of, started
from pagedkv.bench.memory import is_steady
from pagedkv.engine.sampling.params import SamplingParams
from pagedkv.engine.step.engine import Engine
from pagedkv.kernels import cpu
from pagedkv.kernels.linear import cpu as linear
from pagedkv.kernels.threads import num_threads

OURS, STATIC, DYNAMIC = "pagedkv", "StaticCache", "DynamicCache"
STEPS: Final = 24
"""Steps of a turn; their median counts. Together they take long enough for the kernel's count of what others ran."""
TOKENS: Final = 8
"""Tokens that transformers generates in a turn."""
SHAPES: Final = ((1, 128), (1, 2048), (1, 8192), (8, 128), (8, 2048), (8, 8192))
"""(sequences, tokens of context)."""
QUICK: Final = ((1, 128), (1, 2048), (8, 128))
MOST_OF_HOST: Final = 8192
"""Tokens of context, in all sequences, up to which transformers takes turns: a turn takes minutes beyond."""
PROMPT: Final = 2048
OVERHEADS: Final = (1, 64, 256)
"""Sequences of the steps whose forward pass computes nothing."""
PIECE: Final = 65_536
"""Bytes of a run of the bare read."""
MEMORY: Final = "gb_per_s"
"""The field of a row for the speed that bounds a decode step; a prefill is bounded by products."""

MUSTS: Final[dict[tuple[Any, ...], float]] = {
    ("decode", 1, 128): 1.35, ("decode", 1, 2048): 1.4, ("decode", 1, 8192): 1.3, ("decode", 8, 128): 1.8,
    ("decode", 8, 2048): 1.65, ("decode", 8, 8192): 1.4, ("prefill", 1, PROMPT): 1.2, ("overhead", 1): 0.3,
    ("overhead", 64): 1.5, ("overhead", 256): 5.0,
}  # fmt: skip
"""(case, batch[, context]): how many times its bound a step may take, or its ms if it has no bound."""

Row = dict[str, Any]
Taken = tuple[float, bool]
"""Seconds, and whether they were clean."""
Report = Callable[[Row], None]


def measure(
    shapes: Sequence[tuple[int, int]],
    turns: int,
    report: Report,
    config: dict[str, Any] = models.CONFIG,
    *,
    pythons: Sequence[str] = (),
) -> None:
    """Measure all cases, and hand each row to `report` as soon as it is complete.

    pythons: the interpreters in which to look for other engines, before this one.
    """

    def report_of_model(row: Row) -> None:
        report(models.of_model(config, row))

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models.write_checkpoint(folder, config)
        peers = stack.enter_context(started(folder, pythons, size_of([*shapes, (1, PROMPT)], _steps_of_peers(turns))))
        longest = max(batch * (context + 2 * STEPS) for batch, context in shapes)
        engine = models.engine_of(folder, max(longest, 256 * (64 + STEPS)))
        host = _Host(folder) if find_spec("transformers") else None
        if host is None:
            absent = "transformers is not installed: its caches do not take part (install pagedkv[hf])"
            print(absent, file=sys.stderr)
        for shape in shapes:
            _report_decode(report_of_model, engine, (host, peers), shape, turns)
        _report_prefill(report_of_model, engine, (host, peers), turns)
        _report_overhead(report_of_model, engine, turns)


class _Host:
    """The same checkpoint in transformers."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._transformers = transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        is_new = "cache" in inspect.signature(self.model.forward).parameters  # transformers 5.24
        self._argument = "cache" if is_new else "past_key_values"

    @torch.no_grad()
    def decode(self, variant: str, batch: int, context: int) -> Taken:
        """Return the seconds of a token of generate(), the mean of TOKENS, after a context of random K and V."""
        config = self.model.config
        shape = (batch, config.num_key_value_heads, context - 1, config.head_dim)
        k, v = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(2))
        if variant == STATIC:
            cache = self._transformers.StaticCache(config=config, max_cache_len=context + TOKENS + 1)
        else:
            cache = self._transformers.DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            cache.update(k, v, layer)
        seconds, is_clean = self._generate(torch.randint(3, config.vocab_size, (batch, context)), cache, TOKENS)
        return seconds / TOKENS, is_clean

    @torch.no_grad()
    def prefill(self, length: int) -> Taken:
        """Return the seconds to the first token of a random prompt."""
        ids = torch.randint(3, self.model.config.vocab_size, (1, length))
        return self._generate(ids, self._transformers.DynamicCache(config=self.model.config), 1)

    def _generate(self, ids: torch.Tensor, cache: Any, count: int) -> Taken:
        given = {"attention_mask": torch.ones_like(ids), self._argument: cache, "max_new_tokens": count}
        return on_this_cpu(lambda: self.model.generate(input_ids=ids, do_sample=False, **given))


def _steps_of_peers(turns: int) -> int:
    """Return the steps of a peer in all turns: the first turn, and the first step of each, do not count."""
    return (turns + 1) * (STEPS + 1)


def matrices(engine: Engine) -> list[torch.Tensor]:
    """Return the weights that a step reads."""
    weights = engine.decoder.weights
    return [weights.head, *(m for at in weights.layers for m in (at.qkv, at.out, at.gate_up, at.down))]


def read_speed(tensors: Sequence[torch.Tensor]) -> float:
    """Return the bytes per second of a bare read of tensors; the median of three."""
    base = min(tensor.data_ptr() for tensor in tensors)
    piece = min(PIECE, min(tensor.nbytes for tensor in tensors) // 64 * 64)
    starts = [np.arange(t.data_ptr(), t.data_ptr() + t.nbytes - piece + 1, piece) - base for t in tensors]
    runs = np.concatenate(starts).astype(np.int64)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        cpu.extension().read(cpu.isa(), num_threads(), base, runs.ctypes.data, len(runs), piece)
        seconds.append(time.perf_counter() - began)
    return len(runs) * piece / statistics.median(seconds)


def decode(engine: Engine, batch: int, context: int) -> Taken:
    """Return the seconds of a step; the median of STEPS steps."""
    requests = models.filled(engine, batch, context)
    engine.step()
    taken = steps(engine)
    models.emptied(engine, requests)
    return taken


def steps(engine: Engine) -> Taken:
    """Time STEPS steps; return the median of the clean ones, and whether half of them, or all together, are clean."""
    return together(lambda: [on_this_cpu(engine.step) for _ in range(STEPS)])


def _report_decode(
    report: Report, engine: Engine, others: tuple[_Host | None, Sequence[Peer]], shape: tuple[int, int], turns: int
) -> None:
    batch, context = shape
    host, peers = others[0], {peer.variant.name: peer for peer in others[1]}
    tensors, spec = matrices(engine), engine.cache.spec
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2 * batch * context

    def bytes_of(variant: str) -> float:
        bits = peers[variant].variant.kv_bits if variant in peers else 16
        return sum(tensor.nbytes for tensor in tensors) + kv_bytes * bits / 16

    def run(variant: str) -> Taken:
        if variant == OURS:
            return decode(engine, *shape)
        if variant in peers:
            return peers[variant].steps(STEPS)
        assert host is not None
        return host.decode(variant, *shape)

    def report_with_dtypes(row: Row) -> None:
        peer = peers.get(row["variant"])
        report(row | (peer.about if peer else {}))

    hosts = (STATIC, DYNAMIC) if host and batch * context <= MOST_OF_HOST else ()
    with opened(others[1], shape, _steps_of_peers(turns)) as lost:
        ready = [name for name in peers if name not in lost]
        found = _in_turns((OURS, *hosts, *ready), turns, run, lambda: read_speed(tensors), lost)
    _report_times(report_with_dtypes, "decode", shape, found, bytes_of, MEMORY)
    for variant, why in lost.items():
        report_with_dtypes(_axes("decode", shape, variant) | {"median": None, "why_not": why})


def _report_prefill(report: Report, engine: Engine, others: tuple[_Host | None, Sequence[Peer]], turns: int) -> None:
    host, peers, config = others[0], {peer.variant.name: peer for peer in others[1]}, engine.decoder.config
    length = min(PROMPT, config.max_position_embeddings - 8)
    layers = matrices(engine)[1:]
    pairs = length * (length + 1) // 2  # of queries and the keys that they see
    operations = 2 * length * sum(map(torch.numel, layers))
    operations += 4 * config.num_layers * config.num_heads * config.head_dim * pairs

    def run(variant: str) -> Taken:
        if host and variant == DYNAMIC:
            return host.prefill(length)
        if variant in peers:
            return peers[variant].prefill(length)
        prompt = torch.randint(3, config.vocab_size, (length,)).tolist()
        request = engine.submit(prompt, SamplingParams(max_tokens=1, ignore_eos=True))

        def computed() -> None:
            while not request.completions[0].finish_reason:
                engine.step()

        taken = on_this_cpu(computed)
        engine.cache.forget()
        return taken

    is_slow = linear.is_slow_in_torch(torch.bfloat16)
    axes = {"product": "float32"} if is_slow else {}  # another bound is another cell
    hosts, lost = (DYNAMIC,) if host and not is_slow else (), dict[str, str]()
    found = _in_turns((OURS, *hosts, *peers), turns, run, lambda: product_speed(length), lost)

    def report_with_dtypes(row: Row) -> None:
        peer = peers.get(row["variant"])
        report(axes | row | (peer.about if peer else {}))

    _report_times(report_with_dtypes, "prefill", (1, length), found, lambda _: operations, "gflop_per_s")
    if host and is_slow:
        lost[DYNAMIC] = "torch multiplies bfloat16 without oneDNN here, so that a prompt takes minutes"
    for variant, why in lost.items():
        report_with_dtypes(_axes("prefill", (1, length), variant) | {"median": None, "why_not": why})


def product_speed(rows: int) -> float:
    """Return the operations per second of torch's matrix product of `rows` tokens with a layer's gate and up.

    The product is of bfloat16, or of float32 where that is faster.
    """
    dtype = torch.float32 if linear.is_slow_in_torch(torch.bfloat16) else torch.bfloat16
    x, weights = torch.randn(rows, 1024).to(dtype), torch.randn(6144, 1024).to(dtype)
    torch.nn.functional.linear(x, weights)
    began = time.perf_counter()
    for _ in range(5):
        torch.nn.functional.linear(x, weights)
    return 5 * 2 * rows * weights.numel() / (time.perf_counter() - began)


def _report_overhead(report: Report, engine: Engine, turns: int) -> None:
    for batch in OVERHEADS:
        taken = []
        for _ in track(range(turns), f"overhead of {batch} sequences"):
            requests = models.filled(engine, batch, 32)
            with models.skipping(engine):
                engine.step()
                taken.append(steps(engine))
            models.emptied(engine, requests)
        report(_row("overhead", (batch, 32), OURS, settled(taken)) | {"must": MUSTS.get(("overhead", batch))})


def _in_turns(
    variants: Sequence[str],
    turns: int,
    run: Callable[[str], Taken],
    speed: Callable[[], float],
    lost: dict[str, str] | None = None,
) -> dict[str, tuple[Timing, list[float]]]:
    """Return the timing of each variant, and the machine's speed around each of its turns.

    The first turn does not count. The speed, of memory or of products, is the mean of one measurement before the
    variant and one after it. If they differ as two states of memory do, the variant was disturbed in this turn.
    lost: takes the names of peers that could not go on, and the reasons; these have no timing.
    """
    lost = {} if lost is None else lost
    measured = Turns(variants, turns, "generate", reads_memory=False)
    rates: dict[str, list[float]] = {variant: [] for variant in variants}
    for order in measured:
        before = speed()
        for variant in order:
            if variant in lost:
                continue
            try:
                seconds, is_clean = run(variant)
            except Lost as why:
                lost[variant] = str(why)
                measured.drop(variant)
                before = speed()
                continue
            after = speed()
            measured.add(variant, seconds, is_clean and is_steady(before, after))
            rates[variant].append((before + after) / 2)
            before = after
    return {variant: (timing, rates[variant][1:]) for variant, timing in measured.timings().items()}


def _report_times(
    report: Report,
    case: str,
    shape: tuple[int, int],
    found: dict[str, tuple[Timing, list[float]]],
    work: Callable[[str], float],
    speed: str,
) -> None:
    """Report a row for each variant with its bound: its `work` over the machine's speed. Only our own has a promise.

    Another variant's row has its time over ours, `over_pagedkv`: the median over the turns in which both count.
    """
    ours, _ = found[OURS]
    for variant, (timing, rates) in found.items():
        pairs = zip(timing.turns, rates, strict=True)
        ratios = [seconds * rate / work(variant) for seconds, rate in pairs if seconds is not None]
        row = _row(case, shape, variant, timing)
        row["must"] = MUSTS.get((case, *shape)) if variant == OURS else None
        row |= {"over_bound": statistics.median(ratios), "ratios": ratios}
        row["bound"] = 1e3 * statistics.median(work(variant) / rate for rate in rates)
        row[speed] = statistics.median(rates) / 1e9
        if speed == MEMORY:
            row["memory"] = [round(end(rates) / 1e9, 2) for end in (min, max)]
        report(row if variant == OURS else row | {"over_pagedkv": compare(timing, ours, truediv)})


def _row(case: str, shape: tuple[int, int], variant: str, timing: Timing) -> Row:
    return _axes(case, shape, variant) | timing.fields(lambda seconds: 1e3 * seconds)


def _axes(case: str, shape: tuple[int, int], variant: str) -> Row:
    return {"case": case, "batch": shape[0], "context": shape[1], "variant": variant, "unit": "ms"}
