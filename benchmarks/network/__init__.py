"""Whole networks: training steps and folded inference."""
