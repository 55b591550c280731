//! One unit of work as the simulated device sees it: which operation, on what sizes, touching how many bytes of which memory.
//! Whoever knows a machine turns it into seconds; here is no machine.

use crate::{DType, Place, View};

macro_rules! kinds {
    ($($variant:ident $name:literal),* $(,)?) => {
        /// What a unit of work is: an operation of [`crate::Ops`], a call of [`crate::Stream`], or a collective.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        #[allow(missing_docs)]
        pub enum Kind { $($variant),* }

        impl Kind {
            /// All kinds, in order.
            pub const ALL: &'static [Kind] = &[$(Kind::$variant),*];

            /// Name as in `Ops`, `Stream` or `Communicator`.
            pub const fn name(self) -> &'static str {
                match self { $(Kind::$variant => $name),* }
            }
        }
    };
}

kinds! {
    Embedding "embedding", EmbeddingBackward "embedding_backward", RmsNorm "rmsnorm", RmsNormBackward "rmsnorm_backward",
    Linear "linear", LinearBackward "linear_backward", Lora "lora", LoraBackward "lora_backward", Rope "rope",
    RopeBackward "rope_backward", Attention "attention", AttentionBackward "attention_backward", Swiglu "swiglu",
    SwigluBackward "swiglu_backward", LinearCrossEntropy "linear_cross_entropy", Sum "sum", Add "add", AddInto "add_into",
    Scale "scale", Cast "cast", CountNonfinite "count_nonfinite", SumSquares "sum_squares", ClipScale "clip_scale", AdamW "adamw",
    Copy "copy", Fill "fill", Write "write", Read "read", Host "host",
    AllGather "all_gather", ReduceScatter "reduce_scatter", AllReduce "all_reduce", AllToAll "all_to_all", Broadcast "broadcast",
    Barrier "barrier",
}

impl Kind {
    /// A collective over ranks.
    pub const fn is_collective(self) -> bool {
        self as u8 >= Kind::AllGather as u8
    }

    /// An operation of [`crate::Ops`].
    pub const fn is_op(self) -> bool {
        (self as u8) < Kind::Copy as u8
    }
}

/// Which products of a linear layer a call computes, as bits.
pub mod forms {
    /// `y = x W^T`.
    pub const FORWARD: u8 = 1;
    /// `dx = dy W`.
    pub const DX: u8 = 2;
    /// `dW = dy^T x`.
    pub const DW: u8 = 4;
}

/// A unit of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    /// What.
    pub kind: Kind,
    /// Storage type of the main operand.
    pub dtype: DType,
    /// Products computed ([`forms`]); 0 where there are none.
    pub forms: u8,
    /// Some bytes come from host memory and others from the device's: they cross the link.
    pub crosses: bool,
    /// Tokens, outputs, inputs of the products; (tokens, heads x head_dim, sequence) of attention; else 0.
    pub dims: [u32; 3],
    /// Floating-point operations.
    pub flops: u64,
    /// Bytes of operands in device memory, each read and written once. Collectives: bytes of the longer operand.
    pub bytes: u64,
    /// The same in host memory.
    pub host_bytes: u64,
}

impl Work {
    /// `bytes` moved, in the memory where `at` lies.
    pub(crate) fn moving(kind: Kind, at: &View, flops: u64, bytes: usize) -> Work {
        let mut work = Work { kind, dtype: at.dtype(), forms: 0, crosses: false, dims: [0; 3], flops, bytes: bytes as u64, host_bytes: 0 };
        if at.place() != Place::Device {
            (work.bytes, work.host_bytes) = (0, work.bytes);
        }
        work
    }

    /// As [`Work::moving`], with `other_bytes` of `bytes` belonging to `other`, which may lie elsewhere.
    pub(crate) fn between(kind: Kind, at: &View, flops: u64, bytes: usize, other: &View, other_bytes: usize) -> Work {
        let mut work = Work::moving(kind, at, flops, bytes - other_bytes);
        if other.place() == Place::Device {
            work.bytes += other_bytes as u64
        } else {
            work.host_bytes += other_bytes as u64
        }
        work.crosses = (at.place() == Place::Device) != (other.place() == Place::Device);
        work
    }

    /// Adds the sizes of products.
    pub(crate) fn products(self, forms: u8, dims: [usize; 3]) -> Work {
        Work { forms, dims: dims.map(|d| u32::try_from(d).unwrap_or(u32::MAX)), ..self }
    }
}
