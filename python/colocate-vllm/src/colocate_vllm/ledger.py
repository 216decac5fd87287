"""Scheduler side: which sums to ask the worker for, and whose reply they fill."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .capture import Span
from .wire import KEY, Counts, encode

Sums = dict[tuple[str, str], list[int]]


@dataclass
class _Request:
    prompt_tokens: int
    wants_output: bool
    counts: dict[str, str] = field(default_factory=dict)
    finished: bool = False


class Ledger:
    """Requests between their arrival and the reply that carries their counts."""

    def __init__(self, experts: int, top_k: int) -> None:
        """For a model with so many routed experts, and top-k, per MoE layer."""
        self._experts, self._top_k = experts, top_k
        self._requests: dict[str, _Request] = {}

    def add(self, request_id: str, prompt_tokens: int, params: dict[str, Any] | None) -> None:
        """Follow a request if its `kv_transfer_params` ask for a handoff or for counts."""
        own = (params or {}).get(KEY)
        if not params or not (params.get("do_remote_decode") or isinstance(own, dict)):
            return
        want = own.get("want") if isinstance(own, dict) else None
        wants_output = isinstance(want, list) and "output_counts" in want
        self._requests[request_id] = _Request(prompt_tokens, wants_output)

    def ask(
        self, request_id: str, start: int, end: int, blocks: Callable[[], list[int]]
    ) -> dict[tuple[str, str], Span]:
        """The spans to sum after a step that runs tokens `start..end` of the request.

        Whenever the prompt's last token runs the prompt is summed, also a second time: after a
        preemption, or after a load of KV that failed, whose step ran on what was not there.
        """
        request = self._requests.get(request_id)
        if request is None or request.finished or end < request.prompt_tokens:
            return {}
        spans = {}
        if start < request.prompt_tokens:
            spans[request_id, "prompt_counts"] = Span(blocks(), 0, request.prompt_tokens)
        if request.wants_output and end > request.prompt_tokens:
            spans[request_id, "output_counts"] = Span(blocks(), request.prompt_tokens, end)
        return spans

    def finish(self, request_id: str) -> dict[str, str] | None:
        """The reply's counts: an object that `fill` may complete before it is serialised."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finished = True
        return request.counts

    def fill(self, sums: Sums, tokens: dict[tuple[str, str], int]) -> None:
        """Take the worker's sums; `tokens` has each span's length. Drop what is finished."""
        for key, flat in sums.items():
            request = self._requests.get(key[0])
            if request is not None:
                *cells, covered = flat
                rows = [
                    cells[at : at + self._experts] for at in range(0, len(cells), self._experts)
                ]
                request.counts[key[1]] = encode(Counts(rows, self._top_k, covered, tokens[key]))
        for request_id in [r for r, request in self._requests.items() if request.finished]:
            del self._requests[request_id]
