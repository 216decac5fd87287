//! The embedded engine: checkpoint, model, paged KV cache, scheduler, sampler.
