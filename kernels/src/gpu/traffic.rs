//! How many bytes does a kernel move? Counted from tiles, for pages and tests: the emulator counts the same accesses one by one.

/// Bytes that one kernel moves between device memory and its compute units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Read, what several blocks read counted for each: all but the first time mostly from the L2 cache.
    pub read_bytes: u64,
    /// Written.
    pub write_bytes: u64,
    /// Read or written at least once: what device memory itself moves where the L2 cache holds the rest.
    pub once_bytes: u64,
    /// Blocks that have work.
    pub blocks: u64,
}
