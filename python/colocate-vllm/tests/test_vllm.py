"""Against a real vLLM on CPU; skipped where there is none.

COLOCATE_VLLM_MODEL names the model directory, the demo model by default; COLOCATE_VLLM_TP
the tensor-parallel size, 1 by default.
"""

import os
from pathlib import Path

import pytest

pytest.importorskip("vllm")
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    UCX_TLS="tcp,self,sm",
    VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1",
)
MODEL = os.environ.get(
    "COLOCATE_VLLM_MODEL", str(Path(__file__).resolve().parents[3] / "models" / "demo")
)
BLOCKS = 12  # of 128 tokens: small, so that blocks are evicted and requests preempted


def start(**over):
    from vllm import LLM

    options = dict(
        model=MODEL,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=BLOCKS,
        enforce_eager=True,
        tensor_parallel_size=int(os.environ.get("COLOCATE_VLLM_TP", "1")),
        kv_transfer_config={
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "colocate_vllm",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
        },
    )
    return LLM(**(options | over))


@pytest.fixture(scope="module")
def llm():
    return start()


def run(llm, prompts, max_tokens=1):
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"colocate": {"want": ["output_counts"]}}},
    )
    outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [(o.kv_transfer_params["colocate"], list(o.outputs[0].token_ids)) for o in outs]


def prompt(seed, n):
    return [(seed * 7919 + i * i * 31 + i) % 1000 + 10 for i in range(n)]


def cold(llm, tokens):
    llm.reset_prefix_cache()
    return run(llm, [tokens])[0][0]["prompt_counts"]


def total(text):
    from colocate_vllm.wire import decode

    counts = decode(text)
    assert counts.covered == counts.tokens
    return counts


def agree(got, want):
    """The same counts, whatever the steps, the blocks and the company they came from."""
    assert total(got).rows == total(want).rows


@pytest.mark.parametrize("n", [1, 5, 127, 128, 129, 300, 700])
def test_full_coverage_and_hits_equal_cold(llm, n):
    tokens = prompt(n, n)
    first = cold(llm, tokens)
    assert total(first).tokens == n
    agree(run(llm, [tokens])[0][0]["prompt_counts"], first)  # a prefix hit


def test_partial_hit(llm):
    base = prompt(3, 300)
    tokens = base[:200] + prompt(4, 150)
    want = cold(llm, tokens)
    llm.reset_prefix_cache()
    run(llm, [base])
    agree(run(llm, [tokens])[0][0]["prompt_counts"], want)


def test_together_evicted_and_preempted(llm):
    prompts = [prompt(s, 250 + 40 * s) for s in range(6)]
    want = [cold(llm, p) for p in prompts]
    for (got, _), w in zip(run(llm, prompts, max_tokens=150), want, strict=True):
        agree(got["prompt_counts"], w)


def test_output_counts_are_those_of_the_outputs_prefilled(llm):
    tokens = prompt(9, 100)
    llm.reset_prefix_cache()
    [(got, out)] = run(llm, [tokens], max_tokens=20)
    whole = cold(llm, tokens + out[:-1])  # the last token is never run
    a, b, w = total(got["prompt_counts"]), total(got["output_counts"]), total(whole)
    assert a.tokens + b.tokens == w.tokens
    both = [[x + y for x, y in zip(p, q, strict=True)] for p, q in zip(a.rows, b.rows, strict=True)]
    assert both == w.rows
