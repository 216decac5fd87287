//! The shared vocabulary: model shapes, expert counts, routed experts, their wire and file forms.
