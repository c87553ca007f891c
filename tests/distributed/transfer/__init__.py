"""Prompts that one process computes and another answers."""
