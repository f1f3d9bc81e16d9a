"""Which methods llama.cpp runs, and the command line that runs one."""

from __future__ import annotations

from kvsim.engines.llamacpp_types import BLOCKS, quantized
from kvsim.errors import KvsimError
from kvsim.method import Chain, Method, parse_method
from kvsim.workload import whole


def cache_types(method: Method | str) -> tuple[str, str]:
    """The cache types of keys and values; KvsimError naming the part that llama.cpp cannot run.

    llama.cpp keeps every token (the model's own sliding layers apart), in the model's basis, one type a side for all
    layers, quantized as it is written.
    """
    chosen = parse_method(method)
    if chosen.clauses:
        where = chosen.clauses[0].layers.text
        raise KvsimError(f"llama.cpp stores all layers in one type a side: the clause for layers={where} cannot be run")
    if chosen.tokens.name != "keep":
        raise KvsimError(f"llama.cpp cannot run {chosen.tokens.name}: it drops no tokens but those that leave the "
                         "model's own sliding windows")  # fmt: skip
    return _type(chosen.k, "keys"), _type(chosen.v, "values")


def realise(method: Method | str, *, max_model_len: int | None = None, gpu_memory_utilization: float | None = None,
            tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1, max_num_seqs: int | None = None,
            n_ubatch: int = 512) -> str:
    """The flags with which `llama-server` runs a method.

    max_model_len: tokens of one request, which `-c` multiplies by the slots; max_num_seqs: slots, each with a cache of
    its own; n_ubatch: sliding caches hold that many cells more; the two parallel sizes multiply to devices, over which
    an even `-ts` spreads the layers. Raises KvsimError with the reason where it cannot, and for
    gpu_memory_utilization, which llama.cpp has not.
    """
    if gpu_memory_utilization is not None:
        raise KvsimError("llama.cpp takes no share of the memory: it allocates what -c asks for; leave "
                         "gpu_memory_utilization out")  # fmt: skip
    devices = tensor_parallel_size * pipeline_parallel_size
    k, v = cache_types(method)
    slots = 1 if max_num_seqs is None else int(whole(max_num_seqs, "max_num_seqs", low=1, high=256))
    flags = []
    if max_model_len is not None:
        whole(max_model_len, "max_model_len", low=1, high=2**31)
        flags.append(f"-c {-(-max_model_len // 256) * 256 * slots}")
    flags.append(f"-ctk {k} -ctv {v}")
    if quantized(v):
        flags.append("-fa on")
    flags.append(f"-b {n_ubatch} -ub {n_ubatch}" if n_ubatch > 2048 else f"-ub {n_ubatch}")
    if max_num_seqs is not None:
        flags.append(f"-np {slots}")
    if devices > 1:
        flags.append("-ts " + ",".join("1" for _ in range(devices)))
    return " ".join(flags)


def _type(chain: Chain, side: str) -> str:
    part = chain.format
    if chain.basis.name != "identity":
        raise KvsimError(f"llama.cpp cannot run {chain.basis.name}: its cache holds {side} in the model's own basis")
    if chain.corrections:
        raise KvsimError(f"llama.cpp cannot run {chain.corrections[0].name}: its cache types have no corrections")
    if part.name == "full":
        return "f16"
    if part.name == "gguf" and part.kernel_format in BLOCKS:
        return part.kernel_format
    raise KvsimError(f"llama.cpp cannot store {side} as {part}; its types: {', '.join(BLOCKS)}")
