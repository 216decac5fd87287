"""Worker side: the top-k expert ids of every KV slot."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True)
class Span:
    """Tokens `start..end` of a request whose KV lies in `blocks` (from token 0)."""

    blocks: list[int]
    start: int
    end: int


class SlotTable:
    """Expert ids `[slots, layers, top_k]`, indexed and reused as the KV slots are.

    Ids are written, never added: recomputation after a preemption or in a shared block changes
    nothing. All tensors are allocated once, so that CUDA graphs may record the writes.
    """

    def __init__(
        self,
        *,
        slots: int,
        block_size: int,
        layers: int,
        experts: int,
        top_k: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate for `slots` KV slots and steps of at most `max_tokens` tokens."""
        self.block_size, self.experts, self.top_k, self.layers = block_size, experts, top_k, layers
        dtype = torch.uint8 if experts <= 256 else torch.int16
        # One row more than slots: padding tokens have slot -1 and write there.
        self.ids = torch.zeros((slots + 1, layers, top_k), dtype=dtype, device=device)
        self.known = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        self._step = torch.zeros((max_tokens, layers, top_k), dtype=dtype, device=device)

    def capture(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Keep one layer's ids of this step's tokens."""
        self._step[: topk_ids.shape[0], layer] = topk_ids[:, : self.top_k].to(self._step.dtype)

    def hook(
        self, layer: int, before: Callable[[torch.Tensor], None] | None
    ) -> Callable[[torch.Tensor], None]:
        """A router's capture callback for `layer` that first calls the one it displaces."""
        capture = partial(self.capture, layer)
        if before is None:
            return capture

        def both(topk_ids: torch.Tensor) -> None:
            before(topk_ids)
            capture(topk_ids)

        return both

    def commit(self, slot_mapping: torch.Tensor) -> None:
        """Move this step's ids to their slots; negative slots are padding."""
        slots = slot_mapping.long()
        self.ids[slots] = self._step[: slots.shape[0]]
        self.known[slots] = True

    def _slots(self, span: Span) -> torch.Tensor:
        at = torch.arange(span.start, span.end)
        blocks = torch.tensor(span.blocks, dtype=torch.long)
        slots = blocks[at // self.block_size] * self.block_size + at % self.block_size
        return slots.to(self.ids.device, non_blocking=True)

    def forget(self, span: Span) -> None:
        """KV from elsewhere fills these slots: their ids are not known."""
        self.known[self._slots(span)] = False

    def copy_block(self, source: int, target: int) -> None:
        """The engine copied a KV block: copy its ids."""
        size = self.block_size
        old, new = (
            slice(source * size, (source + 1) * size),
            slice(target * size, (target + 1) * size),
        )
        self.ids[new], self.known[new] = self.ids[old], self.known[old]

    def sum(self, span: Span) -> torch.Tensor:
        """Counts `layers x experts` and, last, the tokens they cover; on the table's device."""
        slots = self._slots(span)
        known = self.known[slots].to(torch.int32)
        offsets = torch.arange(self.layers, device=slots.device) * self.experts
        cells = (self.ids[slots].long() + offsets[:, None]).reshape(-1)
        out = torch.zeros(self.layers * self.experts + 1, dtype=torch.int32, device=slots.device)
        out.scatter_add_(0, cells, known.repeat_interleave(self.layers * self.top_k))
        out[-1] = known.sum()
        return out
