"""The bandwidth of the operations on a cache, beside the speed of memory: `pagedkv bench bandwidth`.

    efficiency  =  bytes that had to move / (seconds × speed of the ceiling in the same turn)

Bytes that had to move are those of the definition: the keys and values that a query sees, a weight once, what a copy
reads and what it writes. Bytes that a cache line, a page table or a write-allocate adds do not count.

    ceilings.py  the memory, and the steps that only read, copy or scale it
    subjects.py  the operations: their steps, bytes and ceilings
    delta.py     the gated delta rule over state frames
    turns.py     a ceiling before and after each repetition; states of memory; rows
    runner.py    the run
"""
