"""llama.cpp (the prebuilt `xllamacpp`) serving one file: `python llama_cpp_server.py MODEL`.

A process of its own, for its ggml must not meet the one that `cpu_ggml` loads. Prints its address,
ends when standard input does.
"""

import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel = 1024, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.warmup, params.verbosity = False, -1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
