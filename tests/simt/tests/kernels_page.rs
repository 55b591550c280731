//! Is docs/kernels.md what its command makes now?

use zrt_simt::page;

#[test]
fn the_page_is_up_to_date() {
    let made = page::render().unwrap_or_else(|e| panic!("{e}"));
    let have = std::fs::read_to_string(page::path()).unwrap_or_default();
    let differ = have.lines().zip(made.lines()).find(|(a, b)| a != b);
    assert!(
        have == made,
        "docs/kernels.md is not up to date; run `cargo run --release -p zrt-simt --bin kernels_page`\nfirst difference: {differ:#?}"
    );
}
