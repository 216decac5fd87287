"""What can be counted: refusals at start, and where the model keeps what is needed."""

from typing import Any


class Unsupported(ValueError):
    """A configuration whose experts cannot be counted exactly; the text says why."""


def _refuse(condition: Any, why: str) -> None:
    if condition:
        raise Unsupported(f"colocate_vllm cannot count experts here: {why}")


def experts(model_config: Any) -> int:
    """Routed experts per MoE layer."""
    return int(model_config.get_num_experts())


def top_k(model_config: Any) -> int:
    """Routed experts per token."""
    return int(model_config.get_num_experts_per_tok())


def max_step_tokens(vllm_config: Any) -> int:
    """The rows of the largest batch, padding included."""
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or [0]
    return int(max(vllm_config.scheduler_config.max_num_batched_tokens, *sizes, 0))


def check(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """Refuse what is unsupported; the KV group to index by, and its block size."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    _refuse(experts(model) == 0, "the model has no routed experts")
    _refuse(top_k(model) <= 0, "the model states no top-k")
    _refuse(parallel.data_parallel_size > 1, "data parallelism (run one server per rank instead)")
    _refuse(parallel.pipeline_parallel_size > 1, "pipeline parallelism (a rank sees some layers)")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        _refuse(getattr(parallel, name, 1) > 1, f"context parallelism ({name})")
    _refuse(getattr(parallel, "enable_dbo", False), "dual batch overlap (leave out --enable-dbo)")
    _refuse(vllm_config.speculative_config, "speculative decoding (leave out --speculative-config)")
    _refuse(kv_cache_config is None, "this vLLM gives connectors no KV cache configuration")
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        full = kind in ("FullAttentionSpec", "MLAAttentionSpec")
        if full and getattr(spec, "sliding_window", None) is None:
            return index, int(spec.block_size)
    raise Unsupported(
        "colocate_vllm cannot count experts here: no KV group keeps the whole prompt "
        "(expected one with full attention)"
    )


def routers(vllm_config: Any) -> list[Any]:
    """The routers of the MoE layers, first layer first."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    found: dict[int, Any] = {}
    for name, module in vllm_config.compilation_config.static_forward_context.items():
        router = getattr(module, "router", None)
        method = getattr(module, "_quant_method", None)
        if router is None or method is None:
            continue
        _refuse(
            method.is_monolithic,
            f"{name}: the kernel of {type(method).__name__} keeps its expert ids to itself "
            "(choose another with --moe-backend, for example triton)",
        )
        _refuse(
            not isinstance(router, BaseRouter),
            f"{name}: router {type(router).__name__} does not show its expert ids",
        )
        _refuse(module.layer_id in found, f"{name}: a second router in layer {module.layer_id}")
        found[module.layer_id] = router
    _refuse(not found, "no MoE layer is registered")
    return [found[layer] for layer in sorted(found)]
