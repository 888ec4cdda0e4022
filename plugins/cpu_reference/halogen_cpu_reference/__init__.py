"""The reference backend: every op in plain torch on the CPU."""
