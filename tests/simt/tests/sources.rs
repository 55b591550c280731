//! Rules of the sources: only compat.h may know the machine, and nothing else may know how many lanes a warp has.

use zrt_kernels::gpu::table::SOURCES;

/// Lines of code, without comments, of all files but the one that may know the machine.
fn code() -> impl Iterator<Item = (&'static str, usize, String)> {
    SOURCES.iter().filter(|(file, _)| *file != "compat.h").flat_map(|(file, text)| {
        text.lines().enumerate().map(|(i, line)| (*file, i + 1, line.split("//").next().unwrap_or_default().to_string()))
    })
}

#[test]
fn only_compat_h_knows_a_vendor() {
    let words = [
        "__CUDA",
        "__HIP",
        "__gfx",
        "GPU_EMU",
        "GPU_WARP",
        "ZRT_M",
        "asm",
        "__builtin_amdgcn",
        "threadIdx",
        "blockIdx",
        "__syncthreads",
        "__shfl",
        "__shared__",
        "nvcuda",
        "uint4",
    ];
    for (file, line, text) in code() {
        for word in words {
            assert!(!text.contains(word), "{file}:{line}: `{word}` belongs into compat.h: {text}");
        }
        let conditional = text.trim_start().starts_with("#if") && !text.contains("#ifndef ZRT_");
        assert!(!conditional, "{file}:{line}: a condition on the machine belongs into compat.h: {text}");
    }
}

#[test]
fn the_lanes_of_a_warp_are_never_a_number() {
    // How lanes are counted: a remainder or a part of a thread's number, a mask, a shuffle.
    let looks_like_lanes = |text: &str| {
        let mut tight: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        for number in ["i32", "u32", "f32", "i64", "u64"] {
            tight = tight.replace(number, "");
        }
        let patterns = [
            "%32",
            "/32",
            "&31",
            ">>5",
            "<<5",
            "0xffffffff,",
            "mask=16",
            "mask=32",
            "lane<32",
            "%64==lane",
            "thread_id()%64",
            "thread_id()/64",
        ];
        patterns.iter().any(|p| tight.contains(p)) || ["32", "64"].iter().any(|n| tight.contains("lane_id()") && tight.contains(n))
    };
    for (file, line, text) in code() {
        assert!(!looks_like_lanes(&text), "{file}:{line}: write WARP: {text}");
    }
}
