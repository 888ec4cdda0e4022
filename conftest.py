"""Before any test imports Triton: kernels run in its interpreter, unless a GPU is named."""

import os

if os.environ.get("HALOGEN_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
