"""The words of the report's sections: the subject of each benchmark, for whom it matters, how, and its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class About:
    """The words about a benchmark; each field is a sentence or two, but for the title and the page of `docs`."""

    title: str
    measured: str
    matters: str
    method: str
    limits: str
    page: str


ABOUT: Final = {
    "manager": About(
        "The memory manager",
        "The integers of paging: planning and committing a decode step; allocating, matching and publishing blocks.",
        "Authors of engines. The manager runs between two steps of a model, while the processor or the GPU waits.",
        "Every manager does the same work on its own data structures, in a process of its own. Cases and managers take "
        "turns in an order drawn anew; the first of four runs in a turn, with cold caches, does not count.",
        "Tensors and models take no part. A peer's garbage collection counts only where it falls into a step.",
        "explanation/measuring-the-manager",
    ),
    "attention": About(
        "Attention on a CPU",
        "Decode and prefill attention over pages, and the storing of new keys and values.",
        "People who decode on a CPU: a decode step reads every cached key and value once, so memory is the bound.",
        "All variants and the bare read of the same frames take turns, over pools larger than the caches. Disturbed "
        "repetitions do not count. A share is the median over turns.",
        "One layer, random values, two threads at most. Below 8 bit, arithmetic rather than memory is the bound.",
        "explanation/measuring-attention",
    ),
    "fragmentation": About(
        "Fragmentation",
        "The share of the KV memory that holds tokens, and the rest by cause: reserved, never used, rounded, free.",
        "People who size a pool: waste is sequences that are not served, and it is the reason why paging exists.",
        "Every allocator serves the same requests with the same memory, a token a step. Ours is the live manager; the "
        "others are written anew from their published policies. Lengths come from published figures.",
        "The time of a step is not modelled. Prompts share no prefix. Only a copy in pieces is timed.",
        "explanation/fragmentation",
    ),
    "bandwidth": About(
        "Bandwidth",
        "The ceilings of this machine's memory, and how near to them each operation on the cache gets.",
        "Writers of kernels, and people who ask why a step is not faster.",
        "A ceiling is measured before and after each repetition of an operation. Efficiency is the bytes that had to "
        "move over time × ceiling. A repetition in which memory changes its state does not count.",
        "A ceiling is that of one access pattern: an operation with a better one exceeds it. Below 8 bit, arithmetic "
        "rather than memory is the bound.",
        "explanation/bandwidth",
    ),
    "generate": About(
        "The reference engine",
        "A decode step of a model of 474 million parameters, or of fewer `layers` where rows say so, and its parts.",
        "People who run prompts on a CPU, and readers of the reference engine.",
        "The bound is the time in which a bare read gives the bytes of weights, K and V; it is measured before and "
        "after each variant. Engine, transformers and other engines take turns in an order drawn anew.",
        "Random weights take as long as trained ones. Text does not. transformers runs with its own generate().",
        "explanation/engine-speed",
    ),
    "transformers": About(
        "Inside transformers",
        "Tokens per second, first tokens and peak memory of model.generate with four kinds of cache.",
        "Users of Hugging Face transformers: patch(model) is the only line that differs.",
        "A Llama of 100 million parameters, or of fewer `layers` where rows say so; the caches take turns in an order "
        "drawn anew, on random K and V.",
        "The shorter the context, the more of a step are the linear layers, which are the same for all caches.",
        "start/transformers",
    ),
    "vllm": About(
        "Inside vLLM",
        "A decode step and a first token of vLLM on a CPU, as it is and with our parts.",
        "Users of vLLM on CPUs: PAGEDKV_VLLM=1 is the only thing that differs. All cores compute.",
        "One engine serves all variants; a switch in shared memory selects the parts, turn by turn.",
        "The model has small linear layers, so a step is mostly attention. In a wider model they take more of it.",
        "start/vllm",
    ),
    "tiers": About(
        "Tiers",
        "Frames that move to host memory, to a disk and back, or to another process; a first token by the place of its "
        "prefix; and decode steps beside such transfers.",
        "People whose prompts have more known pages than the pool holds: a tier saves their prefill.",
        "A tier and a bare transfer of the same bytes take turns: memcpy of one thread, direct reads and writes of a "
        "file, or the bare transport between the same two processes. First tokens and steps take turns, too. Each page "
        "that a tier loads is verified by its checksum.",
        "One process and one disk; the system may cache what the disk under a virtual machine holds. Nothing else uses "
        "the disk meanwhile. Shared stores and other machines take no part; a transfer stays on the machine.",
        "how-to/tiers",
    ),
}
