"""Torch layers for hosts without Transformer Engine."""
