//! The router behind HTTP: registry, health, handoff, streaming, metrics.
