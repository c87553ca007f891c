"""integrations: pagedkv inside other systems. Each module needs its extra, and is imported only by whoever has it."""
