//! What do the ranks of one host share, and where in the mapping does it lie?
//!
//! One memfd, its length sealed, holds a header, control pages and two staging slots per rank. It has no name in any
//! file system, so nothing is left behind when the processes die. Everything outside slots and mail is atomic words: a rank may be
//! stopped or killed between any two stores, and readers must still make sense of what they see.
//!
//! ```text
//! [ header 4096 | control pages of rank 0 | of rank 1 | ... | slot 0, slot 1 of rank 0 | slot 0, slot 1 of rank 1 | ... ]
//! ```
//!
//! **Lines.** What other ranks poll has a cache line of its own, written by one rank only: a line that two ranks write, or that one polls while
//! another word of it changes, costs a trip between cores each time. The status words beside it are read only when something is wrong.
//!
//! **Ordering.** A rank writes its slot, mail or entry, then stores the number that announces it (the entry's sequence, a mail line's
//! sequence, `steps`) with Release and wakes who sleeps; whoever loads that number with Acquire sees what was written before it.
#![allow(unsafe_code)]

use super::LocalOptions;
use super::lost::LostCell;
use crate::operands::Call;
use crate::tree::MAX_RANKS;
use crate::{Error, Result};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::cell::UnsafeCell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Bytes of the header; control areas and slots begin at multiples of it.
const PAGE_BYTES: usize = 4096;
/// Bytes of one rank's control pages.
const CONTROL_BYTES: usize = size_of::<Page>().next_multiple_of(PAGE_BYTES);
/// Slots begin at cache lines.
const LINE_BYTES: usize = 64;
const MAGIC: u64 = 0x7a72_742d_6c6f_6335;

