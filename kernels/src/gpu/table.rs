//! Which kernels are there? Every entry point with its file and the bytes of its parameters, and the text of every file: what is
//! compiled at run time on a GPU, what the emulator compiles in tests, and what the compile gates compare binaries with.

use super::launch::Kernel;
use super::*;

/// Files of `kernels/gpu`, as text. Headers are included by name.
pub const SOURCES: &[(&str, &str)] = &[
    ("compat.h", include_str!("../../gpu/compat.h")),
    ("elementwise.cuh", include_str!("../../gpu/elementwise.cuh")),
    ("rows.cuh", include_str!("../../gpu/rows.cuh")),
    ("philox.cuh", include_str!("../../gpu/philox.cuh")),
    ("split.cuh", include_str!("../../gpu/split.cuh")),
    ("tile.cuh", include_str!("../../gpu/tile.cuh")),
    ("adamw.cu", include_str!("../../gpu/adamw.cu")),
    ("attention.cuh", include_str!("../../gpu/attention.cuh")),
    ("attention.cu", include_str!("../../gpu/attention.cu")),
    ("attention_backward.cu", include_str!("../../gpu/attention_backward.cu")),
    ("column_sum.cu", include_str!("../../gpu/column_sum.cu")),
    ("cross_entropy.cu", include_str!("../../gpu/cross_entropy.cu")),
    ("elementwise.cu", include_str!("../../gpu/elementwise.cu")),
    ("embedding.cu", include_str!("../../gpu/embedding.cu")),
    ("gemm.cu", include_str!("../../gpu/gemm.cu")),
    ("lora.cuh", include_str!("../../gpu/lora.cuh")),
    ("lora.cu", include_str!("../../gpu/lora.cu")),
    ("lora_backward.cu", include_str!("../../gpu/lora_backward.cu")),
    ("rmsnorm.cu", include_str!("../../gpu/rmsnorm.cu")),
    ("rope.cu", include_str!("../../gpu/rope.cu")),
    ("sum_squares.cu", include_str!("../../gpu/sum_squares.cu")),
    ("swiglu.cu", include_str!("../../gpu/swiglu.cu")),
];

const LISTS: &[&[Kernel]] = &[
    adamw::KERNELS,
    attention::KERNELS,
    column_sum::KERNELS,
    cross_entropy::KERNELS,
    elementwise::KERNELS,
    embedding::KERNELS,
    linear::KERNELS,
    lora::KERNELS,
    norm_tree::KERNELS,
    rmsnorm::KERNELS,
    rope::KERNELS,
    swiglu::KERNELS,
];

/// All kernels.
pub fn kernels() -> impl Iterator<Item = &'static Kernel> {
    LISTS.iter().copied().flatten()
}

/// The kernel of this name.
pub fn kernel(name: &str) -> Option<&'static Kernel> {
    kernels().find(|k| k.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_every_kernel_is_in_its_source() {
        let mut seen = std::collections::HashSet::new();
        for k in kernels() {
            assert!(seen.insert(k.name), "{} twice", k.name);
            let text = SOURCES.iter().find(|(file, _)| *file == k.source).map(|(_, text)| *text).unwrap_or_default();
            assert!(text.contains(&format!("({},", k.name)), "{} is not in {}", k.name, k.source);
        }
        for (file, text) in SOURCES.iter().filter(|(file, _)| file.ends_with(".cu")) {
            let entries = text.lines().filter(|l| l.starts_with("KERNEL(") || l.starts_with("KERNEL_OCC(")).count();
            assert_eq!(entries, kernels().filter(|k| k.source == *file).count(), "entry points of {file}");
        }
    }
}
