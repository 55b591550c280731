//! Does virtual time tell what a real GPU would do at the same time? And what does a launch cost the host here?

mod common;

use common::{Fill, Gpu, PATIENCE, child, finish, inside, is_inside};
use serde_json::Value;
use std::time::Instant;

/// Nanoseconds of these operations, and how many of them lie under kernels.
fn under_kernels(lines: &[Value], kind: &str) -> (u64, u64) {
    let spans = |kind: &str| {
        let of = |l: &Value| (l["start_ns"].as_u64().expect("a time"), l["end_ns"].as_u64().expect("a time"));
        lines.iter().filter(|l| l["kind"] == kind).map(of).collect::<Vec<_>>()
    };
    let kernels = spans("kernel");
    let covered = |(start, end): (u64, u64)| kernels.iter().map(|(s, e)| end.min(*e).saturating_sub(start.max(*s))).sum::<u64>();
    spans(kind).into_iter().fold((0, 0), |(all, under), span| (all + span.1 - span.0, under + covered(span)))
}

#[test]
fn copies_overlap_with_kernels_unless_events_forbid_it() {
    let test = "copies_overlap_with_kernels_unless_events_forbid_it";
    if !is_inside(test) {
        let folder = tempfile::tempdir().expect("a folder");
        for (mode, most, least) in [("free", 1.0, 0.9), ("ordered", 0.0, 0.0)] {
            let file = folder.path().join(mode);
            // A MiB takes 22 microseconds, a kernel 101.
            let settings = format!("null=1;kernel_ns=100000;timeline={}", file.display());
            let out = finish(child(test, &settings, &[("MODE", mode)]), PATIENCE);
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            let text = std::fs::read_to_string(&file).expect("a timeline");
            let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
            assert_eq!(lines.len(), 16, "{text}");
            let (all, under) = under_kernels(&lines, "h2d");
            assert_eq!(all, 8 * (1_000 + (1 << 20) / 50));
            let share = under as f64 / all as f64;
            assert!((least..=most).contains(&share), "{mode}: {share} of copies under kernels");
        }
        return;
    }
    let gpu = Gpu::open(true);
    let (copies, compute) = (gpu.stream(), gpu.stream());
    let ordered = std::env::var("MODE").is_ok_and(|m| m == "ordered");
    let (host, at) = (vec![0u8; 1 << 20], gpu.alloc(1 << 20));
    let kernel = gpu.kernel("elementwise.cu", "fill_u32");
    for _ in 0..8 {
        assert_eq!(gpu.launch(kernel, 1, 256, 0, compute, &Fill { out: at, elems: 4, bits: 0, vector: 1 }), 0);
        let event = gpu.event();
        if ordered {
            assert_eq!((gpu.record(event, compute), gpu.wait(copies, event)), (0, 0));
        }
        assert_eq!(gpu.upload(at, host.as_ptr().cast(), host.len(), copies), 0);
        if ordered {
            assert_eq!((gpu.record(event, copies), gpu.wait(compute, event)), (0, 0));
        }
    }
    assert_eq!((gpu.sync(copies), gpu.sync(compute)), (0, 0));
}

#[test]
fn null_launches_do_nothing_fast() {
    if !inside("null_launches_do_nothing_fast", "null=1") {
        return;
    }
    for amd in [false, true] {
        let gpu = Gpu::open(amd);
        let (s, out) = (gpu.stream(), gpu.put(&[1u32; 4], 0));
        let kernel = gpu.kernel("elementwise.cu", "fill_u32");
        let count = 100_000;
        let begin = Instant::now();
        for _ in 0..count {
            assert_eq!(gpu.launch(kernel, 1, 256, 0, s, &Fill { out, elems: 4, bits: 9, vector: 1 }), 0);
        }
        assert_eq!(gpu.sync(s), 0);
        println!("a null launch: {:.2} us", begin.elapsed().as_secs_f64() * 1e6 / f64::from(count));
        assert_eq!(gpu.take::<u32>(out, 4, s), [1; 4]);
    }
}

#[test]
fn launches_cost_little() {
    if !inside("launches_cost_little", "") || zrt_simt::build::compiler().is_none() {
        return;
    }
    let gpu = Gpu::open(false);
    let (s, out) = (gpu.stream(), gpu.alloc(16));
    // As many allocations as a small model has.
    let others: Vec<u64> = (0..500).map(|_| gpu.alloc(64)).collect();
    let kernel = gpu.kernel("elementwise.cu", "fill_u32");
    let launch = || gpu.launch(kernel, 1, 256, 0, s, &Fill { out, elems: 4, bits: 9, vector: 1 });
    assert_eq!((launch(), gpu.sync(s)), (0, 0));
    let count = 2_000;
    let begin = Instant::now();
    for _ in 0..count {
        assert_eq!(launch(), 0);
    }
    let given = begin.elapsed();
    assert_eq!(gpu.sync(s), 0);
    let us = |t: std::time::Duration| t.as_secs_f64() * 1e6 / f64::from(count);
    println!(
        "a launch of one block beside {} allocations: {:.2} us for the caller, {:.1} us in all",
        others.len(),
        us(given),
        us(begin.elapsed())
    );
}
