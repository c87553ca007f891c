"""check: the invariants I1-I9 in plain numpy, apart from the compiled code that they judge. Start at laws.py."""
