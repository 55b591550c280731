//! Where does memory come from, and who holds how much? Anonymous mappings from the kernel, one per allocation, and a
//! ledger of bytes by (place, category) that the simulated device shares, so that a plan and a run count alike.
//!
//! One mapping per allocation, not a pool: training memory is allocated once before step 0, so the cost of a call does
//! not matter, pages are zero without touching them, and freed memory leaves the process.
#![allow(unsafe_code)]

use crate::memory::{Allocation, Buffer, Category, Mapping, MemoryUse, Place};
use crate::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Mappings so large that their first touch is noticed. Smaller ones, such as a thread's scratch, always ask for huge pages.
const LARGE_BYTES: usize = 4 << 20;
const PLACES: [Place; 3] = [Place::Device, Place::Pinned, Place::Pageable];

/// Bytes now and at most, by place and category.
#[derive(Default)]
pub(crate) struct Ledger {
    rows: Mutex<[[MemoryUse; Category::ALL.len()]; PLACES.len()]>,
}

fn row(place: Place, category: Category) -> (usize, usize) {
    // Both enums are plain and declared in the order of their tables.
    (place as usize, category as usize)
}

impl Ledger {
    fn rows(&self) -> MutexGuard<'_, [[MemoryUse; Category::ALL.len()]; PLACES.len()]> {
        self.rows.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Counts `mapping` until it is dropped.
    pub fn count(self: &Arc<Self>, mapping: Box<dyn Mapping>, place: Place, category: Category) -> Box<dyn Mapping> {
        let (p, c) = row(place, category);
        let bytes = mapping.bytes();
        {
            let entry = &mut self.rows()[p][c];
            entry.bytes += bytes;
            entry.peak_bytes = entry.peak_bytes.max(entry.bytes);
            entry.allocations += 1;
        }
        Box::new(Counted { mapping, bytes, row: (p, c), ledger: self.clone() })
    }

    /// Counts the scratch of a pool of threads, which is on the Rust heap, until the returned value is dropped.
    pub fn scratch(self: &Arc<Self>, bytes: usize) -> Option<Box<dyn Mapping>> {
        (bytes > 0).then(|| self.count(Box::new(AddressRange(bytes)), Place::Pageable, Category::Libraries))
    }

    /// Counts someone else's buffer until the returned one, and all views of it, are gone. The allocation keeps its
    /// identity, so that the access tracker sees through it.
    pub fn adopt(self: &Arc<Self>, buffer: Buffer, category: Category) -> Buffer {
        let (id, name, place) = (buffer.0.id, buffer.0.name.clone(), buffer.0.place);
        let mapping = self.count(Box::new(Foreign(buffer)), place, category);
        Buffer(Arc::new(Allocation { id, name, place, mapping }))
    }

    /// Rows that were ever used, in the order of the plan's table.
    pub fn report(&self) -> Vec<(Place, Category, MemoryUse)> {
        let rows = self.rows();
        let all = PLACES.iter().flat_map(|&p| Category::ALL.iter().map(move |&c| (p, c)));
        all.map(|(p, c)| (p, c, rows[row(p, c).0][row(p, c).1])).filter(|(_, _, u)| u.allocations > 0).collect()
    }
}

/// A mapping that the ledger holds a row for.
struct Counted {
    mapping: Box<dyn Mapping>,
    bytes: usize,
    row: (usize, usize),
    ledger: Arc<Ledger>,
}

