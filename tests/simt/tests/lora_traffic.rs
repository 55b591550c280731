//! How many bytes does LoRA move, against the least: x, dy once, y, dx in and out once? Everything counts: adapters and their gradients, t and
//! dt, partial sums written and read again; what several blocks of a launch read counts once. The arithmetic is compared with what the
//! emulator counts, and then holds for the sizes of 8B and 70B blocks.

use zrt_kernels::DType::{self, BF16, F32};
use zrt_kernels::gpu::launch::Arch;
use zrt_kernels::gpu::lora::traffic::{self, LoraTraffic};
use zrt_kernels::{LoraBackward, LoraForward, OpShape, Write};
use zrt_simt::shapes::{B8, B70};
use zrt_simt::testing::{Rig, can_run, normal};
use zrt_simt::{SimtDevice, SimtOptions};

/// Sums of the launches by kernel.
fn by_kernel(t: &LoraTraffic) -> std::collections::BTreeMap<&'static str, [u64; 2]> {
    let mut all = std::collections::BTreeMap::new();
    for (kernel, t) in &t.launches {
        let sum: &mut [u64; 2] = all.entry(*kernel).or_default();
        sum[0] += t.once_bytes;
        sum[1] += t.read_bytes + t.write_bytes;
    }
    all
}

/// Runs one call on emulated machines and compares its kernels with the arithmetic.
fn compare(arch: &'static str, tokens: usize, inputs: usize, adapters: &[(usize, usize)]) {
    let device = SimtDevice::new(SimtOptions { arch, count: true, ..Default::default() }).unwrap();
    let rig = Rig::new(device.clone());
    let shape = OpShape::Lora {
        tokens,
        inputs,
        outputs: adapters.iter().map(|a| a.0).max().unwrap(),
        rank: adapters.iter().map(|a| a.1).max().unwrap(),
        adapters: adapters.len(),
    };
    let operand = |elems: usize, dtype: DType, seed: usize| rig.tensor(&normal(elems, dtype, seed as u32), dtype);
    let (x, work) = (operand(tokens * inputs, BF16, 1), rig.workspace(shape));
    let mut forward = Vec::new();
    for (site, &(outputs, rank)) in adapters.iter().enumerate() {
        let (a, b) = (operand(rank * inputs, F32, 2 + site).view(), operand(outputs * rank, F32, 12 + site).view());
        let (y, t) = (operand(tokens * outputs, BF16, 22 + site), rig.empty(tokens * rank, F32));
        forward.push(LoraForward { y, t, a, b, scale: 2.0, outputs, rank, site: site as u32 });
    }
    rig.ops().lora(&forward, &x, None, tokens, inputs, &work, rig.stream()).unwrap();
    rig.stream().sync().unwrap();
    let check = |name: &str, want: &LoraTraffic| {
        let counted = device.take_counters();
        let want = by_kernel(want);
        assert_eq!(counted.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>(), "{name} on {arch}");
        for (kernel, [once, asked]) in want {
            let c = &counted[kernel];
            let (memory, bytes) = (32 * (c.distinct_reads + c.distinct_writes), c.read_bytes + c.write_bytes);
            println!("{arch} {kernel}: {memory} bytes of memory, {once} by arithmetic; {bytes} in all, {asked}");
            let near = |a: u64, b: u64| (a as f64 - b as f64).abs() <= 0.01 * b as f64;
            assert!(near(memory, once), "{name}, {kernel} on {arch}: {memory} bytes of memory, {once} by arithmetic");
            assert!(near(bytes, asked), "{name}, {kernel} on {arch}: {bytes} bytes in all, {asked} by arithmetic");
        }
    };
    let machine = Arch::known(arch).unwrap();
    check("forward", &traffic::forward(&machine, BF16, BF16, tokens, inputs, adapters));
    let backward: Vec<LoraBackward> = forward
        .into_iter()
        .map(|f| {
            let (da, db) = (rig.empty(f.rank * inputs, F32), rig.empty(f.outputs * f.rank, F32));
            let dy = operand(tokens * f.outputs, BF16, 30).view();
            LoraBackward {
                da,
                db,
                write: Write::Set,
                dy,
                t: f.t.view(),
                a: f.a,
                b: f.b,
                scale: 2.0,
                outputs: f.outputs,
                rank: f.rank,
                site: f.site,
            }
        })
        .collect();
    let dx = operand(tokens * inputs, BF16, 31);
    rig.ops().lora_backward(Some(&dx), &backward, &x, None, tokens, inputs, &work, rig.stream()).unwrap();
    rig.stream().sync().unwrap();
    check("backward", &traffic::backward(&machine, BF16, tokens, inputs, adapters));
}

