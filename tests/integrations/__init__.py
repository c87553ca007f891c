"""pagedkv inside other systems."""
