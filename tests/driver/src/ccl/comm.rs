//! What is a communicator? A rank, sockets to its peers, and what came in from them but was not waited for yet. One thread per peer
//! reads, so that no send waits for a receive that its peer has not begun. Its state is what ncclCommGetAsyncError tells.

use super::bootstrap::{self, ID_BYTES};
use super::result;
use crate::device::{Device, Machine};
use crate::faults::Kind;
use crate::memory::lock;
use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

/// What a message belongs to: a collective by its number, or the n-th message to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tag {
    Collective(u64),
    Message(u64),
}

/// What a peer sent.
pub struct Message {
    /// Says what operation it was sent for.
    pub check: u64,
    pub bytes: Vec<u8>,
}

/// Why nothing more comes from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gone {
    /// It said goodbye.
    Left,
    Died,
}

#[derive(Default)]
struct Inbox {
    messages: HashMap<(usize, Tag), Message>,
    gone: HashMap<usize, Gone>,
}

/// A communicator of one rank.
pub struct Comm {
    pub rank: usize,
    pub ranks: usize,
    pub device: &'static Device,
    pub blocking: bool,
    peers: OnceLock<Vec<Option<UnixStream>>>,
    inbox: Mutex<Inbox>,
    changed: Condvar,
    state: AtomicI32,
    aborted: AtomicBool,
    /// This rank wants nothing more of the others.
    finished: AtomicBool,
    /// Operations that are enqueued and have not ended.
    pub pending: AtomicUsize,
    /// Collectives so far.
    pub collectives: AtomicU64,
    pub sent: Vec<AtomicU64>,
    pub received: Vec<AtomicU64>,
    /// Answers "in progress" to the next question.
    pub first_time: AtomicBool,
}

/// Why an operation does not go on: it returns without a result.
pub struct Ended;

const GOODBYE: u64 = 2;

impl Comm {
    /// Begins to join the ranks of `id`, in a thread of its own.
    pub fn start(id: [u8; ID_BYTES], ranks: usize, rank: usize, device: &'static Device, blocking: bool) -> std::io::Result<Arc<Comm>> {
        let counters = || (0..ranks).map(|_| AtomicU64::new(0)).collect();
        let comm = Arc::new(Comm {
            rank,
            ranks,
            device,
            blocking,
            peers: OnceLock::new(),
            inbox: Mutex::default(),
            changed: Condvar::new(),
            state: AtomicI32::new(result::IN_PROGRESS),
            aborted: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            pending: AtomicUsize::new(0),
            collectives: AtomicU64::new(0),
            sent: counters(),
            received: counters(),
            first_time: AtomicBool::new(!blocking && Machine::get().settings.in_progress),
        });
        let joining = comm.clone();
        std::thread::Builder::new().name("ccl init".into()).spawn(move || joining.join(&id))?;
        Ok(comm)
    }

    fn join(self: &Arc<Comm>, id: &[u8; ID_BYTES]) {
        let faults = &Machine::get().faults;
        if faults.exactly(&Kind::Dead(self.rank), 0) {
            die();
        }
        std::thread::sleep(Duration::from_millis(faults.late_ms(self.rank)));
        if faults.exactly(&Kind::Silent(self.rank), 0) {
            return self.wait_for_abort();
        }
        match bootstrap::join(id, self.ranks, self.rank, &|| self.aborted()) {
            Ok(peers) => {
                for (peer, stream) in peers.iter().enumerate() {
                    let Some(Ok(stream)) = stream.as_ref().map(UnixStream::try_clone) else { continue };
                    let comm = self.clone();
                    let reader = std::thread::Builder::new().name("ccl reader".into());
                    if reader.spawn(move || comm.read(peer, &stream)).is_err() {
                        return self.set_state(result::SYSTEM);
                    }
                }
                let _ = self.peers.set(peers);
                let _ = self.state.compare_exchange(result::IN_PROGRESS, 0, Ordering::AcqRel, Ordering::Acquire);
                self.wake();
            }
            Err(code) => self.set_state(code),
        }
    }

    fn wake(&self) {
        drop(lock(&self.inbox));
        self.changed.notify_all();
    }

    fn set_state(&self, code: i32) {
        self.state.store(code, Ordering::Release);
        self.wake();
    }

    /// 0, "in progress", or what went wrong.
    pub fn state(&self) -> i32 {
        self.state.load(Ordering::Acquire)
    }

    pub fn aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Waits until it has joined or cannot.
    pub fn joined(&self) -> i32 {
        let mut inbox = lock(&self.inbox);
        while self.state() == result::IN_PROGRESS && !self.aborted() {
            inbox = self.changed.wait(inbox).unwrap_or_else(|e| e.into_inner());
        }
        self.state()
    }

    /// Waits as an operation of a real library does whose peers do not come: until it is aborted, or the device is lost.
    pub fn wait_for_abort(&self) {
        let mut inbox = lock(&self.inbox);
        while !self.aborted() && self.device.error() == 0 {
            inbox = self.tick(inbox);
        }
    }

