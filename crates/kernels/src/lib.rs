//! CPU kernels: bf16 matrix products, RMSNorm, RoPE, attention, top-k.
