"""Triton kernels and the backend over them that `halogen-cuda` and `halogen-rocm` share.

A library: it registers no plugin. Kernels take torch tensors and know nothing of the seam; `ops`
and
`backend` connect them to it.
"""
