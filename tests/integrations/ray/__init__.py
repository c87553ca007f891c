"""Replicas behind Ray Serve."""
