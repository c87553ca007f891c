"""Caches, engines and hosts as on a GPU. Each test runs on the CPU too, so it is rehearsed anywhere."""
