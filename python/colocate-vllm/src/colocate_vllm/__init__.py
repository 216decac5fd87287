"""Expert counts from vLLM: set `"kv_connector_module_path": "colocate_vllm"`.

vLLM looks the connector's name up in this module; every name that vLLM registers is found here,
as a subclass of vLLM's own connector that also counts experts.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        from .connector import with_counts
    except ImportError as error:
        raise AttributeError(
            f"colocate_vllm needs a vLLM with V1 KV connectors: {error}"
        ) from error
    made = with_counts(name)
    globals()[name] = made  # one class per name, so that identity checks hold
    return made
