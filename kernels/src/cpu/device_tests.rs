//! What streams, events and memory of the CPU device promise, in every mode. Gates, not sleeps, decide who runs when.

use super::*;
use crate::sim::SimOps;
use crate::{Category::Workspace, DType, HostTask, Place::Device as OnDevice, View, ViewMut};
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// Only ends a test that would hang.
const LONG: Duration = Duration::from_secs(120);
const MODES: [Mode; 3] = [Mode::Threaded, Mode::Inline, Mode::Chaos { seed: 7 }];

fn device_with(options: CpuOptions) -> Arc<CpuDevice> {
    CpuDevice::with_ops(options, Box::new(SimOps::new(Box::new(|_| 0), Arc::default()))).unwrap()
}

fn device(mode: Mode) -> Arc<CpuDevice> {
    device_with(CpuOptions { threads: 1, mode, track: false, trace: false })
}

fn bytes(d: &CpuDevice, n: usize) -> ViewMut {
    d.alloc("buf", n, OnDevice, Workspace).unwrap().all(DType::U8).unwrap()
}

fn task(name: &'static str, run: impl FnOnce() -> Result<()> + Send + 'static) -> HostTask {
    HostTask { name: name.into(), reads: vec![], writes: vec![], run: Box::new(run) }
}

fn touches(name: &'static str, reads: &[View], writes: &[ViewMut]) -> HostTask {
    HostTask { name: name.into(), reads: reads.to_vec(), writes: writes.to_vec(), run: Box::new(|| Ok(())) }
}

fn failing() -> HostTask {
    task("bad", || Err(Error::Shape { op: "bad", what: "on purpose".into() }))
}

fn is_the_failure(r: Result<()>, stream: &str) {
    match r {
        Err(Error::Task { stream: s, task, why }) => {
            assert_eq!((s.as_str(), task.as_str()), (stream, "bad"));
            assert!(why.contains("on purpose"), "{why}");
        }
        other => panic!("expected the task's error, got {other:?}"),
    }
}

/// A stream that stands still until the sender is used or dropped.
fn held(s: &Arc<dyn Stream>) -> Sender<()> {
    let (open, gate) = channel::<()>();
    s.host(task("gate", move || {
        let _ = gate.recv();
        Ok(())
    }))
    .unwrap();
    open
}

#[test]
fn tasks_run_in_order() {
    for mode in MODES {
        let d = device(mode);
        let s = d.stream("s").unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        for i in 0..100 {
            let seen = seen.clone();
            s.host(task("push", move || {
                seen.lock().unwrap().push(i);
                Ok(())
            }))
            .unwrap();
        }
        s.sync().unwrap();
        assert_eq!(*seen.lock().unwrap(), (0..100).collect::<Vec<_>>(), "{mode:?}");
    }
}

