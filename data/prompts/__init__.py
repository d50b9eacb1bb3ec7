"""Prompt files that ship with the package (our own writing)."""
