"""Tests of the tiers."""
