//! How does a collective get onto a stream? As one or more tasks that hand it to the library on the thread that issues the stream's work,
//! in the order in which collectives were called, each between two events that tell how far the device has come.
#![allow(unsafe_code)]

use super::CclComm;
use super::library::{Api, Outcome, call};
use super::link::Link;
use super::sys::{self, cudaStream_t, ncclComm_t};
use crate::operands::Call;
use crate::{Error, Result};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use zrt_kernels::{DType, NativeStream, NativeTask, Stream, View, ViewMut};

/// What a task gives to the library: its functions, the communicator and the driver's stream.
#[derive(Clone, Copy)]
pub(super) struct To {
    api: Api,
    comm: ncclComm_t,
    stream: cudaStream_t,
}

/// Elements on the device: address, count, type.
#[derive(Clone, Copy)]
pub(super) struct Span {
    address: u64,
    elems: usize,
    dtype: DType,
}

impl Span {
    fn ptr(self) -> *mut c_void {
        self.address as *mut c_void
    }

    fn code(self) -> sys::ncclDataType_t {
        match self.dtype {
            DType::F32 => sys::ncclFloat32,
            DType::BF16 => sys::ncclBfloat16,
            DType::I32 => sys::ncclInt32,
            DType::U8 => sys::ncclUint8,
        }
    }
}

/// The library's collectives. Addresses and counts come from views that the task holds until the device has passed it.
impl To {
    pub fn all_gather(self, dst: Span, src: Span) -> Outcome {
        // SAFETY: the views were checked: dst has `ranks` times the elements of src.
        unsafe { call!(self.api, ncclAllGather, src.ptr(), dst.ptr(), src.elems, src.code(), self.comm, self.stream) }
    }

    pub fn reduce_scatter(self, dst: Span, src: Span) -> Outcome {
        // SAFETY: the views were checked: src has `ranks` times the elements of dst.
        unsafe { call!(self.api, ncclReduceScatter, src.ptr(), dst.ptr(), dst.elems, dst.code(), sys::ncclSum, self.comm, self.stream) }
    }

    pub fn all_reduce(self, data: Span) -> Outcome {
        // SAFETY: in place on one view.
        unsafe { call!(self.api, ncclAllReduce, data.ptr(), data.ptr(), data.elems, data.code(), sys::ncclSum, self.comm, self.stream) }
    }

    pub fn broadcast(self, data: Span, root: usize) -> Outcome {
        // SAFETY: in place on one view; the root was checked.
        unsafe { call!(self.api, ncclBroadcast, data.ptr(), data.ptr(), data.elems, data.code(), root as i32, self.comm, self.stream) }
    }

    /// Sends and receives at once: (peer, what it gets, where what it sends goes).
    pub fn exchange(self, parts: &[(usize, Span, Span)]) -> Outcome {
        let bad = |outcome: &Outcome| !matches!(outcome.1, sys::ncclSuccess | sys::ncclInProgress);
        // SAFETY: a group belongs to this thread; it is closed whatever happens in it, and nothing is sent before.
        unsafe {
            let start = call!(self.api, ncclGroupStart);
            if bad(&start) {
                return start;
            }
            let failed = parts.iter().find_map(|&(peer, send, recv)| {
                let sent = call!(self.api, ncclSend, send.ptr(), send.elems, send.code(), peer as i32, self.comm, self.stream);
                let received = || call!(self.api, ncclRecv, recv.ptr(), recv.elems, recv.code(), peer as i32, self.comm, self.stream);
                Some(sent).filter(bad).or_else(|| Some(received()).filter(bad))
            });
            let end = call!(self.api, ncclGroupEnd);
            failed.unwrap_or(end)
        }
    }
}

/// A collective that has a number. When its last task has run or was dropped, the next may go to the library.
struct Ticket {
    link: Arc<Link>,
    sequence: u64,
    call: Call<'static>,
    /// Tasks that did not run yet.
    left: AtomicUsize,
}

impl Ticket {
    fn run(&self, stream: NativeStream, work: impl FnOnce(To) -> Outcome) -> Result<()> {
        self.link.in_turn(self.sequence)?;
        let what = format!("#{} {}", self.sequence, self.call);
        let api = self.link.library.api;
        self.link.call(&what, |comm| work(To { api, comm, stream: stream.0 as cudaStream_t }))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.left.load(Acquire) > 0 {
            // The others would wait for it. Where the group is lost already, that stays the cause.
            let reason = format!("#{} {} was issued but its stream failed or ended before running it", self.sequence, self.call);
            let rank = self.link.control.rank();
            self.link.control.lose(Error::Aborted { rank, by: rank, reason });
        }
        self.link.turn_over(self.sequence);
    }
}

/// A collective while it is enqueued.
pub(super) struct Issue<'a> {
    pub comm: &'a CclComm,
    pub stream: &'a dyn Stream,
    ticket: Arc<Ticket>,
}

impl Issue<'_> {
    /// What a view covers, for the library.
    pub fn span(&self, view: &View) -> Result<Span> {
        let address = view.address().ok_or_else(|| Error::Operand {
            rank: self.comm.check.rank,
            op: self.ticket.call.op.name(),
            tag: self.ticket.call.tag.to_string(),
            what: format!("{view:?} has no address; expected memory of the device that the communicator was made for"),
        })?;
        Ok(Span { address, elems: view.elems(), dtype: view.dtype() })
    }

    /// Enqueues `work` behind what is on the stream.
    pub fn native(&self, reads: Vec<View>, writes: Vec<ViewMut>, work: impl FnOnce(To) -> Outcome + Send + 'static) -> Result<()> {
        let ticket = self.ticket.clone();
        ticket.left.fetch_add(1, AcqRel);
        let name = ticket.call.task_name();
        let (stream, task) = (self.stream.name().to_string(), name.clone());
        let run = move |native: NativeStream| {
            let done = ticket.run(native, work).map_err(|error| ticket.link.control.lose(error));
            ticket.left.fetch_sub(1, AcqRel);
            done.map_err(|error| zrt_kernels::Error::Task { stream, task, why: error.to_string() })
        };
        Ok(self.stream.native(NativeTask { name: name.into(), reads, writes, run: Box::new(run) })?)
    }
}

impl CclComm {
    /// Numbers, posts and enqueues one collective.
    pub(super) fn enqueue(&self, call: Call, stream: &dyn Stream, body: impl FnOnce(&Issue) -> Result<()>) -> Result<()> {
        let control = &self.link.control;
        // Whoever calls first is first on every rank: numbers, posts and streams must agree.
        let _order = self.order.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(error) = control.error() {
            return Err(error);
        }
        self.counters.add(&call, self.check.ranks);
        let sequence = self.watched.post(&call).map_err(|error| control.lose(error))?;
        let call = call.into_owned();
        let ticket = Arc::new(Ticket { link: self.link.clone(), sequence, call: call.clone(), left: AtomicUsize::new(0) });
        let issued = (|| {
            let (begun, done) = self.watched.events(&*self.device)?;
            stream.record(&begun)?;
            // Before the body: on an inline stream that is the whole collective.
            let enqueued = self.watched.follow(sequence, call, begun, done.clone());
            body(&Issue { comm: self, stream, ticket: ticket.clone() })?;
            stream.record(&done)?;
            enqueued.store(true, Release);
            Ok(())
        })();
        // It has a number, so the others count on it. Before the ticket goes, which could only say that a task did not run.
        issued.map_err(|error| control.lose(error))
    }
}
