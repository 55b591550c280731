//! What does a collective do when it runs? First it sends all that its peers need, then it waits for what it needs of them, then it
//! writes its result: so the calls of a group cannot wait for each other. It runs as an operation of its stream.

use super::comm::{Comm, Ended, Tag, die};
use super::reduce::{Op, reduce, type_bytes};
use super::result;
use crate::clock::Kind;
use crate::device::{Device, Machine};
use crate::faults::{Kind as Fault, code};
use crate::stream::{Stream, Task};
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Which operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    AllGather,
    ReduceScatter(Op),
    AllReduce(Op),
    Broadcast(usize),
    Send(usize),
    Recv(usize),
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub what: What,
    pub from: u64,
    pub to: u64,
    /// Elements, as the function counts them.
    pub count: usize,
    pub dtype: i32,
}

/// A call with its place among those of its communicator.
struct Numbered {
    call: Call,
    bytes: usize,
    tag: Tag,
    /// Which collective of this rank it is, from 1; 0 for messages.
    nth: u64,
}

impl Call {
    /// # Errors
    /// A rank, type or operation that there is not.
    pub fn check(&self, comm: &Comm) -> Result<(), i32> {
        let peer = match self.what {
            What::Broadcast(peer) | What::Send(peer) | What::Recv(peer) => peer,
            _ => 0,
        };
        let reduces = matches!(self.what, What::ReduceScatter(_) | What::AllReduce(_));
        let known = type_bytes(self.dtype).is_some() && !(reduces && self.dtype > 9);
        if peer < comm.ranks && known { Ok(()) } else { Err(result::INVALID_ARGUMENT) }
    }

    fn name(&self) -> &'static str {
        match self.what {
            What::AllGather => "all_gather",
            What::ReduceScatter(_) => "reduce_scatter",
            What::AllReduce(_) => "all_reduce",
            What::Broadcast(_) => "broadcast",
            What::Send(_) => "send",
            What::Recv(_) => "recv",
        }
    }

    /// Bytes of (source, target), 0 where a rank has none.
    fn operands(&self, bytes: usize, comm: &Comm) -> (usize, usize) {
        match self.what {
            What::AllGather => (bytes, bytes * comm.ranks),
            What::ReduceScatter(_) => (bytes * comm.ranks, bytes),
            What::AllReduce(_) => (bytes, bytes),
            What::Broadcast(root) => (if root == comm.rank { bytes } else { 0 }, bytes),
            What::Send(_) => (bytes, 0),
            What::Recv(_) => (0, bytes),
        }
    }

    /// Bytes that cross a rank's link.
    fn crossing(&self, bytes: usize, ranks: usize) -> usize {
        match self.what {
            What::AllGather | What::ReduceScatter(_) => bytes * (ranks - 1),
            What::AllReduce(_) => 2 * bytes * (ranks - 1) / ranks,
            What::Broadcast(_) | What::Send(_) | What::Recv(_) => bytes,
        }
    }

    /// The same for all ranks of one operation, another one for another.
    fn fingerprint(&self) -> u64 {
        let (kind, argument) = match self.what {
            What::AllGather => (1, 0),
            What::ReduceScatter(op) => (2, op as u64),
            What::AllReduce(op) => (3, op as u64),
            What::Broadcast(root) => (4, root as u64),
            What::Send(_) | What::Recv(_) => (5, 0),
        };
        (self.count as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (kind << 56 | argument << 40 | self.dtype as u64)
    }
}

