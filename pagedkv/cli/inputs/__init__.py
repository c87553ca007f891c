"""Texts of the command line, read and checked: prompts, and options that shape the output. No torch."""
