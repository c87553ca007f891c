"""Hints: how many tokens agents compute again while their tools run, with and without `retain`.

An agent calls a tool, and comes back when the tool has ended. The pool holds half of what all agents have. The live
`MemoryManager` serves their requests in the order of their times; it keeps integers only, and no time is measured.

    again                    tokens of a prompt that a request before had computed, and that are computed again
    LRU                      without hints
    optimum                  the page that is needed last is evicted first, by a list of all later requests
"""
