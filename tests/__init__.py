"""Tests are laws: each name is a sentence that must stay true. A package, so that benchmarks share `tests.cases`."""
