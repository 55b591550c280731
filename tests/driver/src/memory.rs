//! What is an address? Device memory is pages of one memory file per device and process, so that another process can open a part of
//! it; a guard page stands on each side of an allocation, and freed addresses are never given out again. One map of the process
//! knows every allocation of every device and all pinned host memory, and tells copies and launches what they may touch.

use crate::faults::code;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use zrt_simt::launcher::Range;

pub const PAGE: u64 = 4096;

/// Locks, whoever panicked before.
pub fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}

/// Whose an allocation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Device(usize),
    /// Another process's memory, opened for this device.
    Opened(usize),
    /// Pinned host memory that the driver allocated.
    Host,
    /// Pinned host memory that the caller registered.
    Registered,
}

/// A part of a memory file, mapped between two guard pages; the addresses stay reserved for good.
struct Mapping {
    base: u64,
    bytes: u64,
    /// The file whose pages go with it, and where they are in it.
    punch: Option<(Arc<OwnedFd>, u64)>,
}

impl Mapping {
    fn new(file: &OwnedFd, offset: u64, bytes: u64) -> Option<Mapping> {
        let whole = bytes.next_multiple_of(PAGE);
        let reserved = (whole + 2 * PAGE) as usize;
        // SAFETY: new addresses without access; then pages of the file over their middle.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            let outer = libc::mmap(std::ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0);
            if outer == libc::MAP_FAILED {
                return None;
            }
            let at = outer.add(PAGE as usize);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let inner = libc::mmap(at, whole as usize, access, libc::MAP_SHARED | libc::MAP_FIXED, file.as_raw_fd(), offset as i64);
            (inner != libc::MAP_FAILED).then(|| Mapping { base: at as u64, bytes: whole, punch: None })
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: these pages are ours, and whoever may still use them holds the mapping.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            libc::mmap(self.base as *mut libc::c_void, self.bytes as usize, libc::PROT_NONE, flags, -1, 0);
            if let Some((file, offset)) = &self.punch {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                libc::fallocate(file.as_raw_fd(), mode, *offset as i64, self.bytes as i64);
            }
        }
    }
}

/// One allocation, or a registered range of the caller's.
pub struct Allocation {
    pub begin: u64,
    pub bytes: u64,
    pub owner: Owner,
    mapping: Option<Mapping>,
}

impl Allocation {
    pub fn end(&self) -> u64 {
        self.begin + self.bytes
    }
}

/// What a device may touch at one time; the memory stays mapped as long as this lives.
pub struct Snapshot {
    /// Disjoint, ascending.
    pub ranges: Vec<Range>,
    _held: Vec<Arc<Allocation>>,
}

struct Arena {
    file: Arc<OwnedFd>,
    next: u64,
    used: u64,
}

struct State {
    map: BTreeMap<u64, Arc<Allocation>>,
    arenas: Vec<Arena>,
    snapshots: Vec<Option<Arc<Snapshot>>>,
}

/// Memory of a process's devices.
pub struct Memory {
    state: Mutex<State>,
    capacity: u64,
    poison: bool,
}

/// What another process needs to open an allocation: its process, the file there, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    pub process: u64,
    pub file: u64,
    pub offset: u64,
    pub bytes: u64,
}

fn memory_file() -> Option<OwnedFd> {
    // SAFETY: a new file, owned by what is returned.
    unsafe {
        let fd = libc::memfd_create(c"zrt-emulated-gpu".as_ptr(), libc::MFD_CLOEXEC);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
    }
}

impl Memory {
    /// Memory of `devices` with `capacity` bytes each; `None` without memory files.
    pub fn new(devices: usize, capacity: u64, poison: bool) -> Option<Memory> {
        let arena = |_| Some(Arena { file: Arc::new(memory_file()?), next: 0, used: 0 });
        // The last one is the host's.
        let arenas = (0..devices + 1).map(arena).collect::<Option<Vec<_>>>()?;
        let state = State { map: BTreeMap::new(), arenas, snapshots: vec![None; devices] };
        Some(Memory { state: Mutex::new(state), capacity, poison })
    }

    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes that are not allocated.
    pub fn free_bytes(&self, device: usize) -> u64 {
        self.capacity - lock(&self.state).arenas[device].used
    }

    fn insert(state: &mut State, allocation: Allocation) {
        state.map.insert(allocation.begin, Arc::new(allocation));
        state.snapshots.iter_mut().for_each(|s| *s = None);
    }

    fn map_new(state: &mut State, arena: usize, bytes: u64, owner: Owner) -> Result<u64, i32> {
        let arena = &mut state.arenas[arena];
        let whole = bytes.checked_next_multiple_of(PAGE).ok_or(code::OUT_OF_MEMORY)?;
        let offset = arena.next;
        // SAFETY: grows our own file.
        if unsafe { libc::ftruncate(arena.file.as_raw_fd(), (offset + whole) as i64) } != 0 {
            return Err(code::OUT_OF_MEMORY);
        }
        let mut mapping = Mapping::new(&arena.file, offset, bytes).ok_or(code::OUT_OF_MEMORY)?;
        mapping.punch = Some((arena.file.clone(), offset));
        arena.next += whole;
        arena.used += whole;
        // Ends where its page ends, so that the first byte behind it is the guard's, but begins aligned as a driver's memory does.
        let begin = mapping.base + (whole - bytes) / 512 * 512;
        Self::insert(state, Allocation { begin, bytes, owner, mapping: Some(mapping) });
        Ok(begin)
    }

