"""library: attention of long prompts by torch's flash attention, on keys gathered from their pages.

The registry loads backend.py.
"""
