"""Serving: streams of one process, and the HTTP server as its clients see it."""
