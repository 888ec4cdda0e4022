"""Before any test imports Triton: kernels run in its interpreter, unless a GPU is named.

Before any test starts a process: Ctrl-C reaches it. A shell ignores it in background jobs, children
inherit that, and a program that is told to ignore it rightly does.
"""

import os
import signal

signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("HALOGEN_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
