"""prefix: which published pages can be found by their tokens, and how other processes learn of them."""
