"""integrations: pagedkv inside other systems. Each module needs an extra; no other module imports it."""