    fn tick<'a>(&self, inbox: std::sync::MutexGuard<'a, Inbox>) -> std::sync::MutexGuard<'a, Inbox> {
        self.changed.wait_timeout(inbox, Duration::from_millis(20)).map_or_else(|e| e.into_inner().0, |(inbox, _)| inbox)
    }

    /// Ends all that waits, here and, since they see it, at the peers.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        self.close();
        self.wake();
    }

    fn close(&self) {
        for stream in self.peers.get().into_iter().flatten().flatten() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Waits for all operations; then nobody misses this rank.
    pub fn finish(&self) {
        let mut inbox = lock(&self.inbox);
        while self.pending.load(Ordering::Acquire) > 0 && !self.aborted() {
            inbox = self.tick(inbox);
        }
        drop(inbox);
        if !self.finished.swap(true, Ordering::AcqRel) {
            for peer in (0..self.ranks).filter(|p| *p != self.rank) {
                let _ = self.write(peer, [GOODBYE, 0, 0, 0], &[]);
            }
        }
    }

    /// [`Comm::finish`] in a thread of its own; "in progress" until then.
    pub fn begin_finish(self: &Arc<Comm>) -> std::io::Result<()> {
        let _ = self.state.compare_exchange(0, result::IN_PROGRESS, Ordering::AcqRel, Ordering::Acquire);
        let comm = self.clone();
        let finish = move || {
            comm.finish();
            let _ = comm.state.compare_exchange(result::IN_PROGRESS, 0, Ordering::AcqRel, Ordering::Acquire);
        };
        std::thread::Builder::new().name("ccl finalize".into()).spawn(finish).map(|_| ())
    }

    /// Closes the sockets, after [`Comm::finish`].
    pub fn destroy(&self) {
        self.finish();
        self.close();
    }

    fn write(&self, peer: usize, header: [u64; 4], bytes: &[u8]) -> std::io::Result<()> {
        let Some(stream) = self.peers.get().and_then(|p| p.get(peer)?.as_ref()) else { return Ok(()) };
        let stop = || self.aborted() || self.device.error() != 0;
        let header: Vec<u8> = header.iter().flat_map(|n| n.to_le_bytes()).collect();
        bootstrap::write_all(stream, &header, &stop)?;
        bootstrap::write_all(stream, bytes, &stop)
    }

    /// Sends to a peer. One that is gone is noticed by what is not received from it.
    pub fn send(&self, peer: usize, tag: Tag, check: u64, bytes: &[u8]) {
        let (kind, number) = match tag {
            Tag::Collective(n) => (0, n),
            Tag::Message(n) => (1, n),
        };
        let _ = self.write(peer, [kind, number, check, bytes.len() as u64], bytes);
    }

    /// Keeps a message of this rank to itself.
    pub fn keep(&self, tag: Tag, check: u64, bytes: &[u8]) {
        lock(&self.inbox).messages.insert((self.rank, tag), Message { check, bytes: bytes.to_vec() });
    }

    /// Waits for what a peer sends for an operation. If it sends something else, or ended, this waits for an abort.
    pub fn receive(&self, peer: usize, tag: Tag, check: u64) -> Result<Vec<u8>, Ended> {
        let mut inbox = lock(&self.inbox);
        loop {
            if self.aborted() || self.device.error() != 0 {
                return Err(Ended);
            }
            if inbox.messages.get(&(peer, tag)).is_some_and(|m| m.check == check)
                && let Some(message) = inbox.messages.remove(&(peer, tag))
            {
                return Ok(message.bytes);
            }
            inbox = self.tick(inbox);
        }
    }

    fn read(&self, peer: usize, stream: &UnixStream) {
        let stop = || self.aborted();
        let mut left = false;
        loop {
            let mut header = [0; 32];
            if bootstrap::read_all(stream, &mut header, &stop).is_err() {
                break;
            }
            let number = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or_default());
            let tag = match number(0) {
                0 => Tag::Collective(number(8)),
                1 => Tag::Message(number(8)),
                _ => {
                    left = true;
                    continue;
                }
            };
            let mut bytes = vec![0; number(24) as usize];
            if bootstrap::read_all(stream, &mut bytes, &stop).is_err() {
                break;
            }
            lock(&self.inbox).messages.insert((peer, tag), Message { check: number(16), bytes });
            self.changed.notify_all();
        }
        let how = if left || self.finished.load(Ordering::Acquire) { Gone::Left } else { Gone::Died };
        lock(&self.inbox).gone.insert(peer, how);
        if how == Gone::Died && Machine::get().settings.dead_peer_errors && !self.aborted() {
            self.state.store(result::REMOTE, Ordering::Release);
        }
        self.changed.notify_all();
    }
}

/// Ends the process as a crash does: at once.
pub fn die() -> ! {
    // SAFETY: no arguments that matter.
    unsafe {
        libc::kill(libc::getpid(), libc::SIGKILL);
        libc::_exit(137)
    }
}
