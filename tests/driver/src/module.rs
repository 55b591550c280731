//! What code can be loaded, and what happens at a launch? Real cubins and code objects, whose kernels must be in their symbol table,
//! and images of the emulated compilers; the kernel that runs is always the emulator's of that name.

use crate::clock::Kind;
use crate::device::{Device, Machine};
use crate::faults::{Kind as Fault, code};
use crate::stream::{Stream, Task};
use std::borrow::Cow;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use zrt_kernels::gpu::driver::Vendor;
use zrt_kernels::gpu::launch::Kernel;
use zrt_kernels::gpu::table;
use zrt_simt::launcher::{Extent, Prepared};

const MAGIC: &[u8; 8] = b"ZRTIMAGE";

/// An image of the emulated compilers: vendor, machine and kernels as lines of text.
pub fn image(vendor: Vendor, arch: &str, kernels: &[String]) -> Vec<u8> {
    let text = format!("{}\n{arch}\n{}", vendor.kind(), kernels.join("\n"));
    let mut out = MAGIC.to_vec();
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
    out
}

/// Code that was loaded.
pub struct Module {
    pub vendor: Vendor,
    pub kernels: Vec<String>,
}

/// A kernel of a module.
pub struct Function {
    pub vendor: Vendor,
    pub kernel: &'static Kernel,
    /// Dynamic shared memory that a launch may have.
    pub most_shared: AtomicU32,
    prepared: OnceLock<Result<Prepared, String>>,
}

/// Reads memory of the caller's, which says itself how long it is.
struct Image(*const u8);

impl Image {
    /// # Safety
    /// The bytes must be there: the image's own headers say so.
    unsafe fn bytes(&self, at: u64, bytes: u64) -> &[u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.0.add(at as usize), bytes as usize) }
    }

    /// # Safety
    /// As [`Image::bytes`].
    unsafe fn number(&self, at: u64, bytes: u64) -> u64 {
        // SAFETY: the caller's promise.
        let bytes = unsafe { self.bytes(at, bytes) };
        bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b))
    }
}

impl Module {
    /// Loads an image.
    ///
    /// # Errors
    /// No image at all or another vendor's (200), or one for another machine (209).
    ///
    /// # Safety
    /// `image` is an image, as far as its own headers say.
    pub unsafe fn load(vendor: Vendor, arch: &str, image: *const c_void) -> Result<Module, i32> {
        if image.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let image = Image(image.cast());
        // SAFETY: an image has at least four bytes, and after one of these beginnings what the format says.
        unsafe {
            match image.bytes(0, 4) {
                b"\x7fELF" => Module::elf(vendor, arch, &image),
                b"ZRTI" if image.bytes(0, 8) == MAGIC => {
                    let text = String::from_utf8_lossy(image.bytes(16, image.number(8, 8)));
                    let mut lines = text.lines();
                    if lines.next() != Some(vendor.kind()) {
                        return Err(code::INVALID_IMAGE);
                    }
                    if lines.next() != Some(arch) {
                        return Err(code::NO_BINARY);
                    }
                    Ok(Module { vendor, kernels: lines.map(String::from).collect() })
                }
                _ => Err(code::INVALID_IMAGE),
            }
        }
    }

    /// The names of all functions in the symbol tables of a 64-bit ELF file.
    unsafe fn elf(vendor: Vendor, arch: &str, image: &Image) -> Result<Module, i32> {
        const SYMBOLS: [u64; 2] = [2, 11];
        // SAFETY: fields at the places that the ELF format gives them; tables where the header says.
        unsafe {
            let machine = match vendor {
                Vendor::Nvidia => 190,
                Vendor::Amd => 224,
            };
            if image.number(18, 2) != machine {
                return Err(code::INVALID_IMAGE);
            }
            if !flags_fit(arch, image.number(48, 4)) {
                return Err(code::NO_BINARY);
            }
            let (sections, entry, count) = (image.number(40, 8), image.number(58, 2), image.number(60, 2));
            let mut kernels = Vec::new();
            for section in (0..count).map(|i| sections + i * entry) {
                if !SYMBOLS.contains(&image.number(section + 4, 4)) {
                    continue;
                }
                let (at, bytes) = (image.number(section + 24, 8), image.number(section + 32, 8));
                let names = image.number(sections + image.number(section + 40, 4) * entry + 24, 8);
                for symbol in (at..at + bytes).step_by(24) {
                    let is_function = image.number(symbol + 4, 1) & 15 == 2;
                    if is_function {
                        let name = names + image.number(symbol, 4);
                        let end = (name..).find(|at| image.number(*at, 1) == 0).unwrap_or(name);
                        kernels.push(String::from_utf8_lossy(image.bytes(name, end - name)).into_owned());
                    }
                }
            }
            Ok(Module { vendor, kernels })
        }
    }

    /// The kernel of this name.
    pub fn function(&self, name: &str) -> Result<Function, i32> {
        let kernel = table::kernel(name).filter(|_| self.kernels.iter().any(|k| k == name)).ok_or(code::NOT_FOUND)?;
        let most_shared = AtomicU32::new(if self.vendor == Vendor::Nvidia { 48 << 10 } else { 64 << 10 });
        Ok(Function { vendor: self.vendor, kernel, most_shared, prepared: OnceLock::new() })
    }
}

/// Whether the processor flags of an ELF file are those of this machine. CUDA's hold the number in one of two bytes, by version.
fn flags_fit(arch: &str, flags: u64) -> bool {
    let amd = [("gfx90a", 0x3f), ("gfx942", 0x4c), ("gfx950", 0x4f)];
    if let Some((_, number)) = amd.iter().find(|(name, _)| *name == arch) {
        return flags & 0xff == *number;
    }
    let number = arch.strip_prefix("sm_").and_then(|n| n.parse::<u64>().ok());
    number.is_some_and(|n| flags & 0xff == n || flags >> 8 & 0xff == n)
}

