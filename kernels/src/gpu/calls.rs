//! The calls of a [`Stream`] on a GPU: each becomes an item of the stream's queue.
//!
//! Small pieces for and from the host go through the stream's ring and never make its thread wait; large ones come and go through pageable
//! memory, which the thread waits for: loading and saving are made of these, steps are not.
#![allow(unsafe_code)]

use super::event::{GpuEvent, Point, lock};
use super::ring;
use super::stream::{GpuStream, Item};
use crate::device::HostSource;
use crate::{Error, Event, HostTask, NativeTask, Readback, Result, Stream, View, ViewMut, checks};
use std::any::Any;
use std::borrow::Cow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Whether the device works in the memory of `view`, or the host.
fn on_device(op: &'static str, view: &View) -> Result<bool> {
    match (view.host_ptr(), view.address()) {
        (Some(_), _) => Ok(false),
        (None, Some(_)) => Ok(true),
        (None, None) => Err(Error::NotHost { op }),
    }
}

/// An address that goes along to the issuing thread, whose memory the item's views hold.
#[derive(Clone, Copy)]
pub(super) struct At(pub u64);

impl At {
    fn of(op: &'static str, view: &View) -> Result<At> {
        view.address().map(At).ok_or(Error::NotHost { op })
    }

    pub fn host(self) -> *mut u8 {
        self.0 as usize as *mut u8
    }
}

fn gpu_event<'a>(op: &'static str, event: &'a Arc<dyn Event>) -> Result<&'a GpuEvent> {
    let what = || Error::Shape { op, what: "the event belongs to another kind of device, expected one made by a GPU".into() };
    event.as_any().downcast_ref::<GpuEvent>().ok_or_else(what)
}

impl Stream for GpuStream {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn record(&self, event: &Arc<dyn Event>) -> Result<()> {
        let event = gpu_event("record", event)?;
        let point = Point::new(self.shared.name.clone(), self.shared.me.clone());
        // Set before it can pass: a concurrent wait sees this record or the one before, never a gap.
        event.set(point.clone());
        self.shared.push(Item::Record(point))?;
        self.shared.failure()
    }

    fn wait(&self, event: &Arc<dyn Event>) -> Result<()> {
        match gpu_event("wait", event)?.latest() {
            Some(point) if !point.is_of(&self.shared) => self.push(Item::Wait(point)),
            _ => self.shared.failure(),
        }
    }

    fn copy(&self, dst: &ViewMut, src: &View) -> Result<()> {
        checks::copy(dst, src)?;
        let (to, from, bytes) = (At::of("copy", dst)?, At::of("copy", src)?, src.bytes());
        let (to_gpu, from_gpu) = (on_device("copy", dst)?, on_device("copy", src)?);
        self.task("copy".into(), vec![dst.view(), src.clone()], move |shared, issuer| {
            let (driver, s) = (shared.driver(), shared.raw);
            // SAFETY (these four): both ranges lie in live allocations, which the item's views hold until the copy has run; exclusive
            // by the contract of views.
            match (to_gpu, from_gpu) {
                (true, true) => unsafe { driver.on_device(s, to.0, from.0, bytes)? },
                (true, false) => unsafe { driver.to_device(s, to.0, from.host(), bytes)? },
                (false, true) => unsafe { driver.to_host(s, to.host(), from.0, bytes)? },
                (false, false) => {
                    shared.drain(issuer)?;
                    unsafe { std::ptr::copy(from.host(), to.host(), bytes) };
                    return Ok(());
                }
            }
            issuer.dirty = true;
            Ok(())
        })
    }

    fn fill(&self, dst: &ViewMut, value: f32) -> Result<()> {
        use crate::DType::{BF16, F32, I32, U8};
        let (to, bytes, dtype) = (At::of("fill", dst)?, dst.bytes(), dst.dtype());
        let half = half::bf16::from_f32(value).to_bits();
        // Halves are set in pairs; an odd one at either end is left to the kernel.
        let pairs = to.0.is_multiple_of(4) && bytes.is_multiple_of(4);
        let word = match dtype {
            F32 => Some(value.to_bits()),
            I32 => Some(value as i32 as u32),
            BF16 if pairs => Some(u32::from(half) << 16 | u32::from(half)),
            BF16 | U8 => None,
        };
        if !on_device("fill", dst)? {
            let target = dst.clone();
            return self.task("fill".into(), vec![dst.view()], move |shared, issuer| {
                shared.drain(issuer)?;
                crate::cpu::stream::set_all(&target, value)
            });
        }
        match word {
            None if dtype == BF16 => {
                let launcher = super::device::GpuLauncher::of(&self.shared.setup);
                super::elementwise::fill(&launcher, dst, value, self)
            }
            _ => self.task("fill".into(), vec![dst.view()], move |shared, issuer| {
                issuer.dirty = true;
                // SAFETY: the range lies in a live allocation, which the item's view holds.
                match word {
                    Some(word) => unsafe { shared.driver().set_words(shared.raw, to.0, word, bytes / 4) },
                    None => unsafe { shared.driver().set_bytes(shared.raw, to.0, value as u8, bytes) },
                }
            }),
        }
    }

