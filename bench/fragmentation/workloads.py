"""Requests of known lengths. Each workload is drawn from a seed, so that all allocators serve the same requests.

Lengths of ShareGPT and Alpaca: the PagedAttention paper (SOSP 2023, arXiv 2309.06180) prints the mean input and output,
161.31 and 337.99, 19.31 and 58.45 tokens (its Fig. 11), and the longest context, 2,048. It prints no quantile. But its
Fig. 2 says how a reservation of 2,048 tokens is filled on average: 20.4 stored : 13.3 to be stored : 57.3 never used.
So 299 tokens are still to come when one looks at a sequence, E[output²] / E[output] = 599, and the standard deviation
of the output is 0.88 of its mean. Outputs here have a gamma distribution of that mean and spread. The spread of prompts
is not published: prompts are log-normal with 1.5 times the mean as deviation (0.7 times for Alpaca), at most 1,024 long
as in vLLM's own benchmark of ShareGPT.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from pagedkv.bench.fragmentation.account import Memory
from pagedkv.errors import InvalidRequest

Lengths = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
"""(random numbers, count) to prompts and outputs, int64 [count] each."""

OPT_13B: Final = Memory(slots=15_700, token_bytes=8 * 10_240, tensors=8, longest=2048)
"""The memory of the paper's Fig. 2: 15.7K slots beside OPT-13B on an A100 of 40 GB, of which we keep 4 of 40 layers."""
QUARTER: Final = replace(OPT_13B, slots=4_000)
"""A quarter, for forks of short prompts. Their savings do not depend on the size, and a run is steady sooner."""
LONG_LLAMA_8B: Final = Memory(slots=1_048_576, token_bytes=8 * 2048, tensors=8, longest=131_072)
"""Llama 3 8B, 4 of 32 layers, with long contexts: 128 GiB for all layers."""

OUTPUT_SPREAD: Final = 0.9
"""Standard deviation over mean of the outputs of ShareGPT that are drawn; 0.88 after the cut at the longest context."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and the outcome that the allocator does not know.

    output:  tokens that each sequence stores after the prompt.
    samples: sequences that are forked from the prompt.
    beams:   sequences of a beam search; each step forks and drops some.
    """

    prompt: int
    output: int
    samples: int = 1
    beams: int = 1
    seed: int = 0

    @property
    def final(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.output


@dataclass(frozen=True)
class Workload:
    """Requests and the memory that serves them.

    traits: fields that every request gets.
    """

    name: str
    lengths: Lengths
    memory: Memory = OPT_13B
    traits: dict[str, int] = field(default_factory=dict)
    window: int | None = None

    def requests(self, count: int, seed: int = 0) -> list[Request]:
        """Return the first `count` requests."""
        prompts, outputs = self.lengths(np.random.default_rng(seed), count)
        pairs = enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
        return [Request(prompt, output, seed=i, **self.traits) for i, (prompt, output) in pairs]


def kept(
    draw: Callable[[np.random.Generator, int], np.ndarray], longest: Callable[[np.ndarray], np.ndarray]
) -> Lengths:
    """Return lengths of the draws [count, 2] that `longest` allows, at least one token each."""

    def lengths(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        found = np.zeros((0, 2), np.int64)
        while len(found) < count:
            drawn = np.maximum(1, np.rint(draw(random, 2 * count + 64))).astype(np.int64)
            found = np.concatenate([found, drawn[longest(drawn)]])
        return found[:count, 0], found[:count, 1]

    return lengths


def log_normal(random: np.random.Generator, count: int, *, mean: float, spread: float) -> np.ndarray:
    """Draw from the log-normal distribution with this mean and this ratio of standard deviation to mean."""
    variance = np.log1p(spread**2)
    return random.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), count)


def gamma(random: np.random.Generator, count: int, *, mean: float, spread: float) -> np.ndarray:
    """Draw from the gamma distribution with this mean and this ratio of standard deviation to mean."""
    return random.gamma(spread**-2, mean * spread**2, count)


def _chat(prompt: float, prompt_spread: float, output: float) -> Lengths:
    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        prompts = log_normal(random, count, mean=prompt, spread=prompt_spread)
        return np.stack([prompts, gamma(random, count, mean=output, spread=OUTPUT_SPREAD)], 1)

    return kept(draw, lambda drawn: (drawn[:, 0] <= 1024) & (drawn.sum(1) <= OPT_13B.longest))


def _uniform(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    return random.integers(1, 1025, count), random.integers(1, 1025, count)


# The factors make up for the cuts, so that the means are the published ones.
SHAREGPT: Final = _chat(161.31 * 1.16, 1.5, 337.99 * 1.015)
ALPACA: Final = _chat(19.31, 0.7, 58.45)

WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload("sharegpt", SHAREGPT),
        Workload("alpaca", ALPACA),
        *(Workload(f"samples-{n}", ALPACA, QUARTER, traits={"samples": n}) for n in (2, 4, 6)),
        *(Workload(f"beams-{n}", ALPACA, QUARTER, traits={"beams": n}) for n in (2, 4, 6)),
        Workload("samples-6-sharegpt", SHAREGPT, traits={"samples": 6}),
        Workload("beams-6-sharegpt", SHAREGPT, traits={"beams": 6}),
        Workload("window", _uniform, window=256),
    )
}


def traced(path: Path, count: int) -> Workload:
    """Return the first `count` requests of a trace in the form published with Mooncake (FAST 2025).

    A line is an object with input_length and output_length. Prefixes count as different: `pagedkv replay` has hits.
    Raises: InvalidRequest that names the first malformed line.
    """
    pairs = np.array(list(islice(_pairs(path), count)), np.int64).reshape(-1, 2)
    if not len(pairs):
        raise InvalidRequest(f"{path} holds no request")
    longest = int(pairs.sum(1).max())
    memory = replace(LONG_LLAMA_8B, longest=max(LONG_LLAMA_8B.longest, longest))
    return Workload("mooncake", lambda _, most: (pairs[:most, 0], pairs[:most, 1]), memory)


def _pairs(path: Path) -> Iterator[tuple[int, int]]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                    pair = int(row["input_length"]), int(row["output_length"])
                    if min(pair) < 1:
                        raise ValueError("a length below 1")
                except (ValueError, KeyError, TypeError) as why:
                    raise InvalidRequest(
                        f"{path}, line {number}: not a request ({why}); "
                        'each line is an object like {"input_length": 6758, "output_length": 500}'
                    ) from None
                yield pair
    except (OSError, UnicodeDecodeError) as why:
        words = getattr(why, "strerror", None) or why
        raise InvalidRequest(f"--trace {path} cannot be read: {words}; give a file of requests") from None
