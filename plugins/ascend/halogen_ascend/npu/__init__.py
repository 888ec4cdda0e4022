"""The real device through torch_npu: argument patterns as the vendor's own serving plugin uses.

Never run on an NPU by us: the contract test runs it shape-only (README).
"""
