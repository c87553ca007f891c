"""`pagedkv bench tiers`: frames that move between the pool, host memory and a disk, and what prompts gain."""
