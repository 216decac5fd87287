//! What goes over the wire: OpenAI shapes, the handoff dialect, server-sent events, errors.
