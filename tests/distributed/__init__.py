"""Several processes: ranks that share one model, and pages that go from one process to another.

Ranks and one process give the same tokens, and so do a prefill side and a decode side. If one dies, the others end, or
go on, within a deadline.
"""
