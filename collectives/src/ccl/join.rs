//! How do ranks become a communicator of the library? They meet in a local group, rank 0 hands out the library's id through the store, and each
//! asks for its place; a rank that fails or does not come ends it for all, before the deadline.
#![allow(unsafe_code)]

use super::board::{self, Board};
use super::library::Library;
use super::link::Link;
use super::watch::{Watch, Watched};
use super::{CclComm, CclOptions, settings, sys};
use crate::local::{Control, LocalOptions};
use crate::operands::{Check, Counters};
use crate::store::Store;
use crate::{Error, Result};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use zrt_kernels::{Category, Device, NativeTask, Place};

/// Time between looks at whether the group is lost.
const SLICE: Duration = Duration::from_millis(20);

impl CclComm {
    /// Joins the ranks' communicator for `device`. Blocks until all ranks have joined, at most `options.init_timeout`.
    ///
    /// # Errors
    /// The library or one of its functions is missing; a rank did not come, died, or failed in it.
    pub fn join(store: Arc<dyn Store>, rank: usize, ranks: usize, device: Arc<dyn Device>, options: CclOptions) -> Result<CclComm> {
        let library = Library::load(options.vendor, options.library.as_deref())?;
        CclComm::join_with(library, store, rank, ranks, device, options)
    }

    /// As [`CclComm::join`] with a library that is loaded.
    #[doc(hidden)]
    pub fn join_with(
        library: Arc<Library>,
        store: Arc<dyn Store>,
        rank: usize,
        ranks: usize,
        device: Arc<dyn Device>,
        options: CclOptions,
    ) -> Result<CclComm> {
        let until = crate::store::from_now(options.init_timeout);
        let local = LocalOptions {
            name: format!("ccl {}", options.name),
            init_timeout: options.init_timeout,
            train_timeout: options.train_timeout,
            heartbeat_timeout: options.heartbeat_timeout,
            ..LocalOptions::default()
        };
        let control = Arc::new(Control::join(&*store, rank, ranks, board::BYTES, local)?);
        if rank == 0 {
            tracing::info!("collectives: {}, {ranks} ranks", library.name());
        }
        settings::log(options.vendor, ranks);
        let link = Arc::new(Link::new(library, control.clone()));
        let joined = connect(&link, &*store, &device, &options, until).and_then(|()| {
            let hold = |(name, bytes)| device.alloc(name, bytes, Place::Device, Category::Libraries);
            let [scratch, flag] = options.memory(ranks).map(hold);
            let (scratch, flag) = (scratch?, flag?);
            let watched = Arc::new(Watched::new(Board::new(control.clone())));
            let watch = Watch::start(link.clone(), watched.clone(), options.train_timeout, options.heartbeat_timeout)?;
            Ok((scratch, flag, device.event()?, watched, watch))
        });
        match joined {
            Ok((scratch, flag, scratch_free, watched, watch)) => Ok(CclComm {
                check: Check { rank, ranks },
                name: options.name,
                deterministic: options.deterministic,
                device,
                scratch,
                scratch_free,
                flag,
                order: Mutex::new(()),
                counters: Counters::default(),
                watched,
                watch: Some(watch),
                copies: None,
                link,
            }),
            Err(error) => {
                let error = control.lose(error);
                link.finish();
                Err(error)
            }
        }
    }
}

/// Makes the library's communicator.
fn connect(link: &Arc<Link>, store: &dyn Store, device: &Arc<dyn Device>, options: &CclOptions, until: Instant) -> Result<()> {
    let control = &link.control;
    let id = unique_id(link, store, &options.name, until)?;
    // The library takes the device that is current in the calling thread, and an old one blocks in it until all ranks have come: a stream's
    // thread has the device, and this one has nothing else to do.
    let stream = device.stream("ccl init")?;
    let (done, wait) = channel();
    let theirs = link.clone();
    let run = move |_| {
        let _ = done.send(theirs.init(id));
        Ok(())
    };
    stream.native(NativeTask { name: "ccl init".into(), reads: vec![], writes: vec![], run: Box::new(run) })?;
    let begun = loop {
        match wait.recv_timeout(SLICE) {
            Ok(begun) => break begun,
            Err(RecvTimeoutError::Disconnected) => {
                // It was dropped unrun: the stream knows why.
                stream.sync()?;
                break Err(Error::Rendezvous("the stream for init ended without running it".to_string()));
            }
            Err(RecvTimeoutError::Timeout) if control.error().is_some() || Instant::now() >= until => {
                // Its thread is in the library, and would be waited for.
                std::mem::forget(stream);
                let late = || Error::Rendezvous(format!("{}: init did not return before its deadline", link.library.name()));
                return Err(control.error().unwrap_or_else(late));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    };
    begun.map_err(|error| match error {
        Error::Device(error) => link.explain(Some(error)),
        other => other,
    })?;
    link.settle("init", "ncclCommInitRankConfig", sys::ncclInProgress, Some(until))?;
    match link.count()? {
        count if count == control.ranks() => Ok(()),
        count => Err(Error::Rendezvous(format!("{} made a group of {count} ranks, expected {}", link.library.name(), control.ranks()))),
    }
}

/// Rank 0 asks the library for an id and hands it out.
fn unique_id(link: &Link, store: &dyn Store, name: &str, until: Instant) -> Result<sys::ncclUniqueId> {
    let key = format!("ccl/{name}/id");
    if link.control.rank() == 0 {
        let mut id = sys::ncclUniqueId { internal: [0; sys::NCCL_UNIQUE_ID_BYTES as usize] };
        // SAFETY: writes the id.
        let code = unsafe { (link.library.api.ncclGetUniqueId)(&mut id) };
        link.library.check("init", ("ncclGetUniqueId", code), std::ptr::null_mut())?;
        store.set(&key, &id.internal.map(|byte| byte as u8))?;
        return Ok(id);
    }
    let bytes = await_key(link, store, &key, until)?;
    let internal = <[u8; sys::NCCL_UNIQUE_ID_BYTES as usize]>::try_from(&bytes[..])
        .map_err(|_| Error::Rendezvous(format!("'{key}' has {} bytes, expected {}", bytes.len(), sys::NCCL_UNIQUE_ID_BYTES)))?;
    Ok(sys::ncclUniqueId { internal: internal.map(|byte| byte as _) })
}

/// What a rank sets under `key`, as long as the group is good.
pub(super) fn await_key(link: &Link, store: &dyn Store, key: &str, until: Instant) -> Result<Vec<u8>> {
    while !store.check(&[key])? {
        if let Some(error) = link.control.error() {
            return Err(error);
        }
        if Instant::now() >= until {
            return Err(Error::Rendezvous(format!("rank {}: nobody set '{key}' before the deadline", link.control.rank())));
        }
        std::thread::sleep(SLICE);
    }
    store.get(key, SLICE)
}
