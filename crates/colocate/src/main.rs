//! The command line of Colocate.
fn main() {}
