//! Would the tests notice a mistake? Each mutation changes one place of a kernel, of a header, or of the emulator's view of a
//! machine: a barrier less, a wrong lane, a bound less, another order of additions. At least one case, in one of three orders of
//! threads, must fail; a mutation whose text is gone fails here too, so that the list follows the sources.

use zrt_simt::cases::check;
use zrt_simt::testing::can_run;
use zrt_simt::{Mutation, Order, SimtDevice, SimtOptions};

/// (file, text, instead, cases that contain this, machine)
type Mutant = (&'static str, &'static str, &'static str, &'static str, &'static str);

const MUTANTS: &[Mutant] = &[
    // Barriers.
    ("rmsnorm.cu", "if constexpr (THREADS != WARP) barrier();", "", "bf16, a block", "sm_90"),
    ("compat.h", "    barrier();\n    float total", "    float total", "bf16, a block", "gfx942"),
    ("sum_squares.cu", "        barrier();\n        Ptr<float> swap", "        Ptr<float> swap", "sum_squares", "sm_90"),
    ("embedding.cu", "before = p.heads[id];\n        barrier();", "before = p.heads[id];", "embedding f32", "sm_90"),
    ("column_sum.cu", "    barrier();\n", "", "bf16, a block", "gfx942"),
    ("gemm.cu", "copy_wait<STAGES - 2>();\n            barrier();", "copy_wait<STAGES - 2>();", "linear bf16", "sm_90"),
    ("lora.cu", "publish_p(s);\n        barrier();", "publish_p(s);", "lora bf16", "gfx942"),
    ("attention.cu", "fetch.finish(tv);\n        barrier();", "fetch.finish(tv);", "attention bf16, 64", "sm_90"),
    // Lanes.
    ("gemm.cu", "n0 = warp_id() % WARPS_N * WN;\n#pragma", "n0 = warp_id() / 2 % WARPS_N * WN;\n#pragma", "linear f32", "sm_90"),
    (
        "compat.h",
        "for (int mask = WARP / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);",
        "for (int mask = WARP / 4; mask > 0; mask /= 2) v += shuffle_xor(v, mask);",
        "f32, a warp",
        "sm_90",
    ),
    ("sum_squares.cu", "k * WARP + lane_id()", "k + lane_id() * HELD", "sum_squares", "gfx942"),
    // Bounds.
    ("rmsnorm.cu", "if (row >= p.rows) return;", "", "f32, a warp", "sm_90"),
    ("column_sum.cu", "if (slice > 0 || col >= p.cols) return;", "if (slice > 0) return;", "bf16, a block", "sm_90"),
    ("elementwise.cuh", "if (pieces * N + me < elems)", "if (me < N)", "elements f32", "gfx942"),
    ("rope.cu", "(int)min_of<i64>(p.tokens_per_block, p.tokens - first)", "p.tokens_per_block", "rope bf16", "sm_90"),
    // Orders, signs, roundings.
    ("rope.cu", "y * cos.v[j] + x * s", "y * cos.v[j] - x * s", "rope f32", "sm_90"),
    ("adamw.cu", "add_rn(mul_rn(beta1, pm.v[i]), mul_rn(rest1, gi))", "fma_rn(beta1, pm.v[i], mul_rn(rest1, gi))", "adamw f32", "sm_90"),
    ("sum_squares.cu", "hi = hi / 2;", "hi = (hi + 1) / 2;", "sum_squares", "sm_90"),
    ("embedding.cu", "p.first[before] = 0;", ";", "embedding bf16", "sm_90"),
    ("compat.h", "((u >> 16) & 1u)", "1u", "elements f32", "sm_90"),
];

#[test]
fn every_mutation_is_caught() {
    if !can_run() {
        return;
    }
    let mut missed = vec![];
    for &(file, from, to, only, arch) in MUTANTS {
        let mutations = vec![Mutation { file, from: from.into(), to: to.into() }];
        let run = |order| {
            let options = SimtOptions { arch, order, exact: true, mutations: mutations.clone(), ..Default::default() };
            let device = SimtDevice::new(options).unwrap_or_else(|e| panic!("{e}"));
            check(&device, only).err()
        };
        let found = [Order::Forward, Order::Reverse, Order::Random(1)].into_iter().find_map(run);
        match found {
            Some(why) if why.contains("g++") || why.contains("clang") => panic!("{file}: `{to}` does not compile: {why}"),
            Some(why) => println!("{file}: `{to}`: {why}"),
            None => missed.push(format!("{file}: `{from}` -> `{to}`")),
        }
    }
    assert!(missed.is_empty(), "not caught:\n{}", missed.join("\n"));
}
