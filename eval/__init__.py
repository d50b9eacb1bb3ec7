"""Measuring drafters: acceptance, latency, the losslessness audit, reports."""