#[test]
fn bytes_travel_through_write_copy_fill_and_read() {
    for mode in MODES {
        let d = device(mode);
        let s = d.stream("s").unwrap();
        let (a, b) = (bytes(&d, 16), bytes(&d, 16));
        let source = |to: &mut [u8]| {
            to.iter_mut().enumerate().for_each(|(i, x)| *x = i as u8);
            Ok(())
        };
        s.write(&a, "ramp", Box::new(source)).unwrap();
        s.copy(&b, &a).unwrap();
        s.fill(&b.slice(8, 8).unwrap().reinterpret(DType::F32).unwrap(), 1.5).unwrap();
        let got = s.read(&b).unwrap().bytes(LONG).unwrap();
        assert_eq!(got[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(got[8..12], 1.5f32.to_le_bytes());
        s.fill(&a.reinterpret(DType::BF16).unwrap(), -2.0).unwrap();
        assert_eq!(s.read(&a).unwrap().bytes(LONG).unwrap()[..4], [0x00, 0xC0, 0x00, 0xC0]);
        s.fill(&a.reinterpret(DType::I32).unwrap(), -1.0).unwrap();
        assert_eq!(s.read(&a).unwrap().bytes(LONG).unwrap(), [0xFF; 16]);
        assert!(matches!(s.copy(&b, &a.slice(0, 8).unwrap()), Err(Error::Length { .. })));
        assert!(matches!(s.copy(&b, &a.slice(0, 4).unwrap().reinterpret(DType::I32).unwrap()), Err(Error::Type { .. })));
        s.write(&a, "corpus", Box::new(|_| Err("line 7 is broken".into()))).unwrap_or(());
        let e = s.sync().unwrap_err().to_string();
        assert!(e.contains("write corpus") && e.contains("line 7 is broken"), "{e}");
    }
}

#[test]
fn memory_starts_zero_or_nan_in_chaos() {
    for (mode, want) in [(Mode::Threaded, 0), (Mode::Chaos { seed: 1 }, 0xFF)] {
        let d = device(mode);
        let s = d.stream("s").unwrap();
        assert_eq!(s.read(&bytes(&d, 5000)).unwrap().bytes(LONG).unwrap(), vec![want; 5000]);
    }
}

#[test]
fn a_wait_takes_the_record_made_before_it() {
    let d = device(Mode::Threaded);
    let (a, b, c) = (d.stream("a").unwrap(), d.stream("b").unwrap(), d.stream("c").unwrap());
    let e = d.event().unwrap();
    assert!(e.query(), "never recorded counts as passed");
    b.wait(&e).unwrap();
    b.sync().unwrap();
    let first = held(&a);
    a.record(&e).unwrap();
    b.wait(&e).unwrap();
    let second = held(&a);
    a.record(&e).unwrap();
    c.wait(&e).unwrap();
    let of_c = d.event().unwrap();
    c.record(&of_c).unwrap();
    assert!(!e.query());
    let err = e.sync(Duration::from_millis(1)).unwrap_err().to_string();
    assert!(err.contains("'a'"), "the deadline names the recording stream: {err}");
    first.send(()).unwrap();
    // Would hang if recording again had moved b's wait to the second gate.
    b.sync().unwrap();
    assert!(!of_c.query(), "c waits for the second record");
    second.send(()).unwrap();
    of_c.sync(LONG).unwrap();
    e.sync(LONG).unwrap();
}

#[test]
fn waiting_orders_streams() {
    for mode in MODES {
        let d = device(mode);
        let (a, b, e) = (d.stream("a").unwrap(), d.stream("b").unwrap(), d.event().unwrap());
        let buf = bytes(&d, 8);
        for round in 0..50u8 {
            a.write(
                &buf,
                "round",
                Box::new(move |to| {
                    to.fill(round);
                    Ok(())
                }),
            )
            .unwrap();
            a.record(&e).unwrap();
            b.wait(&e).unwrap();
            let got = b.read(&buf).unwrap();
            b.record(&e).unwrap();
            a.wait(&e).unwrap();
            assert_eq!(got.bytes(LONG).unwrap(), [round; 8]);
        }
    }
}

#[test]
fn an_error_sticks_travels_and_nobody_hangs() {
    for mode in MODES {
        let d = device(mode);
        let (a, b, e, f) = (d.stream("a").unwrap(), d.stream("b").unwrap(), d.event().unwrap(), d.event().unwrap());
        let ran = Arc::new(AtomicU64::new(0));
        a.record(&e).unwrap();
        let _ = a.host(failing());
        let count = ran.clone();
        let _ = a.host(task("later", move || {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }));
        let _ = a.record(&f);
        is_the_failure(a.sync(), "a");
        is_the_failure(a.host(task("refused", || Ok(()))), "a");
        is_the_failure(a.record(&f), "a");
        is_the_failure(a.fill(&bytes(&d, 1), 0.0), "a");
        e.sync(LONG).unwrap();
        is_the_failure(f.sync(LONG), "a");
        b.wait(&e).unwrap();
        b.sync().unwrap();
        let _ = b.wait(&f);
        is_the_failure(b.sync(), "a");
        is_the_failure(b.host(task("refused", || Ok(()))), "a");
        assert_eq!(ran.load(Ordering::Relaxed), 0);
        let c = d.stream("c").unwrap();
        c.host(task("fine", || Ok(()))).unwrap();
        c.sync().unwrap();
    }
}

#[test]
fn a_readback_carries_the_error() {
    let d = device(Mode::Threaded);
    let s = d.stream("s").unwrap();
    let gate = held(&s);
    s.host(failing()).unwrap();
    let back = s.read(&bytes(&d, 4)).unwrap();
    drop(gate);
    is_the_failure(back.bytes(LONG).map(|_| ()), "s");
}

#[test]
fn a_panic_is_an_error_of_the_stream() {
    for mode in MODES {
        let d = device(mode);
        let s = d.stream("s").unwrap();
        let _ = s.host(task("boom", || panic!("index {}", 7)));
        let e = s.sync().unwrap_err().to_string();
        assert!(e.contains("'s'") && e.contains("boom") && e.contains("index 7"), "{e}");
    }
}

#[test]
fn dropping_a_stream_runs_what_is_queued() {
    for mode in MODES {
        let d = device(mode);
        let ran = Arc::new(AtomicU64::new(0));
        let s = d.stream("s").unwrap();
        for _ in 0..50 {
            let ran = ran.clone();
            s.host(task("count", move || {
                ran.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }))
            .unwrap();
        }
        drop(s);
        assert_eq!(ran.load(Ordering::Relaxed), 50);
    }
}

#[test]
fn a_task_may_hold_enqueue_on_and_outlive_its_own_stream() {
    for mode in [Mode::Threaded, Mode::Inline] {
        let d = device(mode);
        let s = d.stream("s").unwrap();
        let (done, result) = channel();
        let own = s.clone();
        let send = done.clone();
        s.host(task("outer", move || {
            assert!(own.sync().is_err(), "it would wait for itself");
            own.host(task("inner", move || {
                send.send("inner").unwrap();
                Ok(())
            }))
            .unwrap();
            done.send("outer").unwrap();
            Ok(())
        }))
        .unwrap();
        drop(s);
        assert_eq!(result.recv_timeout(LONG), Ok("outer"));
        assert_eq!(result.recv_timeout(LONG), Ok("inner"));
    }
}

#[test]
fn a_task_may_drop_a_stream_that_waits_for_it() {
    let d = device(Mode::Threaded);
    let (a, b, e) = (d.stream("a").unwrap(), d.stream("b").unwrap(), d.event().unwrap());
    let gate = held(&a);
    let last = b.clone();
    a.host(task("drops b", move || {
        drop(last);
        Ok(())
    }))
    .unwrap();
    a.record(&e).unwrap();
    b.wait(&e).unwrap();
    let (done, result) = channel();
    b.host(task("done", move || {
        done.send(()).unwrap();
        Ok(())
    }))
    .unwrap();
    drop(b);
    drop(gate);
    assert_eq!(result.recv_timeout(LONG), Ok(()));
}

#[test]
fn memory_is_freed_after_the_last_task_that_holds_it() {
    let d = device(Mode::Threaded);
    let s = d.stream("s").unwrap();
    let gate = held(&s);
    let buf = d.alloc("late", 1 << 20, OnDevice, Workspace).unwrap();
    s.fill(&buf.all(DType::F32).unwrap(), 3.0).unwrap();
    let back = s.read(&buf.view(DType::F32, 0, 4).unwrap()).unwrap();
    drop(buf);
    let held_bytes = |d: &CpuDevice| d.memory()[0].2.bytes;
    assert_eq!(held_bytes(&d), 1 << 20);
    gate.send(()).unwrap();
    assert_eq!(back.f32s(LONG).unwrap(), [3.0; 4]);
    assert_eq!(held_bytes(&d), 0, "the event comes after the release");
    assert_eq!(d.memory()[0].2.peak_bytes, 1 << 20);
}

#[test]
fn the_tracker_finds_a_missing_wait_and_accepts_the_fixed_program() {
    for mode in [Mode::Threaded, Mode::Inline] {
        let d = device_with(CpuOptions { threads: 1, mode, track: true, trace: false });
        let (copy, compute, e) = (d.stream("copy").unwrap(), d.stream("compute").unwrap(), d.event().unwrap());
        let slot = bytes(&d, 64);
        copy.host(touches("gather", &[], &[slot.slice(0, 32).unwrap()])).unwrap();
        let broken = compute.host(touches("matmul", &[slot.slice(16, 48).unwrap().view()], &[]));
        let text = broken.unwrap_err().to_string();
        for part in ["race", "'gather'", "'copy'", "'matmul'", "'compute'", "16..32", "'buf'"] {
            assert!(text.contains(part), "{part} in: {text}");
        }
        copy.record(&e).unwrap();
        compute.wait(&e).unwrap();
        compute.host(touches("matmul", &[slot.view()], &[])).unwrap();
        // Using the slot again without waiting for its reader.
        assert!(matches!(copy.fill(&slot, 0.0), Err(Error::Race(_))));
        compute.record(&e).unwrap();
        e.sync(LONG).unwrap();
        copy.fill(&slot, 0.0).unwrap();
        let other = d.stream("other").unwrap();
        assert!(other.read(&slot).is_err());
        drop(copy);
        other.read(&slot).unwrap();
    }
}

#[test]
fn chaos_runs_a_correct_ring_of_slots_correctly() {
    for seed in 0..3 {
        let d = device(Mode::Chaos { seed });
        let (load, compute) = (d.stream("load").unwrap(), d.stream("compute").unwrap());
        let slots: Vec<ViewMut> = (0..2).map(|_| bytes(&d, 256)).collect();
        let events = || (0..2).map(|_| d.event().unwrap()).collect::<Vec<_>>();
        let (filled, free) = (events(), events());
        let mut backs = Vec::new();
        for i in 0..60usize {
            let k = i % 2;
            load.wait(&free[k]).unwrap();
            load.fill(&slots[k], i as f32).unwrap();
            load.record(&filled[k]).unwrap();
            compute.wait(&filled[k]).unwrap();
            backs.push(compute.read(&slots[k]).unwrap());
            compute.record(&free[k]).unwrap();
        }
        for (i, back) in backs.iter().enumerate() {
            assert_eq!(back.bytes(LONG).unwrap(), [i as u8; 256]);
        }
    }
}

#[test]
fn many_host_threads_may_share_a_stream() {
    for mode in [Mode::Threaded, Mode::Inline] {
        let d = device(mode);
        let s = d.stream("s").unwrap();
        let total = Arc::new(AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let total = total.clone();
                        // Not atomic as a whole: two tasks at once would lose counts.
                        let add = move || {
                            let old = total.load(Ordering::Relaxed);
                            std::thread::yield_now();
                            total.store(old + 1, Ordering::Relaxed);
                            Ok(())
                        };
                        s.host(task("add", add)).unwrap();
                    }
                    s.sync().unwrap();
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 800);
    }
}

#[test]
fn traces_tell_tasks_records_and_waits() {
    let d = device_with(CpuOptions { threads: 1, mode: Mode::Threaded, track: false, trace: true });
    let (a, b, e) = (d.stream("a").unwrap(), d.stream("b").unwrap(), d.event().unwrap());
    a.host(task("first", || Ok(()))).unwrap();
    a.record(&e).unwrap();
    b.wait(&e).unwrap();
    b.host(task("second", || Ok(()))).unwrap();
    // Dropping joins the threads, so everything is written down.
    drop((a, b));
    let events = d.trace_events();
    let find = |name: &str| events.iter().find(|e| e.name == name && e.kind == trace::TraceKind::Task).unwrap();
    assert!(find("first").end_ns <= find("second").start_ns);
    let wait = events.iter().find_map(|e| if let trace::TraceKind::Wait(id) = e.kind { Some((id, &*e.stream)) } else { None }).unwrap();
    assert_eq!(wait.1, "b");
    assert!(events.iter().any(|e| e.kind == trace::TraceKind::Record(wait.0) && &*e.stream == "a"));
    assert!(d.trace_events().is_empty(), "taken");
}

#[test]
fn foreign_memory_and_events_are_refused() {
    let d = device(Mode::Inline);
    let sim = crate::sim::SimDevice::with_sizes(crate::sim::SimOptions { threads: 1 }, |_| 0).unwrap();
    let s = d.stream("s").unwrap();
    let simulated = sim.alloc("x", 8, OnDevice, Workspace).unwrap().all(DType::U8).unwrap();
    assert!(matches!(s.fill(&simulated, 0.0), Err(Error::NotHost { op: "fill" })));
    let foreign = sim.event().unwrap();
    assert!(s.wait(&foreign).is_err() && s.record(&foreign).is_err());
    s.sync().unwrap();
}

/// A program over the contract alone: the same code runs on both devices.
fn program(d: &dyn Device) -> Vec<f32> {
    let (compute, copy, e) = (d.stream("compute").unwrap(), d.stream("copy").unwrap(), d.event().unwrap());
    let f32s = |n: usize, c| d.alloc("t", 4 * n, OnDevice, c).unwrap().all(DType::F32).unwrap();
    let (rows, cols) = (3, 8);
    let (x, y, w) = (f32s(rows * cols, Category::Activations), f32s(rows * cols, Category::Activations), f32s(cols, Category::Weights));
    let (rstd, nodes, norm) = (f32s(rows, Category::Activations), f32s(96, Workspace), f32s(2, Workspace));
    let scratch_bytes = d.ops().workspace_bytes(crate::OpShape::SumSquares { elems: rows * cols });
    let scratch = d.alloc("scratch", scratch_bytes, OnDevice, Workspace).unwrap().all(DType::U8).unwrap();
    copy.fill(&x, 2.0).unwrap();
    copy.fill(&w, 3.0).unwrap();
    copy.record(&e).unwrap();
    compute.wait(&e).unwrap();
    d.ops().rmsnorm(&y, &rstd, &x, &w, 0.0, rows, cols, &*compute).unwrap();
    d.ops().sum_squares(&nodes, &y, 0, &scratch, &*compute).unwrap();
    let (total, factor) = (norm.slice(0, 1).unwrap(), norm.slice(1, 1).unwrap());
    d.ops().clip_scale(&total, &factor, &nodes, &[(0, 1)], 1, 1, None, &*compute).unwrap();
    compute.read(&norm).unwrap().f32s(LONG).unwrap()
}

#[test]
fn plan_and_run_hold_the_same_memory_and_operations_run_in_every_mode() {
    for threads in [1, 2] {
        let sim = crate::sim::SimDevice::new(crate::sim::SimOptions { threads }).unwrap();
        assert_eq!(program(&*sim), [0.0, 0.0]);
        for mode in MODES {
            let d = CpuDevice::new(CpuOptions { threads, mode, track: true, trace: false }).unwrap();
            // Every element is 2 / 2 * 3: sqrt(24 * 9), each step exact in f32 but the last.
            assert_eq!(program(&*d), [216f32.sqrt(), 1.0]);
            // Peaks and numbers of allocations: all of it is freed again.
            assert_eq!(d.memory(), sim.memory());
        }
    }
}
