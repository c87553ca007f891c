"""check: the invariants I1-I9 as plain numpy, written apart from the compiled code that they judge. Start at laws.py."""
