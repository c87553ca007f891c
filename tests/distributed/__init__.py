"""Several processes: pages that go from pool to pool. `make test-distributed` runs these with NIXL installed."""
