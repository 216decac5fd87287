import torch

from colocate_vllm.capture import SlotTable, Span
from colocate_vllm.ledger import Ledger
from colocate_vllm.wire import decode


def table(**over):
    sizes = dict(slots=16, block_size=4, layers=2, experts=8, top_k=2, max_tokens=8)
    return SlotTable(**(sizes | over))


def ids(tokens):
    """A token's experts depend on the token and the layer alone."""
    return [torch.tensor([[(t + la) % 8, (t * 3 + la + 1) % 8] for t in tokens]) for la in range(2)]


def step(t, tokens, slots):
    for layer, topk in enumerate(ids(tokens)):
        t.capture(layer, topk)
    t.commit(torch.tensor(slots))


def cold(n):
    t = table()
    step(t, list(range(n)), list(range(n)))
    return t.sum(Span([0, 1, 2, 3], 0, n)).tolist()


def test_chunks_any_blocks_padding_and_rewrites_equal_a_cold_prefill():
    t = table()
    blocks = [3, 1]
    slot = [12, 13, 14, 15, 4, 5]
    step(t, [9, 9, 9, 9], [4, 5, 6, 7])  # what held block 1 before
    step(t, [0, 1, 2, 7], [*slot[:3], -1])  # a chunk and padding
    step(t, [3, 4, 5], slot[3:])
    step(t, [2, 3], slot[2:4])  # recomputation
    assert t.sum(Span(blocks, 0, 6)).tolist() == cold(6)


def test_two_requests_in_one_step_do_not_mix():
    t = table()
    step(t, [0, 1, 0, 1, 2], [0, 1, 8, 9, 10])
    assert t.sum(Span([0], 0, 2)).tolist() == cold(2)
    assert t.sum(Span([2], 0, 3)).tolist() == cold(3)


def test_kv_from_elsewhere_lowers_coverage_alone():
    t = table()
    step(t, [9] * 4, [0, 1, 2, 3])
    t.forget(Span([0], 0, 4))
    step(t, [4, 5], [4, 5])
    got = t.sum(Span([0, 1], 0, 6)).tolist()
    assert got[-1] == 2 and sum(got[:-1]) == 2 * 2 * 2


def test_copied_blocks_carry_their_ids():
    t = table()
    step(t, [0, 1, 2], [0, 1, 2])
    t.copy_block(0, 2)
    assert t.sum(Span([2], 0, 3)).tolist() == cold(3)


def test_hooks_chain_and_cut_shared_experts():
    seen = []
    t = table()
    hook = t.hook(0, seen.append)
    hook(torch.tensor([[1, 2, 8]]))  # a fused shared expert comes after the routed ones
    assert len(seen) == 1 and t._step[0, 0].tolist() == [1, 2]


def test_a_reply_is_filled_after_the_request_finished():
    ledger = Ledger(experts=8, top_k=2)
    ledger.add("a", 6, {"do_remote_decode": True})
    ledger.add("plain", 6, None)
    assert ledger.ask("a", 0, 4, list) == {}
    spans = ledger.ask("a", 4, 6, lambda: [0, 1])
    assert spans == {("a", "prompt_counts"): Span([0, 1], 0, 6)}
    reply = ledger.finish("a")
    assert reply == {} and ledger.finish("plain") is None
    ledger.fill({("a", "prompt_counts"): cold(6)}, {("a", "prompt_counts"): 6})
    counts = decode(reply["prompt_counts"])
    assert (counts.covered, counts.tokens, counts.top_k) == (6, 6, 2)
    assert [c for row in counts.rows for c in row] == cold(6)[:-1]
    assert ledger._requests == {}


def test_output_counts_are_asked_apart():
    ledger = Ledger(experts=8, top_k=2)
    ledger.add("a", 2, {"colocate": {"want": ["output_counts"]}})
    assert list(ledger.ask("a", 0, 2, lambda: [0])) == [("a", "prompt_counts")]
    assert ledger.ask("a", 2, 4, lambda: [0]) == {("a", "output_counts"): Span([0], 2, 4)}


def test_tokens_that_run_again_are_summed_again():
    """After a load of KV that failed, the first sums are those of a step that ran without it."""
    ledger = Ledger(experts=8, top_k=2)
    ledger.add("a", 6, {"do_remote_decode": True})
    key = ("a", "prompt_counts")
    assert list(ledger.ask("a", 5, 6, lambda: [0, 1])) == [key]
    t = table()
    step(t, [5], [5])
    ledger.fill({key: t.sum(Span([0, 1], 0, 6)).tolist()}, {key: 6})
    assert list(ledger.ask("a", 0, 6, lambda: [0, 1])) == [key]
    reply = ledger.finish("a")
    ledger.fill({key: cold(6)}, {key: 6})
    assert decode(reply["prompt_counts"]).covered == 6
