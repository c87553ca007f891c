"""Laws of pagedkv.cache."""