/// Text in shared memory, cut to fit.
#[repr(C)]
pub(crate) struct Text<const WORDS: usize> {
    bytes: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Text<WORDS> {
    /// Not a publication: a later Release store must follow.
    pub fn set(&self, text: &str) {
        let end = (0..=text.len().min(WORDS * 8)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        self.bytes.store(end as u64, Relaxed);
        for (word, chunk) in self.words.iter().zip(text.as_bytes()[..end].chunks(8)) {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(eight), Relaxed);
        }
    }

    pub fn get(&self) -> String {
        let bytes: Vec<u8> = self.words.iter().flat_map(|w| w.load(Relaxed).to_le_bytes()).collect();
        let end = (self.bytes.load(Relaxed) as usize).min(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}

/// What a rank issued at one place in the sequence, in one line: the number that announces it, and what is compared.
#[repr(C, align(64))]
pub(super) struct Entry {
    /// The collective's number; stored last.
    sequence: AtomicU64,
    /// Operation, dtype and root: 8, 8 and 32 bits.
    kind: AtomicU64,
    elems: AtomicU64,
    /// Of the whole tag, since the text is cut.
    tag_hash: AtomicU64,
}

/// Bytes of a message in one line of mail.
pub(super) const MAIL_BYTES: usize = 56;
/// Lines of a short message, 2 KiB: beyond that, slots are faster (a line of mail carries its number, a slot does not).
pub(super) const MAIL_LINES: usize = 37;

/// Part of a short message, with its own number: it is taken as soon as it is there, without a second look at the entry.
#[repr(C, align(64))]
pub(super) struct MailLine {
    data: UnsafeCell<[u8; MAIL_BYTES]>,
    sequence: AtomicU64,
}

impl MailLine {
    /// Writes up to `MAIL_BYTES` bytes and announces them.
    ///
    /// # Safety
    /// Only the rank that owns the line, in a collective whose number has the line's parity; `src` valid for `bytes`.
    pub unsafe fn post(&self, src: *const u8, bytes: usize, sequence: u64) {
        // SAFETY: by the contract; all ranks have left collective `sequence - 2`, so nobody reads the line.
        unsafe { copy_line(self.data.get().cast(), src, bytes) };
        self.sequence.store(sequence, Release);
    }

    pub fn arrived(&self, sequence: u64) -> bool {
        self.sequence.load(Acquire) == sequence
    }

    /// Reads what was announced.
    ///
    /// # Safety
    /// After `arrived` said so, in the same collective; `dst` valid for `bytes`, at most `MAIL_BYTES`.
    pub unsafe fn take(&self, dst: *mut u8, bytes: usize) {
        // SAFETY: by the contract; the line is written again only after this rank has entered the next collective.
        unsafe { copy_line(dst, self.data.get().cast_const().cast(), bytes) };
    }
}

/// A whole line is the usual case, and its fixed length is a few vector moves instead of a call.
///
/// # Safety
/// As of `copy_nonoverlapping`.
#[inline(always)]
unsafe fn copy_line(dst: *mut u8, src: *const u8, bytes: usize) {
    // SAFETY: passed on.
    unsafe {
        match bytes {
            MAIL_BYTES => std::ptr::copy_nonoverlapping(src, dst, MAIL_BYTES),
            _ => std::ptr::copy_nonoverlapping(src, dst, bytes),
        }
    }
}

/// One collective as a rank announces it: the entry that is compared, the tag's text for messages, and the mail.
#[repr(C, align(64))]
pub(super) struct Letter {
    entry: Entry,
    mail: [MailLine; MAIL_LINES],
    tag: Text<8>,
}

impl Letter {
    /// Announces `call` as number `sequence`; what was written before is announced with it.
    pub fn announce(&self, sequence: u64, call: &Call) {
        let (entry, tag_hash) = (&self.entry, call.tag_hash());
        if entry.tag_hash.load(Relaxed) != tag_hash || entry.sequence.load(Relaxed) == 0 {
            entry.tag_hash.store(tag_hash, Relaxed);
            self.tag.set(&call.tag);
        }
        entry.kind.store(call.kind(), Relaxed);
        entry.elems.store(call.elems as u64, Relaxed);
        entry.sequence.store(sequence, Release);
    }

    pub fn arrived(&self, sequence: u64) -> bool {
        self.entry.sequence.load(Acquire) == sequence
    }

    pub fn equals(&self, other: &Letter) -> bool {
        let words = |l: &Letter| (l.entry.kind.load(Relaxed), l.entry.elems.load(Relaxed), l.entry.tag_hash.load(Relaxed));
        words(self) == words(other)
    }

    /// The call; a tag longer than 64 bytes comes back cut.
    pub fn call(&self) -> Option<Call<'static>> {
        Call::from_words(self.entry.kind.load(Relaxed), self.entry.elems.load(Relaxed), self.tag.get())
    }

    /// Takes the lines that a message of `lines` lines will be written to back from the cores that read them, while there is time: a store to
    /// a line that another core has waits for a trip between cores.
    #[inline(always)]
    pub fn claim(&self, lines: usize) {
        claim(&raw const self.entry);
        self.mail.iter().take(lines).for_each(|line| claim(line));
    }

    pub fn line(&self, index: usize) -> &MailLine {
        &self.mail[index]
    }
}

/// Asks for a line that is about to be stored to. Only advice.
#[inline(always)]
fn claim<T>(line: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing; x86-64 processors without it take it for a no-op.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
    let _ = line;
}

/// Whether a wrapping counter has come to `target`.
pub(super) fn reached(counter: u32, target: u32) -> bool {
    counter.wrapping_sub(target) as i32 >= 0
}

/// A value on a cache line of its own.
#[repr(C, align(64))]
pub(super) struct Line<T>(pub T);

/// How others learn that this rank went on.
#[repr(C, align(64))]
pub(super) struct Bell {
    /// Futex word: changes when somebody is to be woken.
    pub word: AtomicU32,
    /// Threads asleep on it; nobody to wake costs no system call.
    pub sleepers: AtomicU32,
}

/// The control pages of one rank; only that rank's process writes them (the bell aside).
#[repr(C)]
pub(super) struct Page {
    /// Steps done over all collectives: step s is done when this rank has taken it and filled its slot for step s + 1.
    pub steps: Line<AtomicU32>,
    pub bell: Bell,
    /// By sequence number modulo 2. Two are enough: a rank enters n+2 only after all have entered n+1, that is, left n.
    letters: [Letter; 2],
    /// Sequence number (its low bits) of the last collective entered; numbers begin at 1. For messages, as is the rest.
    pub arrived: AtomicU32,
    /// Sequence number of the last collective finished.
    pub completed: AtomicU64,
    pub heartbeat: AtomicU64,
    pub pid: AtomicU32,
    /// 1 once this rank is mapped and known.
    pub joined: AtomicU32,
    /// 1 once this rank has left in order.
    pub left: AtomicU32,
    pub start_time: AtomicU64,
    /// The cores that this rank may run on, a bit each.
    pub cores: [AtomicU64; 16],
}

impl Page {
    pub fn letter(&self, sequence: u64) -> &Letter {
        &self.letters[(sequence % 2) as usize]
    }

    /// Changes whenever the rank gets anywhere.
    pub fn whatever_moves(&self) -> (u32, u64, u32) {
        (self.arrived.load(Acquire), self.completed.load(Acquire), self.steps.0.load(Acquire))
    }

    /// `"last completed #16 reduce_scatter layers.4"` and where the rank is now.
    pub fn whereabouts(&self) -> String {
        let arrived = self.arrived.load(Acquire);
        let completed = self.completed.load(Acquire);
        let name = |sequence: u64| self.letter(sequence).call().map_or("?".to_string(), |call| call.task_name());
        let mut text = match completed {
            0 => "no collective completed yet".to_string(),
            n => format!("last completed #{n} {}", name(n)),
        };
        if arrived == (completed as u32).wrapping_add(1) {
            text += &format!(", now in #{} {}", completed + 1, name(completed + 1));
        }
        text
    }
}

#[repr(C)]
pub(super) struct Header {
    magic: AtomicU64,
    ranks: AtomicU64,
    segment_bytes: AtomicU64,
    pub lost: LostCell,
}

const _: () = assert!(size_of::<Header>() <= PAGE_BYTES);

/// A mapping of a memfd, unmapped on drop.
pub(super) struct Mapped {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; what lies in it is atomics, or slots governed by the counters.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: base and bytes are what mmap returned, and nobody refers to the mapping any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
    }
}

fn system(what: &str, e: rustix::io::Errno) -> Error {
    Error::Rendezvous(format!("shared memory: {what}: {e}"))
}

impl Mapped {
    /// A new memfd of `bytes` (at least 1) zeros; its length can never change, so touching it cannot fault.
    pub fn create(name: &str, bytes: usize) -> Result<(Mapped, OwnedFd)> {
        let label: String = name.chars().filter(|c| *c != '\0').take(60).collect();
        let fd = rustix::fs::memfd_create(format!("zrt {label}"), MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| system(&format!("memfd_create '{name}'"), e))?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|e| system(&format!("sizing '{name}' to {bytes} bytes"), e))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| system(&format!("sealing '{name}'"), e))?;
        Ok((Mapped::map(&fd, name, bytes)?, fd))
    }

    /// Opens what another process of this user created.
    pub fn open(pid: u32, fd: u32, name: &str, bytes: usize) -> Result<Mapped> {
        let path = format!("/proc/{pid}/fd/{fd}");
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(&path);
        let file = opened.map_err(|e| {
            Error::Rendezvous(format!(
                "shared memory: opening '{name}' as {path}: {e}; ranks must share a host, a user and a process namespace"
            ))
        })?;
        let sealed = rustix::fs::fcntl_get_seals(&file).is_ok_and(|s| s.contains(SealFlags::SHRINK));
        let got = file.metadata().map(|m| m.len()).unwrap_or(0);
        if !sealed || got != bytes as u64 {
            return Err(Error::Rendezvous(format!(
                "shared memory: {path} has {got} bytes, expected {bytes} and a sealed length for '{name}'"
            )));
        }
        Mapped::map(&file, name, bytes)
    }

    fn map(fd: impl AsFd, name: &str, bytes: usize) -> Result<Mapped> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh shared mapping at an address that the kernel chooses touches no existing memory.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, fd, 0) };
        match base {
            Ok(base) => Ok(Mapped { base: base.cast(), bytes }),
            Err(e) => Err(system(&format!("mapping {bytes} bytes of '{name}'"), e)),
        }
    }

    pub fn base(&self) -> *mut u8 {
        self.base
    }
}

