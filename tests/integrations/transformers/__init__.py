"""pagedkv inside Hugging Face transformers."""
