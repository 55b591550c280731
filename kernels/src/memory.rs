//! Who owns bytes: [`Buffer`] owns an allocation, [`View`] and [`ViewMut`] are cheap handles into one.
//!
//! An operation runs later than it is called, so a view keeps its allocation alive: the memory is freed when the
//! buffer is dropped *and* the last task that captured a view has run. Exclusive use in time is the caller's promise,
//! kept by events (and checked by the chaos mode and the access tracker of the CPU device), as on a GPU.
#![allow(unsafe_code)]

use crate::{DType, Error, Result};
use std::sync::Arc;

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place {
    /// The device's own memory.
    Device,
    /// Host memory that the device can copy from and to asynchronously.
    Pinned,
    /// Ordinary host memory.
    Pageable,
}

/// What memory is for: the rows of the plan's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Weights of the model (frozen and trainable), where they live.
    Weights,
    /// LoRA adapter weights.
    Adapters,
    /// Gradient leaves, partial sums and accumulators.
    Gradients,
    /// Optimizer state: master weights and moments.
    State,
    /// Saved activations, boundaries, and the working set of one visit.
    Activations,
    /// Slots that hold gathered units.
    Slots,
    /// Scratch of operations, batches, staging, small tables.
    Workspace,
    /// Memory of libraries and packing panels.
    Libraries,
}

impl Category {
    /// All categories, in the order of the plan's table.
    pub const ALL: [Category; 8] = [
        Category::Weights,
        Category::Adapters,
        Category::Gradients,
        Category::State,
        Category::Activations,
        Category::Slots,
        Category::Workspace,
        Category::Libraries,
    ];

    /// Lower-case name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Weights => "weights",
            Category::Adapters => "adapters",
            Category::Gradients => "gradients",
            Category::State => "state",
            Category::Activations => "activations",
            Category::Slots => "slots",
            Category::Workspace => "workspace",
            Category::Libraries => "libraries",
        }
    }
}

/// Bytes held now and at most, and calls of `alloc` so far, for one (place, category).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes allocated now.
    pub bytes: usize,
    /// Largest value of `bytes` so far.
    pub peak_bytes: usize,
    /// Number of allocations made so far.
    pub allocations: usize,
}

/// Memory that someone mapped: the CPU heap, a shared mapping, an address range of the simulated device.
///
/// # Safety
/// `base` must stay valid for `bytes` bytes until drop, or be null where the memory cannot be touched by the host.
pub unsafe trait Mapping: Send + Sync {
    /// Address of the first byte; null where the host cannot read or write (simulated or device memory).
    fn base(&self) -> *mut u8;
    /// Bytes mapped.
    fn bytes(&self) -> usize;
    /// Address of the first byte for the device that the memory belongs to; 0 where nothing lies (simulated memory).
    fn address(&self) -> u64 {
        self.base() as u64
    }
}

pub(crate) struct Allocation {
    /// Unique in the process; the access tracker's key.
    pub id: u64,
    pub name: String,
    pub place: Place,
    pub mapping: Box<dyn Mapping>,
}

/// Owns an allocation. Dropping it frees the memory once no view is captured by a pending task.
#[derive(Clone)]
pub struct Buffer(pub(crate) Arc<Allocation>);

/// Read access to `elems` elements of an allocation. Cheap to clone.
#[derive(Clone)]
pub struct View {
    pub(crate) alloc: Arc<Allocation>,
    pub(crate) offset: usize,
    pub(crate) elems: usize,
    pub(crate) dtype: DType,
}

/// Write access to `elems` elements of an allocation. Cheap to clone; see the module documentation for what is promised.
#[derive(Clone)]
pub struct ViewMut(View);

impl Buffer {
    /// Wraps memory that is mapped already (a shared mapping, or a device's own allocation).
    pub fn from_mapping(name: impl Into<String>, place: Place, mapping: Box<dyn Mapping>) -> Buffer {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Buffer(Arc::new(Allocation { id, name: name.into(), place, mapping }))
    }

    /// Bytes of the allocation.
    pub fn bytes(&self) -> usize {
        self.0.mapping.bytes()
    }

    /// Where it lies.
    pub fn place(&self) -> Place {
        self.0.place
    }

    /// The allocation's name, for messages.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// `elems` elements of `dtype` from byte `offset` on. The offset must be a multiple of the element size.
    pub fn view(&self, dtype: DType, offset: usize, elems: usize) -> Result<View> {
        let end = elems.checked_mul(dtype.bytes()).and_then(|b| b.checked_add(offset));
        if end.is_none_or(|e| e > self.bytes()) || !offset.is_multiple_of(dtype.bytes()) {
            return Err(Error::Range { name: self.0.name.clone(), offset, elems, dtype, bytes: self.bytes() });
        }
        Ok(View { alloc: self.0.clone(), offset, elems, dtype })
    }

