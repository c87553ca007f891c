"""Recurrent states of hybrid models: which prompt tokens are computed again under each rule of keeping states.

A model with recurrent layers resumes a prompt only where a state was kept. Two generated traces are replayed. The rules
of other engines are simulated over lists of messages (rules.py); ours is the live `MemoryManager` (live.py). No tensor
exists, no time is measured, and no page of KV is ever evicted.

    tokens                   prompt tokens of all requests
    possible                 of these, tokens of whole pages that some request before had in common (Prefixes)
    computed                 prompt tokens behind the state at which the requests resume
    beyond the least         computed - (tokens - possible)
    hits                     (tokens - computed) / possible
"""
