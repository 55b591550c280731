//! Which element types exist in buffers, and how wide they are.

/// Element type of a [`crate::View`]. Computation always accumulates in `f32`; these are storage types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: the upper half of an `f32`, rounded to nearest even.
    BF16,
    /// 32-bit signed integers: token ids, labels, positions, document boundaries.
    I32,
    /// Raw bytes.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::BF16 => 2,
            DType::U8 => 1,
        }
    }

    /// Short lower-case name, as configurations and messages print it.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
            DType::U8 => "u8",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
