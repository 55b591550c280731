//! How fast are products? GFLOP/s of forward, dgrad and wgrad of linear layers, beside the multiply-add rate that this processor
//! reaches without memory.
//!
//! `matmul_rate` prints a table for the shapes of SmolLM2-135M and of small models on one thread, for every instruction set;
//! `matmul_rate ISA` for one of them. `matmul_rate ISA THREADS TYPE N O I` prints one line, which benches/compare/matmul.py sets
//! beside PyTorch's: peak, forward, dgrad, wgrad. Run it as `cargo run --release -p zrt-kernels --example matmul_rate`.

use half::bf16;
use std::time::Instant;
use zrt_kernels::Write;
use zrt_kernels::cpu::float::{Float, FloatMut};
use zrt_kernels::cpu::matmul::{Operand, Product, matmul};
use zrt_kernels::cpu::pool::Pool;
use zrt_kernels::cpu::simd::{Isa, simd_fn};

simd_fn! {
    /// 12 independent chains of multiply-adds, `rounds` long.
    fn chains[S](s: S, rounds: usize) -> f32 {
        let (x, y) = (s.splat(std::hint::black_box(0.999)), s.splat(std::hint::black_box(1e-3)));
        let mut acc = [s.splat(1.0); 12];
        for _ in 0..rounds {
            let mut i = 0;
            while i < 12 {
                acc[i] = s.fma(acc[i], x, y);
                i += 1;
            }
        }
        let mut total = 0.0;
        for v in acc {
            total += s.reduce_add(v);
        }
        total
    }
}

simd_fn! {
    fn lanes[S](s: S) -> usize {
        let _ = s;
        S::LANES
    }
}

/// Seconds of the fastest of several runs.
fn fastest(runs: usize, mut f: impl FnMut()) -> f64 {
    (0..runs).fold(f64::INFINITY, |best, _| {
        let start = Instant::now();
        f();
        best.min(start.elapsed().as_secs_f64())
    })
}

/// GFLOP/s of f32 multiply-adds in registers, of all threads together.
fn peak_gflops(pool: &Pool) -> f64 {
    let (rounds, threads) = (200_000, pool.threads());
    let secs = fastest(60, || {
        pool.for_each(threads, |_| {
            std::hint::black_box(chains(pool.isa(), std::hint::black_box(rounds)));
        });
    });
    (threads * rounds * 12 * lanes(pool.isa()) * 2) as f64 / secs / 1e9
}

/// GFLOP/s of `y = x W^T`, `dx = dy W` and `dw = dy^T x` for `n` tokens, `o` outputs and `i` inputs.
fn rates(pool: &Pool, half: bool, n: usize, o: usize, i: usize) -> [f64; 3] {
    let fill = |elems: usize| -> Vec<f32> { (0..elems).map(|e| ((e * 37 % 101) as f32 - 50.0) * 0.01).collect() };
    // Only what is used is kept: a large layer's weight is a gigabyte.
    let both = |elems: usize| -> (Vec<f32>, Vec<bf16>) {
        let full = fill(elems);
        if half { (Vec::new(), full.iter().map(|v| bf16::from_f32(*v)).collect()) } else { (full, Vec::new()) }
    };
    fn pick<'a>(half: bool, v: &'a (Vec<f32>, Vec<bf16>)) -> Float<'a> {
        if half { Float::Bf16(&v.1) } else { Float::F32(&v.0) }
    }
    fn pick_mut<'a>(half: bool, v: &'a mut (Vec<f32>, Vec<bf16>)) -> FloatMut<'a> {
        if half { FloatMut::Bf16(&mut v.1) } else { FloatMut::F32(&mut v.0) }
    }
    let (x, w, dy) = (both(n * i), both(o * i), both(n * o));
    let (mut y, mut dx, mut dw) = (both(n * o), both(n * i), vec![0.0f32; o * i]);
    let (x, w, dy) = (pick(half, &x), pick(half, &w), pick(half, &dy));
    let product = |m, n, k| Product { m, n, k, alpha: 1.0, bias: None, write: Write::Set };
    let flops = 2.0 * (n * o * i) as f64;
    let runs = ((3e10 * pool.threads() as f64 / flops) as usize).clamp(2, 1000);
    let secs = [
        fastest(runs, || matmul(pool, pick_mut(half, &mut y), o, Operand::k_inner(x, i), Operand::k_inner(w, i), product(n, o, i))),
        fastest(runs, || matmul(pool, pick_mut(half, &mut dx), i, Operand::k_inner(dy, o), Operand::k_outer(w, i), product(n, i, o))),
        fastest(runs, || matmul(pool, FloatMut::F32(&mut dw), i, Operand::k_outer(dy, o), Operand::k_outer(x, i), product(o, i, n))),
    ];
    secs.map(|s| flops / s / 1e9)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for note in Isa::notes() {
        eprintln!("note: {note}");
    }
    let args: Vec<String> = std::env::args().skip(1).collect();
    let sets: Vec<Isa> = Isa::available().into_iter().filter(|isa| args.first().is_none_or(|o| o == isa.name() || o == "best")).collect();
    if let [_, threads, kind, n, o, i] = &args[..] {
        let isa = *sets.last().ok_or("no such instruction set here")?;
        let pool = Pool::with_isa(threads.parse()?, isa)?;
        let peak = peak_gflops(&pool);
        let [y, dx, dw] = rates(&pool, kind == "bf16", n.parse()?, o.parse()?, i.parse()?);
        println!("{peak:.1} {y:.1} {dx:.1} {dw:.1}");
        return Ok(());
    }
    let shapes = [
        ("qo", 1024, 576, 576),
        ("kv", 1024, 192, 576),
        ("gate/up", 1024, 1536, 576),
        ("down", 1024, 576, 1536),
        ("head", 256, 49152, 576),
        ("lora t", 1024, 16, 576),
        ("lora y", 1024, 576, 16),
        ("tiny", 128, 64, 64),
        ("tiny mlp", 128, 176, 64),
    ];
    for isa in sets {
        let pool = Pool::with_isa(1, isa)?;
        let peak = peak_gflops(&pool);
        println!("\n{}: peak {peak:.1} GFLOP/s of one thread", isa.name());
        print!("{:<10} {:>5} {:>6} {:>5}  ", "shape", "N", "O", "I");
        for what in ["y f32", "dx f32", "dw f32", "y bf16", "dx bf16", "dw bf16"] {
            print!(" {what:>14}");
        }
        println!();
        for (name, n, o, i) in shapes {
            print!("{name:<10} {n:>5} {o:>6} {i:>5}  ");
            for rate in [false, true].into_iter().flat_map(|half| rates(&pool, half, n, o, i)) {
                print!(" {rate:>8.1} {:>4.0}%", 100.0 * rate / peak);
            }
            println!();
        }
    }
    Ok(())
}