/// The control area of a group.
pub(super) struct Shared {
    mapped: Mapped,
    pub ranks: usize,
    /// Bytes of one slot.
    pub segment_bytes: usize,
}

/// A slot holds a part for every rank, at least a cache line each.
fn slot_bytes(ranks: usize, options: &LocalOptions) -> usize {
    options.segment_bytes.max(ranks * LINE_BYTES).next_multiple_of(LINE_BYTES)
}

pub(super) fn layout_bytes(ranks: usize, options: &LocalOptions) -> Result<usize> {
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(Error::Rendezvous(format!("a local group of {ranks} ranks, expected 1 to {MAX_RANKS}")));
    }
    let slots = options.segment_bytes.checked_mul(2 * ranks).filter(|b| *b < 1 << 40);
    match slots {
        Some(_) => Ok(PAGE_BYTES + ranks * CONTROL_BYTES + 2 * ranks * slot_bytes(ranks, options)),
        None => Err(Error::Rendezvous(format!("segment_bytes = {} is too large", options.segment_bytes))),
    }
}

impl Shared {
    pub fn create(ranks: usize, options: &LocalOptions) -> Result<(Shared, OwnedFd)> {
        let (mapped, fd) = Mapped::create("group", layout_bytes(ranks, options)?)?;
        let shared = Shared { mapped, ranks, segment_bytes: slot_bytes(ranks, options) };
        let header = shared.header();
        header.ranks.store(ranks as u64, Relaxed);
        header.segment_bytes.store(shared.segment_bytes as u64, Relaxed);
        header.magic.store(MAGIC, Release);
        Ok((shared, fd))
    }

