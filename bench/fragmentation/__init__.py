"""`pagedkv bench fragmentation`: how much of the KV memory holds tokens, for our manager and for other allocators.

    workloads.py   requests of known lengths: published mixes, a trace, forks, beams, windows
        │ Request(prompt, output, samples, beams)
        ▼
    simulation.py  serves them: admit, one token a step, fork, beam step, preempt, finish; the clock counts steps
        │ admit · grow · fork · free; the allocator does not know the length of an output
        ▼
    account.py     Allocator, and its Account of every byte: useful + reserved + internal + rounded + free = capacity
        ├─ live.py         pagedkv.core.MemoryManager itself, at any block size
        ├─ contiguous.py   reservations of a maximum, a power of two or the true length; caches that move as they grow
        │      └─ arenas.py    a buddy allocator; the caching best-fit policy of torch
        └─ virtual.py      pages of virtual memory behind contiguous addresses

    cells.py    which workload meets which allocator, the published figures, and the promises
    runner.py   measures the cells, and makes the rows

Every part of an account has the meaning of the PagedAttention paper (Kwon et al., SOSP 2023, arXiv 2309.06180):

    useful     tokens that attention can still read; a shared frame counts once
    reserved   held for tokens that the sequence will store later
    internal   held by a sequence and never used by it
    rounded    added by the allocator to the size that was asked for
    free       held by no sequence

While a request waits, free memory is lost. The paper counts rounded and free memory as external fragmentation
then, and so do the figures here. A figure is a mean over the steps in which requests wait, one weight a step: the time
of a step is not modelled. Prompts share no prefix; `pagedkv replay` measures that.
"""
