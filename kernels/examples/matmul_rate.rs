//! Prints the rate of products at the shapes of SmolLM2-135M and of small models, as GFLOP/s and as a share of the
//! multiply-add rate that this processor reaches without memory: `cargo run --release -p zrt-kernels --example matmul_rate [avx2]`.

use half::bf16;
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

/// Seconds of processor time of this thread, which other programs on the machine hardly disturb.
fn thread_secs() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on Linux and `t` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// Seconds of the fastest of several runs.
fn fastest(runs: usize, mut f: impl FnMut()) -> f64 {
    (0..runs).fold(f64::INFINITY, |best, _| {
        let start = thread_secs();
        f();
        best.min(thread_secs() - start)
    })
}

fn peak_gflops(isa: Isa) -> f64 {
    let rounds = 200_000;
    let secs = fastest(100, || {
        std::hint::black_box(chains(isa, std::hint::black_box(rounds)));
    });
    (rounds * 12 * lanes(isa) * 2) as f64 / secs / 1e9
}

fn main() -> zrt_kernels::Result<()> {
    for note in Isa::notes() {
        println!("note: {note}");
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
    let only = std::env::args().nth(1);
    for isa in Isa::available().into_iter().filter(|isa| only.as_deref().is_none_or(|o| o == isa.name())) {
        let (pool, peak) = (Pool::with_isa(1, isa)?, peak_gflops(isa));
        println!(
            "\n{}: peak {peak:.1} GFLOP/s of one thread\n{:<10} {:>5} {:>6} {:>5}   {:>14} {:>14} {:>14} {:>14} {:>14} {:>14}",
            isa.name(),
            "shape",
            "N",
            "O",
            "I",
            "y f32",
            "dx f32",
            "dw f32",
            "y bf16",
            "dx bf16",
            "dw bf16"
        );
        for (name, n, o, i) in shapes {
            let fill = |elems: usize| -> Vec<f32> { (0..elems).map(|e| ((e * 37 % 101) as f32 - 50.0) * 0.01).collect() };
            let (x, w, dy) = (fill(n * i), fill(o * i), fill(n * o));
            let narrow = |v: &[f32]| -> Vec<bf16> { v.iter().map(|v| bf16::from_f32(*v)).collect() };
            let (xh, wh, dyh) = (narrow(&x), narrow(&w), narrow(&dy));
            let (mut y, mut dx, mut dw) = (vec![0.0f32; n * o], vec![0.0f32; n * i], vec![0.0f32; o * i]);
            let (mut yh, mut dxh) = (narrow(&y), narrow(&dx));
            let product = |m, n, k| Product { m, n, k, alpha: 1.0, bias: None, write: Write::Set };
            let flops = 2.0 * (n * o * i) as f64;
            let runs = ((1e10 / flops) as usize).clamp(3, 2000);
            print!("{name:<10} {n:>5} {o:>6} {i:>5}  ");
            for half in [false, true] {
                let (x, w, dy) = if half {
                    (Float::Bf16(&xh), Float::Bf16(&wh), Float::Bf16(&dyh))
                } else {
                    (Float::F32(&x), Float::F32(&w), Float::F32(&dy))
                };
                let secs = [
                    fastest(runs, || {
                        let y = if half { FloatMut::Bf16(&mut yh) } else { FloatMut::F32(&mut y) };
                        matmul(&pool, y, o, Operand::k_inner(x, i), Operand::k_inner(w, i), product(n, o, i));
                    }),
                    fastest(runs, || {
                        let dx = if half { FloatMut::Bf16(&mut dxh) } else { FloatMut::F32(&mut dx) };
                        matmul(&pool, dx, i, Operand::k_inner(dy, o), Operand::k_outer(w, i), product(n, i, o));
                    }),
                    fastest(runs, || {
                        matmul(&pool, FloatMut::F32(&mut dw), i, Operand::k_outer(dy, o), Operand::k_outer(x, i), product(o, i, n));
                    }),
                ];
                for s in secs {
                    let rate = flops / s / 1e9;
                    print!(" {rate:>8.1} {:>4.0}%", 100.0 * rate / peak);
                }
            }
            println!();
        }
    }
    Ok(())
}
