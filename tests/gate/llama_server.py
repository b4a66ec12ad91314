"""llama-server of the package xllamacpp as a process: python llama_server.py FILE.gguf PORT CACHE_TYPE."""

from __future__ import annotations

import sys
import time


def main(gguf, port, cache_type):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.n_ctx, params.n_parallel = gguf, int(port), 2048, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_gpu_layers, params.warmup = 0, False
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache_type.upper()}")
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
