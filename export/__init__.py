"""Checkpoints for serving engines, one module per destination format."""