    /// Allocates device memory, filled with ones: NaN as f32 and bf16, -1 as an integer.
    pub fn allocate(&self, device: usize, bytes: u64) -> Result<u64, i32> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let mut state = lock(&self.state);
        let whole = bytes.checked_next_multiple_of(PAGE).ok_or(code::OUT_OF_MEMORY)?;
        if whole > self.capacity - state.arenas[device].used {
            return Err(code::OUT_OF_MEMORY);
        }
        let begin = Self::map_new(&mut state, device, bytes, Owner::Device(device))?;
        drop(state);
        if self.poison {
            // SAFETY: just allocated; nobody else knows the address.
            unsafe { std::ptr::write_bytes(begin as *mut u8, 0xff, bytes as usize) };
        }
        Ok(begin)
    }

    /// Allocates pinned host memory.
    pub fn allocate_host(&self, bytes: u64) -> Result<u64, i32> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        let mut state = lock(&self.state);
        let host = state.arenas.len() - 1;
        Self::map_new(&mut state, host, bytes, Owner::Host)
    }

    /// Pins the caller's memory.
    pub fn register(&self, begin: u64, bytes: u64) -> Result<(), i32> {
        if bytes == 0 || begin == 0 || begin.checked_add(bytes).is_none() {
            return Err(code::INVALID_VALUE);
        }
        let mut state = lock(&self.state);
        if state.map.range(..begin + bytes).next_back().is_some_and(|(_, a)| a.end() > begin) {
            return Err(code::ALREADY_REGISTERED);
        }
        Self::insert(&mut state, Allocation { begin, bytes, owner: Owner::Registered, mapping: None });
        Ok(())
    }

    /// Takes back what begins here and is `owner`'s; `otherwise` if nothing is.
    pub fn remove(&self, begin: u64, owner: impl Fn(Owner) -> bool, otherwise: i32) -> Result<Owner, i32> {
        let mut state = lock(&self.state);
        if !state.map.get(&begin).is_some_and(|a| owner(a.owner)) {
            return Err(otherwise);
        }
        let Some(gone) = state.map.remove(&begin) else { return Err(otherwise) };
        state.snapshots.iter_mut().for_each(|s| *s = None);
        if let Owner::Device(device) = gone.owner {
            state.arenas[device].used -= gone.bytes.next_multiple_of(PAGE);
        }
        Ok(gone.owner)
    }

    /// The allocation that holds all of these bytes.
    pub fn find(&self, at: u64, bytes: u64) -> Option<Owner> {
        let state = lock(&self.state);
        let (_, a) = state.map.range(..=at).next_back()?;
        at.checked_add(bytes).is_some_and(|end| end <= a.end()).then_some(a.owner)
    }

    /// Whether the first byte is in some allocation.
    pub fn begins_inside(&self, at: u64) -> bool {
        self.find(at, 1).is_some()
    }

    /// What `device` may touch now: its own memory, what it opened, and pinned memory.
    pub fn snapshot(&self, device: usize) -> Arc<Snapshot> {
        let mut state = lock(&self.state);
        if let Some(snapshot) = &state.snapshots[device] {
            return snapshot.clone();
        }
        let ours = |a: &Arc<Allocation>| match a.owner {
            Owner::Device(d) | Owner::Opened(d) => d == device,
            Owner::Host | Owner::Registered => true,
        };
        let held: Vec<Arc<Allocation>> = state.map.values().filter(|a| ours(a)).cloned().collect();
        let ranges = held.iter().map(|a| Range::new(a.begin, a.end(), true)).collect();
        let snapshot = Arc::new(Snapshot { ranges, _held: held });
        state.snapshots[device] = Some(snapshot.clone());
        snapshot
    }

    /// Keeps the allocation around `at` mapped.
    pub fn hold(&self, at: u64, bytes: u64) -> Option<Arc<Allocation>> {
        let state = lock(&self.state);
        let (_, a) = state.map.range(..=at).next_back()?;
        at.checked_add(bytes).is_some_and(|end| end <= a.end()).then(|| a.clone())
    }

    /// How another process opens the allocation that begins here.
    pub fn share(&self, begin: u64) -> Result<Shared, i32> {
        let state = lock(&self.state);
        let a = state.map.get(&begin).filter(|a| matches!(a.owner, Owner::Device(_))).ok_or(code::INVALID_VALUE)?;
        let mapping = a.mapping.as_ref().ok_or(code::INVALID_VALUE)?;
        let (file, offset) = mapping.punch.as_ref().ok_or(code::INVALID_VALUE)?;
        let file = file.as_raw_fd() as u64;
        Ok(Shared { process: std::process::id().into(), file, offset: offset + (begin - mapping.base), bytes: a.bytes })
    }

    /// Opens another process's allocation.
    pub fn open(&self, device: usize, shared: Shared) -> Result<u64, i32> {
        let path = format!("/proc/{}/fd/{}", shared.process, shared.file);
        let file = File::options().read(true).write(true).open(path).map_err(|_| code::INVALID_VALUE)?;
        let within = shared.offset % PAGE;
        let mapping = Mapping::new(&file.into(), shared.offset - within, within + shared.bytes).ok_or(code::OUT_OF_MEMORY)?;
        let begin = mapping.base + within;
        let allocation = Allocation { begin, bytes: shared.bytes, owner: Owner::Opened(device), mapping: Some(mapping) };
        Self::insert(&mut lock(&self.state), allocation);
        Ok(begin)
    }
}
