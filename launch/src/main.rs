//! zlaunch
fn main() {}