    pub fn open(pid: u32, fd: u32, ranks: usize, options: &LocalOptions) -> Result<Shared> {
        let mapped = Mapped::open(pid, fd, "group", layout_bytes(ranks, options)?)?;
        let shared = Shared { mapped, ranks, segment_bytes: slot_bytes(ranks, options) };
        let header = shared.header();
        let magic = header.magic.load(Acquire);
        let (their_ranks, their_bytes) = (header.ranks.load(Relaxed), header.segment_bytes.load(Relaxed));
        if magic != MAGIC || (their_ranks, their_bytes) != (ranks as u64, shared.segment_bytes as u64) {
            return Err(Error::Rendezvous(format!(
                "rank 0 made a group of {their_ranks} ranks and slots of {their_bytes} bytes (format {magic:x}), expected {ranks} ranks and {} bytes (format {MAGIC:x}); all ranks need the same options and version",
                shared.segment_bytes
            )));
        }
        Ok(shared)
    }

    pub fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a header, zeroed at first, made of atomics only.
        unsafe { &*self.mapped.base.cast::<Header>() }
    }

    pub fn page(&self, rank: usize) -> &Page {
        assert!(rank < self.ranks);
        // SAFETY: the layout has one `Page` per rank after the header, at a page boundary, zeroed at first; it is made of atomics, and of
        // mail that is touched by its own rules.
        unsafe { &*self.mapped.base.add(PAGE_BYTES + rank * CONTROL_BYTES).cast::<Page>() }
    }

    /// The cores that the ranks may run on, together.
    pub fn cores(&self) -> usize {
        let all = |word: usize| (0..self.ranks).fold(0, |bits, rank| bits | self.page(rank).cores[word].load(Relaxed));
        (0..16).map(|word| all(word).count_ones() as usize).sum()
    }

    /// The staging memory of `rank`: two slots, or as many smaller ones as a group cuts it into.
    pub fn staging(&self, rank: usize) -> *mut u8 {
        assert!(rank < self.ranks);
        // SAFETY: the layout has two slots per rank after the control pages.
        unsafe { self.mapped.base.add(PAGE_BYTES + self.ranks * CONTROL_BYTES + 2 * rank * self.segment_bytes) }
    }
}
