//! Arrivals, prompts and latency summaries, shared by demo, bench and simulator.
