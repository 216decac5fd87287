"""vLLM's KV connectors, extended by expert counts; everything else stays theirs."""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.forward_context import get_forward_context, is_forward_context_available

from . import support
from .capture import SlotTable, Span
from .ledger import Ledger
from .wire import KEY

Key = tuple[str, str]


class StepRequest(KVConnectorMetadata):
    """Scheduler to worker: the inner connector's metadata, and what to do with slots this step."""

    def __init__(self, inner: KVConnectorMetadata) -> None:
        """Wrap the inner connector's metadata."""
        self.inner = inner
        self.forget: list[Span] = []
        self.copies: list[tuple[int, int]] = []
        self.sums: dict[Key, Span] = {}


class StepSums(KVConnectorWorkerMetadata):
    """Worker to scheduler: sums per request and kind, read only once the device is done."""

    def __init__(self, inner: KVConnectorWorkerMetadata | None) -> None:
        """Wrap the inner connector's metadata."""
        self.inner = inner
        self.tokens: dict[Key, int] = {}
        self._sums: dict[Key, torch.Tensor] = {}
        self._ready: Any = None

    def put(self, sums: dict[Key, torch.Tensor], tokens: dict[Key, int]) -> None:
        """Start the copies to the host; on a GPU they are waited for in `read`."""
        self.tokens = tokens
        for key, value in sums.items():
            if value.is_cuda:
                host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                self._sums[key] = host.copy_(value, non_blocking=True)
            else:
                self._sums[key] = value
        if any(value.is_cuda for value in sums.values()):
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def read(self) -> dict[Key, list[int]]:
        """Wait for the copies, and give the sums."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None
        return {key: value.tolist() for key, value in self._sums.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Materialise: a pickle must not hold a copy in flight."""
        if self._ready is not None:
            self._ready.synchronize()
        return {**self.__dict__, "_ready": None}

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepSums":
        """Tensor-parallel ranks route alike: keep one's sums, never add them."""
        theirs = other.inner if isinstance(other, StepSums) else other
        if self.inner is None:
            self.inner = theirs
        elif theirs is not None:
            self.inner = self.inner.aggregate(theirs)
        return self


class CountsMixin(KVConnectorBase_V1):
    """Put before a connector in the bases of a class; see `with_counts`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        """Refuse what cannot be counted, then start the inner connector."""
        self._group, self._block_size = support.check(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        model = vllm_config.model_config
        self._experts = support.experts(model)
        self._top_k = support.top_k(model)
        if role == KVConnectorRole.SCHEDULER:
            self._ledger = Ledger(self._experts, self._top_k)
            self._local: dict[str, int] = {}
            self._forget: list[Span] = []
        else:
            self._table: SlotTable | None = None
            self._step: StepRequest | None = None
            self._attention: Any = None

    # Scheduler side

    def on_new_request(self, request: Any) -> None:
        """Follow the request."""
        super().on_new_request(request)
        self._ledger.add(request.request_id, request.num_prompt_tokens, request.kv_transfer_params)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Note where KV from elsewhere would begin."""
        self._local[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Forget the slots that KV from elsewhere will fill."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        start = self._local.pop(request.request_id, 0)
        if num_external_tokens > 0:
            ids = blocks.get_block_ids()[self._group]
            end = min(start + num_external_tokens, len(ids) * self._block_size)
            self._forget.append(Span(list(ids), start, end))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Add what the worker shall forget, copy and sum."""
        # The inner connector may consume the output's fields: read them first.
        state = scheduler_output.kv_connector_block_state
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
        step = StepRequest(super().build_connector_meta(scheduler_output))
        for request_id, count in scheduler_output.num_scheduled_tokens.items():

            def blocks(request_id: str = request_id) -> list[int]:
                return list(state.get_block_ids(request_id)[self._group])

            start = computed[request_id]
            step.sums |= self._ledger.ask(request_id, start, start + count, blocks)
        step.forget, self._forget = self._forget, []
        for copy in scheduler_output.kv_cache_block_copies or ():
            step.copies.append((copy.src_block_id, copy.dst_block_id))
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """Fill the replies, then let the inner connector see its own metadata."""
        ours = connector_output.kv_connector_worker_meta
        if isinstance(ours, StepSums):
            self._ledger.fill(ours.read(), ours.tokens)
            connector_output.kv_connector_worker_meta = ours.inner
        else:
            self._ledger.fill({}, {})
        super().update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        """Add our key to the reply."""
        return self._reply(request, *super().request_finished(request, block_ids))

    def _reply(self, request: Any, delay: bool, params: dict[str, Any] | None) -> Any:
        self._local.pop(request.request_id, None)
        counts = self._ledger.finish(request.request_id)
        return delay, (params if counts is None else {**(params or {}), KEY: counts})

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The model is loaded: bind to its routers, and allocate."""
        super().register_kv_caches(kv_caches)
        routers = support.routers(self._vllm_config)
        self._table = SlotTable(
            slots=self._kv_cache_config.num_blocks * self._block_size,
            block_size=self._block_size,
            layers=len(routers),
            experts=self._experts,
            top_k=self._top_k,
            max_tokens=support.max_step_tokens(self._vllm_config),
            device=next(iter(kv_caches.values())).device,
        )
        for layer, router in enumerate(routers):
            router.set_capture_fn(self._table.hook(layer, router.capture_fn))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Unwrap."""
        super().handle_preemptions(getattr(kv_connector_metadata, "inner", kv_connector_metadata))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take our part; forget and copy before this step's tokens are written."""
        if not isinstance(connector_metadata, StepRequest):
            super().bind_connector_metadata(connector_metadata)
            return
        super().bind_connector_metadata(connector_metadata.inner)
        self._step, self._attention = connector_metadata, None
        if self._table is not None:
            for span in self._step.forget:
                self._table.forget(span)
            for source, target in self._step.copies:
                self._table.copy_block(source, target)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Model Runner V2 gives the attention metadata here, and nowhere later."""
        self._attention = kwargs.get("attn_metadata")
        super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """The forward pass is over: move its ids to their slots."""
        attention = self._attention
        if attention is None and is_forward_context_available():
            attention = get_forward_context().attn_metadata
        if self._table is not None and attention:
            group = self._kv_cache_config.kv_cache_groups[self._group]
            layer = next((name for name in group.layer_names if name in attention), None)
            if layer is not None:
                self._table.commit(attention[layer].slot_mapping)
        self._attention = None
        super().wait_for_save()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Sum what the scheduler asked for."""
        inner = super().build_connector_worker_meta()
        step, self._step = self._step, None
        if self._table is None or step is None or not step.sums:
            return None if inner is None else StepSums(inner)
        reply = StepSums(inner)
        reply.put(
            {key: self._table.sum(span) for key, span in step.sums.items()},
            {key: span.end - span.start for key, span in step.sums.items()},
        )
        return reply


class _AllGroups:
    """For connectors that support several KV groups."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        parent: Any = super()
        reply: Any = self._reply  # type: ignore[attr-defined]
        return reply(request, *parent.request_finished_all_groups(request, block_ids))


def with_counts(name: str) -> type[KVConnectorBase_V1]:
    """The connector that vLLM registers as `name`, with counts; AttributeError if there is none."""
    try:
        inner = KVConnectorFactory.get_connector_class_by_name(name)
    except ValueError as error:
        raise AttributeError(f"expected a connector that vLLM registers, got {name}") from error
    hma = (_AllGroups,) if hasattr(inner, "request_finished_all_groups") else ()
    return type(name, (*hma, CountsMixin, inner), {"__module__": __name__})