// SAFETY: passes on a mapping that it owns.
unsafe impl Mapping for Counted {
    fn base(&self) -> *mut u8 {
        self.mapping.base()
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn address(&self) -> u64 {
        self.mapping.address()
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.ledger.rows()[self.row.0][self.row.1].bytes -= self.bytes;
    }
}

/// A buffer that was mapped elsewhere, kept alive.
struct Foreign(Buffer);

// SAFETY: the buffer owns the memory and is owned here.
unsafe impl Mapping for Foreign {
    fn base(&self) -> *mut u8 {
        self.0.0.mapping.base()
    }
    fn bytes(&self) -> usize {
        self.0.bytes()
    }
    fn address(&self) -> u64 {
        self.0.0.mapping.address()
    }
}

/// Addresses without memory, for the simulated device: nothing is reserved, the host cannot touch it.
pub(crate) struct AddressRange(pub usize);

// SAFETY: a null base is never dereferenced.
unsafe impl Mapping for AddressRange {
    fn base(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
    fn bytes(&self) -> usize {
        self.0
    }
}

/// Anonymous private memory, page-aligned and zero.
pub(crate) struct Pages {
    base: *mut u8,
    mapped_bytes: usize,
    bytes: usize,
}

// SAFETY: plain memory without thread affinity; access is governed by the contract of views.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps `bytes` (0 is allowed). `poison` fills them with 0xFF: NaN as f32 and bf16, -1 as i32.
    pub fn map(name: &str, bytes: usize, poison: bool) -> Result<Pages> {
        let fail = |reason: String| Error::OutOfMemory { what: name.to_string(), bytes, reason };
        // Large mappings start on a huge page, else their first and last part would stay in small ones.
        let huge = bytes >= HUGE_PAGE_BYTES;
        let align = if huge { HUGE_PAGE_BYTES } else { page_bytes() };
        let mapped_bytes = bytes.checked_next_multiple_of(page_bytes()).filter(|&b| b <= isize::MAX as usize / 2);
        let mapped_bytes = mapped_bytes.ok_or_else(|| fail("more than can be addressed".into()))?;
        if bytes == 0 {
            // Never mapped, never read: only non-null and aligned, so that empty slices can be made of it.
            return Ok(Pages { base: std::ptr::without_provenance_mut(align), mapped_bytes: 0, bytes: 0 });
        }
        let reserve = if huge { mapped_bytes + align } else { mapped_bytes };
        // SAFETY: a new anonymous mapping touches no memory of ours.
        let raw = unsafe {
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(std::ptr::null_mut(), reserve, prot, flags, -1, 0)
        };
        if raw == libc::MAP_FAILED {
            return Err(fail(std::io::Error::last_os_error().to_string()));
        }
        let raw = raw.cast::<u8>();
        let skip = raw.align_offset(align).min(reserve - mapped_bytes);
        // SAFETY: `skip + mapped_bytes <= reserve`, so both trims and the advice lie inside the new mapping.
        let base = unsafe {
            let base = raw.add(skip);
            let tail = reserve - skip - mapped_bytes;
            if skip > 0 {
                libc::munmap(raw.cast(), skip);
            }
            if tail > 0 {
                libc::munmap(base.add(mapped_bytes).cast(), tail);
            }
            if huge && (mapped_bytes < LARGE_BYTES || !host_takes_back_huge_pages()) {
                // Advice only: a kernel without huge pages ignores it.
                libc::madvise(base.cast(), mapped_bytes, libc::MADV_HUGEPAGE);
            }
            if poison {
                base.write_bytes(0xFF, bytes);
            }
            base
        };
        Ok(Pages { base, mapped_bytes, bytes })
    }
}

// SAFETY: mapped for `bytes` bytes until drop.
unsafe impl Mapping for Pages {
    fn base(&self) -> *mut u8 {
        self.base
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.mapped_bytes > 0 {
            // SAFETY: exactly the pages mapped in `map`; no view is left, since views own the allocation.
            unsafe { libc::munmap(self.base.cast(), self.mapped_bytes) };
        }
    }
}

/// Whether this is a virtual machine whose host takes back what is freed, in whole huge pages (a virtio balloon with free page reporting).
///
/// Such a host gives a huge page back 4 KiB at a time, at each first touch: 4.5 ms for 2 MiB were seen where 512 small pages, which such a
/// host does not take, took 0.6 ms. That is a second of the first step for 450 MB; later steps do not notice the size of pages.
fn host_takes_back_huge_pages() -> bool {
    static TAKES: OnceLock<bool> = OnceLock::new();
    /// VIRTIO_BALLOON_F_REPORTING (Virtual I/O Device 1.2, section 5.5.3): its place in a string of one digit a feature.
    const REPORTING: usize = 5;
    *TAKES.get_or_init(|| {
        let devices = std::fs::read_dir("/sys/bus/virtio/drivers/virtio_balloon").into_iter().flatten().flatten();
        let mut features = devices.filter_map(|device| std::fs::read(device.path().join("features")).ok());
        features.any(|digits| digits.get(REPORTING) == Some(&b'1'))
    })
}

fn page_bytes() -> usize {
    // SAFETY: no arguments in memory, no side effects.
    let n = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(n).ok().filter(|n| n.is_power_of_two()).unwrap_or(4096)
}

/// Memory of the machine, or of its control group where that is smaller; 0 when unknown.
pub(crate) fn memory_bytes() -> u64 {
    // SAFETY: no arguments in memory, no side effects.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    let machine = u64::try_from(pages).unwrap_or(0).saturating_mul(page_bytes() as u64);
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|s| s.trim().parse::<u64>().ok());
    limit.map_or(machine, |l| l.min(machine))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn bytes_of(buffer: &Buffer) -> &'static [u8] {
        let view = buffer.view(DType::U8, 0, buffer.bytes()).unwrap();
        // SAFETY: tests keep the buffer alive while they look, and nothing writes.
        unsafe { std::slice::from_raw_parts(view.host_ptr().unwrap(), view.bytes()) }
    }

    fn map(bytes: usize, poison: bool) -> Buffer {
        Buffer::from_mapping("m", Place::Device, Box::new(Pages::map("m", bytes, poison).unwrap()))
    }

    #[test]
    fn zeroed_aligned_or_poisoned() {
        for bytes in [1, 4095, 4096, 5000, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 17] {
            let b = map(bytes, false);
            assert!(bytes_of(&b).iter().all(|&x| x == 0));
            let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 4096 };
            assert_eq!(bytes_of(&b).as_ptr() as usize % align, 0);
            assert_eq!(bytes_of(&b).len(), bytes);
        }
        let b = map(64, true);
        let v = b.all(DType::F32).unwrap();
        // SAFETY: nobody else holds the buffer.
        assert!(unsafe { v.as_slice::<f32>() }.unwrap().iter().all(|x| x.is_nan()));
        assert_eq!(map(0, true).bytes(), 0);
    }

    #[test]
    fn too_much_is_an_error_value() {
        for bytes in [usize::MAX, isize::MAX as usize / 4] {
            assert!(matches!(Pages::map("w", bytes, false), Err(Error::OutOfMemory { .. })));
        }
    }

    #[test]
    fn ledger_counts_until_the_last_view_is_gone() {
        let ledger = Arc::new(Ledger::default());
        let make = |bytes| {
            let m = ledger.count(Box::new(AddressRange(bytes)), Place::Device, Category::Slots);
            Buffer::from_mapping("b", Place::Device, m)
        };
        let (a, b) = (make(100), make(50));
        let view = a.all(DType::U8).unwrap();
        drop((a, b));
        let now = |l: &Ledger| l.report()[0].2;
        assert_eq!(now(&ledger), MemoryUse { bytes: 100, peak_bytes: 150, allocations: 2 });
        drop(view);
        assert_eq!(now(&ledger).bytes, 0);
        assert_eq!(ledger.report().len(), 1);
    }

    #[test]
    fn adopted_buffers_keep_identity_and_are_counted() {
        let ledger = Arc::new(Ledger::default());
        let shared = map(4096, false);
        let id = shared.all(DType::U8).unwrap().span().0;
        let mine = ledger.adopt(shared.clone(), Category::Weights);
        assert_eq!(mine.all(DType::U8).unwrap().span().0, id);
        assert_eq!(bytes_of(&mine).as_ptr(), bytes_of(&shared).as_ptr());
        assert_eq!(ledger.report(), [(Place::Device, Category::Weights, MemoryUse { bytes: 4096, peak_bytes: 4096, allocations: 1 })]);
        drop(mine);
        assert_eq!(ledger.report()[0].2.bytes, 0);
    }
}
