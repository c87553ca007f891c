"""frame_pool: frames with references and keys, for an engine that keeps its own page tables. Start at pool.py."""