    /// As [`Buffer::view`], for writing.
    pub fn view_mut(&self, dtype: DType, offset: usize, elems: usize) -> Result<ViewMut> {
        self.view(dtype, offset, elems).map(ViewMut)
    }

    /// The whole buffer as elements of `dtype` (a remainder is left out).
    pub fn all(&self, dtype: DType) -> Result<ViewMut> {
        self.view_mut(dtype, 0, self.bytes() / dtype.bytes())
    }
}

impl View {
    /// Elements.
    pub fn elems(&self) -> usize {
        self.elems
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes: elements times element size.
    pub fn bytes(&self) -> usize {
        self.elems * self.dtype.bytes()
    }

    /// Where the allocation lies.
    pub fn place(&self) -> Place {
        self.alloc.place
    }

    /// Name of the allocation, for messages.
    pub fn name(&self) -> &str {
        &self.alloc.name
    }

    /// (allocation id, first byte, end byte): what the access tracker compares.
    pub fn span(&self) -> (u64, usize, usize) {
        (self.alloc.id, self.offset, self.offset + self.bytes())
    }

    /// `elems` elements from element `start` on.
    pub fn slice(&self, start: usize, elems: usize) -> Result<View> {
        if start.checked_add(elems).is_none_or(|e| e > self.elems) {
            return Err(Error::Range {
                name: self.alloc.name.clone(),
                offset: start.saturating_mul(self.dtype.bytes()),
                elems,
                dtype: self.dtype,
                bytes: self.bytes(),
            });
        }
        Ok(View { offset: self.offset + start * self.dtype.bytes(), elems, ..self.clone() })
    }

    /// The same bytes as elements of another type. The bytes must divide evenly and be aligned.
    pub fn reinterpret(&self, dtype: DType) -> Result<View> {
        if !self.bytes().is_multiple_of(dtype.bytes()) || !self.offset.is_multiple_of(dtype.bytes()) {
            return Err(Error::Range {
                name: self.alloc.name.clone(),
                offset: self.offset,
                elems: self.bytes() / dtype.bytes(),
                dtype,
                bytes: self.bytes(),
            });
        }
        Ok(View { elems: self.bytes() / dtype.bytes(), dtype, ..self.clone() })
    }

    /// Address of the first element, or `None` where the host cannot touch it (simulated memory).
    pub fn host_ptr(&self) -> Option<*mut u8> {
        let base = self.alloc.mapping.base();
        // SAFETY: the offset was checked against the allocation's bytes when the view was cut.
        (!base.is_null()).then(|| unsafe { base.add(self.offset) })
    }

    /// Address of the first element for the device that the memory belongs to (which a host must not follow unless
    /// [`View::host_ptr`] gives it too); `None` in simulated memory.
    pub fn address(&self) -> Option<u64> {
        let base = self.alloc.mapping.address();
        (base != 0).then_some(base + self.offset as u64)
    }

    /// The elements as a slice; `None` in simulated memory.
    ///
    /// # Safety
    /// Call only from a task of a stream (or after `sync`), with no concurrent writer, and `T` of the view's type and size.
    pub unsafe fn as_slice<T: bytemuck::Pod>(&self) -> Option<&[T]> {
        debug_assert_eq!(std::mem::size_of::<T>(), self.dtype.bytes());
        // SAFETY: in bounds by construction; aligned since offsets are multiples of the element size; no writer by contract.
        self.host_ptr().map(|p| unsafe { std::slice::from_raw_parts(p as *const T, self.elems) })
    }
}

impl ViewMut {
    /// Read access to the same elements.
    pub fn view(&self) -> View {
        self.0.clone()
    }

    /// `elems` elements from element `start` on.
    pub fn slice(&self, start: usize, elems: usize) -> Result<ViewMut> {
        self.0.slice(start, elems).map(ViewMut)
    }

    /// See [`View::reinterpret`].
    pub fn reinterpret(&self, dtype: DType) -> Result<ViewMut> {
        self.0.reinterpret(dtype).map(ViewMut)
    }

    /// The elements as a mutable slice; `None` in simulated memory.
    ///
    /// # Safety
    /// Call only from a task of a stream (or after `sync`), with no concurrent access, and `T` of the view's type and size.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_slice<T: bytemuck::Pod>(&self) -> Option<&mut [T]> {
        debug_assert_eq!(std::mem::size_of::<T>(), self.0.dtype.bytes());
        // SAFETY: in bounds and aligned by construction; exclusive by contract.
        self.0.host_ptr().map(|p| unsafe { std::slice::from_raw_parts_mut(p as *mut T, self.0.elems) })
    }
}

impl std::ops::Deref for ViewMut {
    type Target = View;
    fn deref(&self) -> &View {
        &self.0
    }
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}..+{} {}]", self.alloc.name, self.offset, self.elems, self.dtype)
    }
}

impl std::fmt::Debug for ViewMut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "mut {:?}", self.0)
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{} bytes]", self.0.name, self.bytes())
    }
}
