//! The engine behind HTTP, and the transfer of KV blocks between workers.
