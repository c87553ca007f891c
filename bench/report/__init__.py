"""The report: one HTML file of all kept rows, that needs no network and no other file."""

from __future__ import annotations