/// The most blocks along each dimension, for both vendors.
const MOST_BLOCKS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

impl Function {
    /// Enqueues a launch with a copy of its parameters.
    ///
    /// # Errors
    /// More blocks, threads or shared memory than there may be.
    ///
    /// # Safety
    /// `params` is a kernel's list of parameters: one pointer to its struct.
    pub unsafe fn launch(
        self: std::sync::Arc<Self>,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        stream: &Stream,
        params: *const *const c_void,
    ) -> Result<(), i32> {
        let machine = Machine::get();
        let threads = block.iter().try_fold(1u32, |all, n| all.checked_mul(*n)).ok_or(code::INVALID_VALUE)?;
        let grid_fits = grid.iter().zip(MOST_BLOCKS).all(|(n, most)| *n > 0 && *n <= most);
        if !grid_fits || threads == 0 || threads > 1024 || shared_bytes > self.most_shared.load(Ordering::Relaxed) || params.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the caller's list has one element.
        let from = unsafe { *params }.cast::<u8>();
        if from.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let bytes = self.kernel.params_bytes;
        let mut words = vec![0u64; bytes.div_ceil(8)];
        // SAFETY: the struct has the bytes that the kernel's table says, and the words have room for them.
        unsafe { std::ptr::copy_nonoverlapping(from, words.as_mut_ptr().cast::<u8>(), bytes) };

        let settings = &machine.settings;
        let fault = machine.faults.hit(|kind| match kind {
            Fault::Launch(name, code) if name == "*" || name == self.kernel.name => Some(*code),
            Fault::Lost(code) => Some(*code),
            _ => None,
        });
        let blocks = grid.iter().map(|n| u64::from(*n)).product::<u64>();
        let units = u64::from(machine.arch(self.vendor).units);
        let cost = settings.kernel_ns + blocks.div_ceil(units) * settings.wave_ns;
        let name = Cow::Borrowed(self.kernel.name);
        let extent = Extent { grid, threads, shared_bytes };
        let null = settings.null && fault.is_none();
        let run = Box::new(move |device: &'static Device| match fault {
            Some(code) => Err(code),
            None if null => Ok(()),
            None => self.run(device, extent, &words),
        });
        let task = Task { kind: Kind::Kernel, name, bytes: 0, cost, run };
        if null {
            stream.empty_task(task)
        } else {
            stream.task(task)
        }
        Ok(())
    }

    fn run(&self, device: &'static Device, extent: Extent, params: &[u64]) -> Result<(), i32> {
        let machine = Machine::get();
        let emulated = machine.emulator(self.vendor).map_err(|e| said(self.kernel.name, &e))?;
        let prepared = self.prepared.get_or_init(|| emulated.prepare(self.kernel.name));
        let prepared = prepared.as_ref().map_err(|e| said(self.kernel.name, e))?;
        let allowed = machine.memory.snapshot(device.index);
        emulated.run(prepared, extent, params, &allowed.ranges).map_err(|e| said(self.kernel.name, &e))
    }
}

/// Prints what went wrong in a kernel, and says it as a driver would.
fn said(kernel: &str, error: &str) -> i32 {
    eprintln!("emulated GPU: {kernel}: {error}");
    if error.contains("not aligned") {
        code::MISALIGNED
    } else if error.contains(" of operand ") || error.contains("before all operands") {
        code::ILLEGAL_ADDRESS
    } else {
        code::LAUNCH_FAILED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one section of symbols and one of their names: a function and an object.
    fn elf(machine: u16, flags: u32) -> Vec<u8> {
        let mut file = vec![0u8; 64 + 3 * 64];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"\x7fELF");
        put(18, &machine.to_le_bytes());
        put(40, &64u64.to_le_bytes());
        put(48, &flags.to_le_bytes());
        put(58, &64u16.to_le_bytes());
        put(60, &3u16.to_le_bytes());
        let (symbols, names) = (64 + 3 * 64, 64 + 3 * 64 + 48);
        for (section, kind, at, bytes) in [(1, 2u32, symbols, 48u64), (2, 3, names, 16)] {
            let section = 64 + section * 64;
            put(section + 4, &kind.to_le_bytes());
            put(section + 24, &(at as u64).to_le_bytes());
            put(section + 32, &bytes.to_le_bytes());
            put(section + 40, &2u32.to_le_bytes());
        }
        file.extend([&1u32.to_le_bytes()[..], &[2], &[0; 19], &10u32.to_le_bytes(), &[1], &[0; 19]].concat());
        file.extend(b"\0fill_u32\0data\0\0");
        file
    }

    fn load(vendor: Vendor, arch: &str, file: &[u8]) -> Result<Vec<String>, i32> {
        // SAFETY: a whole file.
        unsafe { Module::load(vendor, arch, file.as_ptr().cast()) }.map(|m| m.kernels)
    }

    #[test]
    fn object_files_are_read() {
        let (cubin, object) = (elf(190, 0x005a_055a), elf(224, 0x54c));
        assert_eq!(load(Vendor::Amd, "gfx942", &object), Ok(vec!["fill_u32".to_string()]));
        assert_eq!(load(Vendor::Nvidia, "sm_90", &cubin), Ok(vec!["fill_u32".to_string()]));
        assert_eq!(load(Vendor::Amd, "gfx90a", &object), Err(code::NO_BINARY));
        assert_eq!(load(Vendor::Nvidia, "sm_80", &cubin), Err(code::NO_BINARY));
        assert_eq!(load(Vendor::Nvidia, "sm_90", &object), Err(code::INVALID_IMAGE));
    }
}
