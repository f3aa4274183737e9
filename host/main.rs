//! `vca`
fn main() {}
