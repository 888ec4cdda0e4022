"""llama.cpp's server (the prebuilt `xllamacpp`) on one file; prints its address, then waits."""

import argparse
import signal

import xllamacpp

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--slots", type=int, default=8)
parser.add_argument("--context", type=int, default=8192, help="tokens over all slots")
parser.add_argument("--flash", choices=("auto", "on", "off"), default="auto")
options = parser.parse_args()

params = xllamacpp.CommonParams()
params.model.path = options.model
params.n_ctx, params.n_parallel = options.context, options.slots
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
kind = f"LLAMA_FLASH_ATTN_TYPE_{ {'on': 'ENABLED', 'off': 'DISABLED'}.get(options.flash, 'AUTO') }"
params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, kind)
params.warmup, params.verbosity, params.kv_unified = False, -1, True
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
