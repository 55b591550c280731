//! The matrix fragments of compat.h on emulated instructions with documented lane layouts: every way to load, multiply and convert,
//! against plain loops in `f64`, for tiles of several widths; and that the swizzle leaves no bank conflicts.

use zrt_kernels::gpu::launch::{Launch, Launcher, Work};
use zrt_kernels::{DType, ViewMut};
use zrt_simt::testing::{ARCHS, Rig, assert_close, can_run, normal, wide};
use zrt_simt::{Counters, Order, SimtDevice, SimtOptions};

fn transposed(x: &[f32], rows: usize) -> Vec<f32> {
    let cols = x.len() / rows;
    (0..x.len()).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// Runs a kernel of fragments.cu on `a` and `b` of `[16, k]`.
fn launch(arch: &'static str, order: Order, kernel: &'static str, a: &[f32], b: &[f32], dtype: DType) -> (Vec<f32>, Counters) {
    let device = SimtDevice::new(SimtOptions { arch, order, count: true, exact: true, ..Default::default() }).unwrap();
    let rig = Rig::new(device.clone());
    let out = rig.empty(7 * 256, DType::F32);
    let inputs = [a.to_vec(), b.to_vec(), transposed(a, 16), transposed(b, 16)].map(|x| rig.tensor(&x, dtype));
    let address = |v: &ViewMut| device.launcher().address("test", v).unwrap().0.to_ne_bytes();
    let params: Vec<u8> = std::iter::once(&out).chain(&inputs).flat_map(address).collect();
    let shared_bytes = (4 * a.len() * dtype.bytes() + 1024) as u32;
    let launch =
        Launch { kernel, grid: [1, 1, 1], threads: device.arch().lanes, shared_bytes, params, fault_at: None, data: None, dense: None };
    let reads = inputs.iter().map(|v| v.view()).collect();
    let work = Work { op: "test", launches: vec![launch], reads, writes: vec![out.clone()], fault: None };
    device.launcher().run(work, rig.stream()).unwrap();
    let got = rig.read(&out);
    (got, device.take_counters()[kernel])
}

#[test]
fn every_way_to_multiply_is_right() {
    if !can_run() {
        return;
    }
    let kernels = [
        ("fragments_f32_64", 64, DType::F32),
        ("fragments_bf16_64", 64, DType::BF16),
        ("fragments_f32_24", 24, DType::F32),
        ("fragments_bf16_96", 96, DType::BF16),
    ];
    for (kernel, k, dtype) in kernels {
        let (a, b) = (normal(16 * k, dtype, 1), normal(16 * k, dtype, 2));
        let (wa, wb) = (wide(&a), wide(&b));
        let product: Vec<f64> = (0..256).map(|i| (0..k).map(|j| wa[i / 16 * k + j] * wb[i % 16 * k + j]).sum()).collect();
        let round = |x: &f64| if dtype == DType::BF16 { half::bf16::from_f64(*x).to_f64() } else { *x };
        let stored: Vec<f64> = product.iter().map(round).collect();
        let as_a: Vec<f64> = (0..256).map(|i| (0..16).map(|j| stored[i / 16 * 16 + j] * wb[i % 16 * k + j]).sum()).collect();
        let as_b: Vec<f64> = (0..256).map(|i| (0..16).map(|j| wa[i / 16 * k + j] * stored[i % 16 * 16 + j]).sum()).collect();
        let row = |i: usize| product[i / 16 * 16..][..16].iter();
        let rows: Vec<f64> = (0..256).map(|i| if i % 2 == 1 { row(i).fold(f64::MIN, |m, x| m.max(*x)) } else { row(i).sum() }).collect();
        for arch in ARCHS {
            for order in [Order::Forward, Order::Reverse, Order::Random(3)] {
                let (got, counters) = launch(arch, order, kernel, &a, &b, dtype);
                let wanted = [
                    ("a b", &product),
                    ("a^T b", &product),
                    ("a b^T", &product),
                    ("pairs", &product),
                    ("as a", &as_a),
                    ("as b", &as_b),
                    ("rows", &rows),
                ];
                for (i, (name, want)) in wanted.into_iter().enumerate() {
                    // Products of bf16 are exact; sums are made in f32. A rounded product may fall to the other side (2^-9 of one term).
                    let tolerance = if dtype == DType::BF16 && (i == 4 || i == 5) { 1e-3 } else { 1e-6 };
                    assert_close(&format!("{name}, {kernel} on {arch}, {order:?}"), &got[i * 256..][..256], want, tolerance);
                }
                assert_eq!(counters.matrix > 0, dtype == DType::BF16 || arch != "sm_90", "f32 has no matrix instruction with 32 lanes");
            }
        }
    }
}

#[test]
fn loads_of_fragments_have_no_bank_conflicts() {
    if !can_run() {
        return;
    }
    for (kernel, k) in
        [("loads_16", 16), ("loads_32", 32), ("loads_40", 40), ("loads_64", 64), ("loads_96", 96), ("loads_128", 128), ("loads_256", 256)]
    {
        let a = normal(16 * k, DType::BF16, 1);
        for arch in ARCHS {
            let (_, c) = launch(arch, Order::Forward, kernel, &a, &a, DType::BF16);
            assert!(c.worst_ways <= if arch == "sm_90" { 1 } else { 2 }, "{kernel} on {arch}: {} ways", c.worst_ways);
        }
    }
}
