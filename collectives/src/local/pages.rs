//! How do all ranks get the same pages? Rank 0 makes a sealed memfd and says its number in a broadcast; the others open it.
//! It is a collective like the others: numbered, compared between ranks, with the same deadlines.
#![allow(unsafe_code)]

use super::Seat;
use super::shared::Mapped;
use super::steps::Pass;
use crate::operands::{Call, Op};
use crate::{Error, Result};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::*};
use zrt_kernels::memory::Mapping;
use zrt_kernels::{Buffer, DType, Place};

/// Pages that other ranks map too; threads share one mapping.
struct SharedPages {
    mapped: Arc<Mapped>,
    bytes: usize,
}

// SAFETY: the mapping lives as long as `mapped`, and is at least `bytes` long.
unsafe impl Mapping for SharedPages {
    fn base(&self) -> *mut u8 {
        self.mapped.base()
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Pages are made when touched; without memory behind them that ends the process by a signal. So ask before.
fn check_memory(name: &str, bytes: usize) -> Result<()> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let free = line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<usize>().ok());
    match free {
        Some(free) if bytes / 1024 > free => Err(Error::Device(zrt_kernels::Error::OutOfMemory {
            what: format!("shared pages '{name}'"),
            bytes,
            reason: format!("{} MB are available on this host", free / 1024),
        })),
        _ => Ok(()),
    }
}

pub(super) fn share(seat: &Seat, sequence: u64, name: &str, bytes: usize) -> Result<Buffer> {
    let call = Call { op: Op::SharePages, dtype: DType::U8, elems: bytes, root: 0, tag: name.into() };
    let mapped = seat.in_turn(sequence, &call, |pass| exchange(pass, name, bytes.max(1)))?;
    Ok(Buffer::from_mapping(name, Place::Device, Box::new(SharedPages { mapped, bytes })))
}

fn exchange(pass: &Pass, name: &str, bytes: usize) -> Result<Arc<Mapped>> {
    let seat = pass.seat;
    let created = if seat.rank == 0 {
        check_memory(name, bytes)?;
        let (mapped, fd) = Mapped::create(name, bytes)?;
        let mapped = Arc::new(mapped);
        if seat.group.threads {
            seat.group.pages.lock().unwrap_or_else(|e| e.into_inner()).insert(pass.sequence, mapped.clone());
        }
        Some((mapped, fd))
    } else {
        None
    };
    // SAFETY: a slot has at least a cache line, is aligned to one, and by the step protocol is rank 0's to write and then ours to read.
    let number = |k: usize| unsafe { &*pass.slot(0, k).cast::<AtomicU64>() };
    let opened: std::cell::RefCell<Option<Result<Arc<Mapped>>>> = Default::default();
    // Step 0 tells the number. Rank 0 is in step 2 after all have done step 1, so have taken step 0: then it may close the descriptor.
    pass.run(
        3,
        &|k| {
            if let (0, Some((_, fd))) = (k, &created) {
                number(0).store(fd.as_raw_fd() as u64, Relaxed);
            }
        },
        &|k| {
            if k == 0 && created.is_none() {
                *opened.borrow_mut() = Some(open(pass, number(0).load(Relaxed) as u32, name, bytes));
            }
        },
    )?;
    match (created, opened.into_inner()) {
        (Some((mapped, _)), _) => {
            seat.group.pages.lock().unwrap_or_else(|e| e.into_inner()).remove(&pass.sequence);
            Ok(mapped)
        }
        (None, Some(result)) => result,
        (None, None) => Err(Error::Rendezvous(format!("shared pages '{name}' were not announced"))),
    }
}

fn open(pass: &Pass, fd: u32, name: &str, bytes: usize) -> Result<Arc<Mapped>> {
    let seat = pass.seat;
    if seat.group.threads {
        let pages = seat.group.pages.lock().unwrap_or_else(|e| e.into_inner());
        return pages.get(&pass.sequence).cloned().ok_or_else(|| Error::Rendezvous(format!("shared pages '{name}' are not there")));
    }
    let pid = seat.shared().page(0).pid.load(Relaxed);
    Mapped::open(pid, fd, name, bytes).map(Arc::new)
}
