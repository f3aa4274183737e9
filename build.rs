//! Build facts that `vca doctor` shows.
fn main() {}