#[test]
fn the_arithmetic_is_what_kernels_do() {
    if !can_run() {
        return;
    }
    for arch in ["sm_90", "gfx942"] {
        compare(arch, 192, 512, &[(640, 16), (256, 16), (256, 16)]);
        compare(arch, 128, 256, &[(384, 64), (512, 32)]);
    }
}

/// What issue 4 asks for.
fn asked(rank: usize) -> f64 {
    if rank <= 16 { 1.15 } else { 1.5 }
}

fn ratio(t: &LoraTraffic) -> f64 {
    t.moved_bytes() as f64 / t.least_bytes as f64
}

/// Bytes that backward moves at least if dy is read once and `units` blocks share it. P groups of tokens and C chunks of columns, P C at least
/// `units`, leave C N R + P W R partial sums of dt and db, which is 2 R sqrt(P C N W) at least, whatever P and C are.
fn best_backward(units: usize, t: &LoraTraffic, tokens: usize, outputs: &[usize], rank: usize) -> f64 {
    let columns = outputs.iter().sum::<usize>() as f64;
    let partials = 2.0 * rank as f64 * (units as f64 * tokens as f64 * columns).sqrt();
    let sums: u64 = t.launches.iter().take(2).map(|l| l.1.once_bytes).sum();
    let (dy, t_and_b) = (2.0 * tokens as f64 * columns, 4.0 * rank as f64 * (outputs.len() * tokens) as f64 + 4.0 * rank as f64 * columns);
    // Beside dy: t and B read, partial sums written and read, dt and db written.
    let least = dy + 2.0 * t_and_b + 8.0 * partials;
    (t.moved_bytes() as f64 - sums as f64 + least) / t.least_bytes as f64
}

#[test]
fn most_bytes_are_those_of_x_y_dy_dx() {
    for model in [B8, B70] {
        for (name, inputs, outputs) in model.adapters() {
            for (rank, arch, tokens) in
                [8, 16, 64].into_iter().flat_map(|r| ["sm_90", "gfx942"].map(|a| (r, a))).flat_map(|(r, a)| [2048, 8192].map(|n| (r, a, n)))
            {
                let machine = Arch::known(arch).unwrap();
                let units = machine.units as usize;
                let adapters: Vec<_> = outputs.iter().map(|o| (*o, rank)).collect();
                let what = format!("{} {name}, {tokens} tokens, rank {rank} on {arch}", model.name);
                let f = traffic::forward(&machine, BF16, BF16, tokens, inputs, &adapters);
                let b = traffic::backward(&machine, BF16, tokens, inputs, &adapters);
                let best = best_backward(units, &b, tokens, &outputs, rank);
                println!("{what}: forward {:.3}, backward {:.3}, {best:.3} at best", ratio(&f), ratio(&b));
                assert!(f.fewest_blocks() as usize >= units && b.fewest_blocks() as usize >= units, "{what}: blocks");
                assert!(ratio(&f) <= asked(rank), "{what}: forward moves {} of the least", ratio(&f));
                // Where one block for each unit makes what is asked for impossible (few tokens for many units or a large rank), the best.
                let most = asked(rank).max(1.05 * best);
                assert!(ratio(&b) <= most, "{what}: backward moves {} of the least, at most {most}", ratio(&b));
            }
        }
    }
}

/// Of 8,192 tokens all are as asked, but one: q/k/v of 8B at rank 64 on 304 units, whose best is 1.57.
#[test]
fn long_micro_batches_are_as_asked() {
    for (model, rank, arch) in
        [B8, B70].into_iter().flat_map(|m| [8, 16, 64].map(|r| (m, r))).flat_map(|(m, r)| ["sm_90", "gfx942"].map(|a| (m, r, a)))
    {
        for (name, inputs, outputs) in model.adapters() {
            let adapters: Vec<_> = outputs.iter().map(|o| (*o, rank)).collect();
            let got = ratio(&traffic::backward(&Arch::known(arch).unwrap(), BF16, 8192, inputs, &adapters));
            let known = (model.name, name, rank, arch) == ("8B", "q/k/v", 64, "gfx942");
            assert_eq!(got <= asked(rank), !known, "{} {name}, rank {rank} on {arch}: {got}", model.name);
        }
    }
}
