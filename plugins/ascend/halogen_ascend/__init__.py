"""An Ascend-style NPU behind halogen's seam: `torch_npu`, or a strict simulator of one."""
