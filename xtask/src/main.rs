//! Project tasks in place of shell scripts.
fn main() {}
