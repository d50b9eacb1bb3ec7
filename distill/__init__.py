"""Distillation: divergences, teacher outputs, rollouts, the objective."""
