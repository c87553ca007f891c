"""integrations: pagedkv inside other systems. Each module needs an extra; of the layers, only serve imports one."""
