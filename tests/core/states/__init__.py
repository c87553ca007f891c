"""Recurrent states: a walk, laws and costs."""
