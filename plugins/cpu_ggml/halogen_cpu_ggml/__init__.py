"""halogen's CPU backend: whole-step ggml graphs with kernels of our own in them."""
