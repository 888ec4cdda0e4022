"""Continuous batching under one token budget. No torch."""