    fn write(&self, dst: &ViewMut, what: &str, source: HostSource) -> Result<()> {
        let (to, bytes, gpu, task) = (At::of("write", dst)?, dst.bytes(), on_device("write", dst)?, format!("write {what}"));
        let name = Cow::Owned(task.clone());
        self.task(name, vec![dst.view()], move |shared, issuer| {
            let failed = |why: String| shared.task_error(&task, why);
            if !gpu {
                shared.drain(issuer)?;
                if bytes == 0 {
                    return source(&mut []).map_err(failed);
                }
                // SAFETY: host memory that the item's view holds; exclusive by the contract of views.
                return source(unsafe { std::slice::from_raw_parts_mut(to.host(), bytes) }).map_err(failed);
            }
            if bytes <= ring::MOST_BYTES {
                let piece = shared.piece(bytes, issuer)?;
                issuer.dirty = true;
                // SAFETY: a piece of the ring of this length, not in use, initialized when it was mapped.
                source(unsafe { std::slice::from_raw_parts_mut(piece.host, bytes) }).map_err(failed)?;
                // SAFETY: the piece, and device memory that the item's view holds.
                return unsafe { shared.driver().to_device(shared.raw, to.0, piece.host, bytes) };
            }
            let mut staging = vec![0u8; bytes];
            source(&mut staging).map_err(failed)?;
            issuer.dirty = true;
            // SAFETY: both live until the device has passed the copy, which is waited for here.
            unsafe { shared.driver().to_device(shared.raw, to.0, staging.as_ptr(), bytes)? };
            shared.drain(issuer)
        })
    }

    fn read(&self, src: &View) -> Result<Readback> {
        let (from, bytes, gpu) = (At::of("read", src)?, src.bytes(), on_device("read", src)?);
        let out = Arc::new(Mutex::new(Vec::new()));
        let arrived = out.clone();
        self.task("read".into(), vec![src.clone()], move |shared, issuer| {
            if gpu && bytes <= ring::MOST_BYTES {
                let piece = shared.piece(bytes, issuer)?;
                issuer.dirty = true;
                // SAFETY: the piece, and device memory that the item's view holds.
                unsafe { shared.driver().to_host(shared.raw, piece.host, from.0, bytes)? };
                let at = At(piece.host as u64);
                issuer.held.checks.push(Box::new(move || {
                    // SAFETY: the copy to these bytes of the ring has run, and they are not used again before this point was passed.
                    lock(&arrived).extend_from_slice(unsafe { std::slice::from_raw_parts(at.host(), bytes) });
                    Ok(())
                }));
                return Ok(());
            }
            let mut whole = vec![0u8; bytes];
            if gpu {
                issuer.dirty = true;
                // SAFETY: both live until the device has passed the copy, which is waited for here.
                unsafe { shared.driver().to_host(shared.raw, whole.as_mut_ptr(), from.0, bytes)? };
                shared.drain(issuer)?;
            } else {
                shared.drain(issuer)?;
                // SAFETY: host memory that the item's view holds; no writer by the contract of views.
                unsafe { std::ptr::copy_nonoverlapping(from.host(), whole.as_mut_ptr(), bytes) };
            }
            *lock(&arrived) = whole;
            Ok(())
        })?;
        let event: Arc<dyn Event> = Arc::new(GpuEvent::default());
        // If the stream failed meanwhile, the event carries the error to whoever asks for the bytes.
        let _ = self.record(&event);
        Ok(Readback::new(event, out))
    }

    fn host(&self, task: HostTask) -> Result<()> {
        let HostTask { name, reads, writes, run } = task;
        let on_host = |v: &View| v.host_ptr().is_some();
        if !reads.iter().all(on_host) || !writes.iter().all(|v| on_host(v)) {
            let op = if let Cow::Borrowed(name) = name { name } else { "host task" };
            return Err(Error::NotHost { op });
        }
        let views = reads.into_iter().chain(writes.iter().map(|w| w.view())).collect();
        self.task(name, views, move |shared, issuer| {
            shared.drain(issuer)?;
            run()
        })
    }

    fn native(&self, task: NativeTask) -> Result<()> {
        let NativeTask { name, reads, writes, run } = task;
        let views = reads.into_iter().chain(writes.iter().map(|w| w.view())).collect();
        self.task(name, views, move |shared, issuer| {
            issuer.dirty = true;
            run(shared.raw.native())
        })
    }

    fn sync(&self) -> Result<()> {
        let inside = match &self.worker {
            Some(worker) => worker.thread().id() == std::thread::current().id(),
            None => *lock(&self.shared.runner) == Some(std::thread::current().id()),
        };
        if inside {
            return Err(self.shared.task_error("sync", "called from a task of the same stream, which would wait for itself".into()));
        }
        let event: Arc<dyn Event> = Arc::new(GpuEvent::default());
        let _ = self.record(&event);
        event.sync(Duration::MAX)?;
        self.shared.failure()
    }
}
