"""Drafters that live on the frozen target, and the one place that builds and loads a drafter of any kind."""

from .load import load_drafter, load_served

__all__ = ["load_drafter", "load_served"]
