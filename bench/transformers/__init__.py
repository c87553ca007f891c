"""transformers: `model.generate` with the caches of transformers and with pages. See runner.py."""
