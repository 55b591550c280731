//! How many bytes do the memory-bound kernels move, against the least possible? Counted sector by sector at the widths of an 8B and a
//! 70B block: what a launch touches at all (traffic of the memory), and what it asks for (traffic of the first cache). Partial sums
//! count. Every access of 16 bytes a lane, so that no sector is asked for twice.

use std::sync::Arc;
use zrt_kernels::{AdamW, DType, OpShape, Write};
use zrt_simt::cases::cases;
use zrt_simt::testing::{Rig, can_run, normal};
use zrt_simt::{Counters, SimtDevice, SimtOptions};

const B: DType = DType::BF16;

/// Runs `f` with counters and returns the sum over its kernels.
fn counted(arch: &'static str, f: impl Fn(&Rig)) -> Counters {
    let device: Arc<SimtDevice> = SimtDevice::new(SimtOptions { arch, count: true, ..Default::default() }).unwrap();
    let rig = Rig::new(device.clone());
    f(&rig);
    rig.stream().sync().unwrap();
    device.take_counters().values().fold(Counters::default(), |mut sum, c| {
        sum.add(c);
        sum
    })
}

/// Memory traffic at most `most` times the least, and cache traffic at most `cache` times.
fn check(what: &str, c: Counters, least_bytes: usize, most: f64, cache: f64) {
    let (memory, asked) = (32 * (c.distinct_reads + c.distinct_writes), 32 * (c.read_sectors + c.write_sectors));
    let (memory, asked) = (memory as f64 / least_bytes as f64, asked as f64 / least_bytes as f64);
    println!("{what}: {memory:.3} of the least from memory, {asked:.3} from the first cache");
    assert!(memory <= most, "{what}: {memory} of the least, at most {most}");
    assert!(asked <= cache, "{what}: {asked} of the least from the first cache, at most {cache}");
}

#[test]
fn kernels_move_what_they_must() {
    if !can_run() {
        return;
    }
    for arch in ["sm_90", "gfx942"] {
        for cols in [4096, 8192] {
            let rows = 24;
            let n = rows * cols;
            let c = counted(arch, |rig| {
                let (x, w) = (rig.tensor(&normal(n, B, 1), B), rig.tensor(&normal(cols, B, 2), B));
                rig.ops().rmsnorm(&rig.empty(n, B), &rig.empty(rows, DType::F32), &x, &w, 1e-5, rows, cols, rig.stream()).unwrap();
            });
            // x and y; the weight is read from memory once, by each row from the cache.
            check(&format!("rmsnorm {cols} on {arch}"), c, 4 * n, 1.03, 1.52);
            let c = counted(arch, |rig| {
                let (x, w) = (rig.tensor(&normal(n, B, 1), B), rig.tensor(&normal(cols, B, 2), B));
                let (dx, work) = (rig.empty(n, B), rig.workspace(OpShape::RmsNormBackward { rows, cols }));
                let rstd = rig.tensor(&vec![1.0; rows], DType::F32);
                let dw: Option<(&zrt_kernels::ViewMut, Write)> = None;
                rig.ops().rmsnorm_backward(Some((&dx, Write::Set)), dw, &x, &x, &rstd, &w, rows, cols, &work, rig.stream()).unwrap();
            });
            // x stands for dy too here: two reads of one place, so the least is two arrays. The weight is asked for twice a row.
            check(&format!("rmsnorm_backward {cols} on {arch}"), c, 4 * n, 1.03, 2.6);
        }
        let n = 40 * 1024;
        let c = counted(arch, |rig| {
            let [h, g, u] = [1, 2, 3].map(|seed| rig.tensor(&normal(n, B, seed), B));
            rig.ops().swiglu(&h, &g, &u, rig.stream()).unwrap();
        });
        check(&format!("swiglu on {arch}"), c, 3 * 2 * n, 1.001, 1.001);
        let c = counted(arch, |rig| {
            let (x, table) = (rig.tensor(&normal(n, B, 1), B), rig.tensor(&normal(64 * 128, DType::F32, 2), DType::F32));
            let positions: Vec<i32> = (0..10).collect();
            rig.ops().rope(&x, &table, &rig.ints(&positions), 32, 128, rig.stream()).unwrap();
        });
        // 32 heads share a row of the table: 2 f32 for 2 bf16 read and written, from the cache.
        check(&format!("rope on {arch}"), c, 2 * 2 * n, 1.04, 2.1);
        let c = counted(arch, |rig| {
            let [p, m, v, g] = [1, 2, 3, 4].map(|seed| rig.tensor(&normal(n, DType::F32, seed), DType::F32));
            let hp = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step: 3 };
            rig.ops().adamw(&p, &m, &v, Some(&rig.empty(n, B)), &g, &rig.tensor(&[1.0], DType::F32), hp, rig.stream()).unwrap();
        });
        // The scale is one sector, asked for by every warp.
        check(&format!("adamw on {arch}"), c, 30 * n, 1.001, 1.01);
    }
}

/// Accesses to shared memory of the products: no more than two ways in any of them, wherever their rows begin.
#[test]
fn banks_meet_two_by_two_at_most() {
    if !can_run() {
        return;
    }
    let mut wrong = Vec::new();
    for arch in ["sm_90", "gfx942"] {
        for case in cases().iter().filter(|c| c.name.starts_with("linear") || c.name.starts_with("lora")) {
            let device = SimtDevice::new(SimtOptions { arch, count: true, ..Default::default() }).unwrap();
            (case.run)(&Rig::new(device.clone())).unwrap();
            for (kernel, c) in device.take_counters() {
                println!(
                    "{arch} {kernel}, {}: {} ways, {} cycles for {} accesses",
                    case.name, c.worst_ways, c.shared_cycles, c.shared_accesses
                );
                if c.worst_ways > 2 {
                    wrong.push(format!("{arch} {kernel}, {}: {} ways", case.name, c.worst_ways));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