/// Enqueues calls of one communicator, which run together.
pub fn enqueue(comm: &Arc<Comm>, stream: &Stream, calls: &[Call]) {
    let settings = &Machine::get().settings;
    let number = |call: &Call| {
        let bytes = call.count * type_bytes(call.dtype).unwrap_or(0);
        let next = |counter: &std::sync::atomic::AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let (tag, nth) = match call.what {
            What::Send(peer) => (Tag::Message(next(&comm.sent[peer])), 0),
            What::Recv(peer) => (Tag::Message(next(&comm.received[peer])), 0),
            _ => {
                let n = next(&comm.collectives);
                (Tag::Collective(n), n + 1)
            }
        };
        Numbered { call: *call, bytes, tag, nth }
    };
    let calls: Vec<Numbered> = calls.iter().map(number).collect();
    let Some(first) = calls.first() else { return };
    let name = Cow::Borrowed(first.call.name());
    let bytes = calls.iter().map(|c| c.call.crossing(c.bytes, comm.ranks) as u64).sum();
    let cost = Kind::Collective.cost(bytes, settings);
    let pending = Pending::of(comm);
    let run = Box::new(move |_: &'static Device| run(&pending.0, &calls));
    stream.task(Task { kind: Kind::Collective, name, bytes, cost, run });
}

/// An operation that has not ended: also one that is skipped, since its device failed, ends.
struct Pending(Arc<Comm>);

impl Pending {
    fn of(comm: &Arc<Comm>) -> Pending {
        comm.pending.fetch_add(1, Ordering::AcqRel);
        Pending(comm.clone())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A source or target, as long as its memory is held.
struct Operand {
    at: u64,
    bytes: usize,
    _held: Option<Arc<crate::memory::Allocation>>,
}

impl Operand {
    fn of(at: u64, bytes: usize) -> Result<Operand, i32> {
        let held = Machine::get().memory.hold(at, bytes as u64);
        if bytes > 0 && held.is_none() {
            return Err(code::ILLEGAL_ADDRESS);
        }
        Ok(Operand { at, bytes, _held: held })
    }

    fn copy(&self, from: usize, bytes: usize) -> Vec<u8> {
        let bytes = bytes.min(self.bytes.saturating_sub(from));
        if bytes == 0 {
            return Vec::new();
        }
        // SAFETY: inside an allocation that is held.
        unsafe { std::slice::from_raw_parts((self.at as *const u8).add(from), bytes) }.to_vec()
    }

    fn write(&self, to: usize, bytes: &[u8]) {
        if bytes.is_empty() || to + bytes.len() > self.bytes {
            return;
        }
        // SAFETY: as above; nobody else writes there, by the order of streams.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (self.at as *mut u8).add(to), bytes.len()) };
    }
}

fn run(comm: &Comm, calls: &[Numbered]) -> Result<(), i32> {
    let machine = Machine::get();
    let operands = |c: &Numbered| {
        let (from, to) = c.call.operands(c.bytes, comm);
        Ok((Operand::of(c.call.from, from)?, Operand::of(c.call.to, to)?))
    };
    let operands = calls.iter().map(operands).collect::<Result<Vec<_>, i32>>()?;
    let nth = calls.iter().map(|c| c.nth).max().unwrap_or(0);
    if nth > 0 && machine.faults.exactly(&Fault::Dead(comm.rank), nth) {
        die();
    }
    std::thread::sleep(Duration::from_millis(machine.faults.late_ms(comm.rank)));
    if nth > 0 && machine.faults.reached(&Fault::Silent(comm.rank), nth) {
        comm.wait_for_abort();
        return Ok(());
    }
    let mut sources = Vec::new();
    for (c, (from, _)) in calls.iter().zip(&operands) {
        let other = c.nth > 0 && machine.faults.exactly(&Fault::Mismatch(comm.rank), c.nth);
        let check = c.call.fingerprint() ^ u64::from(other);
        let source = from.copy(0, from.bytes);
        send(comm, c, check, &source);
        sources.push((check, source));
    }
    for ((c, (_, to)), (check, source)) in calls.iter().zip(&operands).zip(sources) {
        if let Err(Ended) = receive(comm, c, check, source, to) {
            return Ok(());
        }
    }
    Ok(())
}

/// All that peers need of one call.
fn send(comm: &Comm, c: &Numbered, check: u64, source: &[u8]) {
    let others = || (0..comm.ranks).filter(|p| *p != comm.rank);
    match c.call.what {
        What::AllGather | What::AllReduce(_) => others().for_each(|p| comm.send(p, c.tag, check, source)),
        What::ReduceScatter(_) => others().for_each(|p| comm.send(p, c.tag, check, &source[p * c.bytes..(p + 1) * c.bytes])),
        What::Broadcast(root) if root == comm.rank => others().for_each(|p| comm.send(p, c.tag, check, source)),
        // The root waits for nobody.
        What::Broadcast(_) | What::Recv(_) => {}
        // To itself: through its own inbox.
        What::Send(peer) if peer == comm.rank => comm.keep(c.tag, check, source),
        What::Send(peer) => comm.send(peer, c.tag, check, source),
    }
}

/// Waits for what one call needs of its peers, and writes its result.
fn receive(comm: &Comm, c: &Numbered, check: u64, source: Vec<u8>, to: &Operand) -> Result<(), Ended> {
    let seed = Machine::get().settings.reduce_seed.map(|seed| seed ^ c.nth.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let own = |at: usize| source[at..at + c.bytes].to_vec();
    let gather = |own: Vec<u8>| {
        let of = |rank: usize| if rank == comm.rank { Ok(own.clone()) } else { comm.receive(rank, c.tag, check) };
        (0..comm.ranks).map(of).collect::<Result<Vec<_>, Ended>>()
    };
    let reduced = |op: Op, parts: Vec<Vec<u8>>, first: usize| {
        let parts: Vec<&[u8]> = parts.iter().map(|p| &p[..]).collect();
        let mut out = vec![0; c.bytes];
        // The type was checked at the call.
        let _ = reduce(c.call.dtype, &mut out, &parts, op, seed, (first * c.call.count) as u64);
        to.write(0, &out);
    };
    match c.call.what {
        What::AllGather => gather(own(0))?.iter().enumerate().for_each(|(rank, part)| to.write(rank * c.bytes, part)),
        What::ReduceScatter(op) => reduced(op, gather(own(comm.rank * c.bytes))?, comm.rank),
        What::AllReduce(op) => reduced(op, gather(own(0))?, 0),
        What::Broadcast(root) if root == comm.rank => to.write(0, &source),
        What::Broadcast(root) => to.write(0, &comm.receive(root, c.tag, check)?),
        What::Recv(peer) => to.write(0, &comm.receive(peer, c.tag, check)?),
        What::Send(_) => {}
    }
    Ok(())
}
