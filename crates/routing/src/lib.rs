//! Who serves a request: prefill and decode policies.
