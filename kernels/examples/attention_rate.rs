//! How fast is attention on this machine? Prints the rate of forward and backward on one thread against the peak of fused
//! multiply-adds, counting the products of visible (query, key) pairs only: 4 D FLOPs a pair forward, 10 D backward.
//!
//!     cargo run --release -p zrt-kernels --example attention_rate -- [threads]

use half::bf16;
use std::hint::black_box;
use std::time::Instant;
use zrt_kernels::Attention;
use zrt_kernels::cpu::attention::{self, Backward, Forward};
use zrt_kernels::cpu::operand::{Operand, Raw};
use zrt_kernels::cpu::pool::Pool;
use zrt_kernels::cpu::simd::{Isa, simd_fn};

simd_fn! {
    /// Twelve independent chains of fused multiply-adds: what the units can do.
    fn chains[S](s: S, rounds: usize) -> f32 {
        let (a, b) = (s.splat(black_box(0.999)), s.splat(black_box(1e-3)));
        let mut x = [s.splat(1.0); 12];
        for _ in 0..rounds {
            for x in x.iter_mut() {
                *x = s.fma(*x, a, b);
            }
        }
        let mut sum = 0.0;
        for x in x {
            sum += s.reduce_add(x);
        }
        sum
    }
}

simd_fn! { fn lanes[S](_s: S) -> usize { S::LANES } }

/// Least seconds of many short runs, for two thirds of a second: some of them have the machine for themselves.
fn best(mut f: impl FnMut()) -> f64 {
    let begin = Instant::now();
    let mut least = f64::MAX;
    while begin.elapsed().as_secs_f64() < 0.67 {
        let start = Instant::now();
        f();
        least = least.min(start.elapsed().as_secs_f64());
    }
    least
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(1), |t| t.parse())?;
    let pool = Pool::new(threads)?;
    let isa = Isa::detect();
    let rounds = 200_000;
    let peak = (12 * 2 * rounds * lanes(isa)) as f64 / best(|| assert!(black_box(chains(isa, rounds)) > 0.0)) * threads as f64;
    println!("{} x {threads}, peak {:.1} GFLOP/s", isa.name(), peak / 1e9);
    for (heads, kv_heads, d, n, documents) in [(9, 3, 64, 512, 2), (32, 8, 128, 512, 1), (9, 3, 64, 4096, 1), (4, 4, 64, 512, 1)] {
        let tokens = n * documents;
        let shape = Attention { heads, kv_heads, head_dim: d, window: None, scale: 1.0 / (d as f32).sqrt() };
        let bounds: Vec<i32> = (0..=tokens).map(|i| (i.min(documents) * n) as i32).collect();
        let make = |elems: usize| (0..elems).map(|i| bf16::from_f32(((i * 37 % 101) as f32 - 50.0) / 40.0)).collect::<Vec<_>>();
        let (mut q, mut k, mut v, mut g) =
            (make(tokens * heads * d), make(tokens * kv_heads * d), make(tokens * kv_heads * d), make(tokens * heads * d));
        let (mut o, mut dq, mut dk, mut dv) = (q.clone(), q.clone(), k.clone(), k.clone());
        let (mut lse, mut work) = (vec![0f32; tokens * heads], vec![0f32; attention::workspace_elems(tokens, shape)]);
        let bf = |x: &mut Vec<bf16>| Operand::Bf16(Raw::new(x));
        let (o, lse, q, k, v) = (bf(&mut o), Raw::new(&mut lse), bf(&mut q), bf(&mut k), bf(&mut v));
        let (dq, dk, dv, dout) = (bf(&mut dq), bf(&mut dk), bf(&mut dv), bf(&mut g));
        let forward =
            best(|| attention::forward(&pool, Forward { o, lse, q, k, v }, &bounds, documents, tokens, shape).expect("boundaries"));
        let t = Backward { dq, dk, dv, dout, q, k, v, o, lse, work: Raw::new(&mut work) };
        let backward = best(|| attention::backward(&pool, t, &bounds, documents, tokens, shape).expect("boundaries"));
        let pairs = (documents * heads * n * (n + 1) / 2 * d) as f64;
        for (name, secs, flops) in [("forward", forward, 4.0 * pairs), ("backward", backward, 10.0 * pairs)] {
            let rate = flops / secs;
            println!(
                "H {heads} K {kv_heads} D {d} N {documents} x {n} {name:8} {:7.2} ms {:6.1} GFLOP/s {:4.0} % of peak",
                secs * 1e3,
                rate / 1e9,
                100.0 * rate / peak
            );
        }
    }
    Ok(())
}
