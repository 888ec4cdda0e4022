"""Weights on the host: reading stored formats, quantising layer by layer, aligned RoPE tables."""
