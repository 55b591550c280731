//! cuBLASLt and hipBLASLt: the same functions, but other numbers for attributes, operations and types of computation.
#![allow(non_snake_case)]

use super::{export, put};
use crate::api;
use crate::blas::{Desc, Layout, Product, fits};
use crate::device::Handles;
use crate::memory::lock;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, OnceLock};
use zrt_kernels::gpu::driver::Vendor::{self, Amd, Nvidia};

/// Codes, which differ too.
struct Codes {
    invalid: i32,
    failed: i32,
    unsupported: i32,
}

fn codes(vendor: Vendor) -> Codes {
    match vendor {
        Nvidia => Codes { invalid: 7, failed: 13, unsupported: 15 },
        Amd => Codes { invalid: 3, failed: 5, unsupported: 7 },
    }
}

/// Epilogues, the same for both.
const EPILOGUE_DEFAULT: u32 = 1;
const EPILOGUE_BIAS: u32 = 4;

/// What both libraries hold: descriptors by handle.
#[derive(Default)]
struct Tables {
    handles: Handles<()>,
    descs: Handles<Mutex<Desc>>,
    layouts: Handles<Mutex<Layout>>,
    preferences: Handles<Mutex<u64>>,
}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(Tables::default)
}

/// An attribute's value from the caller.
///
/// # Safety
/// `from` has `bytes` bytes, or is null.
unsafe fn value<T: Copy>(vendor: Vendor, from: *const c_void, bytes: usize) -> Result<T, i32> {
    if from.is_null() || bytes < size_of::<T>() {
        return Err(codes(vendor).invalid);
    }
    // SAFETY: so many bytes are there.
    Ok(unsafe { from.cast::<T>().read_unaligned() })
}

fn create(vendor: Vendor) -> Result<u64, i32> {
    // NOT_INITIALIZED is 1 for both.
    api::current(vendor).map_err(|_| 1)?;
    Ok(tables().handles.add(Arc::new(())))
}

fn create_desc(vendor: Vendor, compute: c_int, scale_type: c_int) -> Result<u64, i32> {
    let compute_f32 = if vendor == Nvidia { 68 } else { 2 };
    let desc = Desc { strange: compute != compute_f32 || scale_type != crate::blas::F32, ..Desc::default() };
    Ok(tables().descs.add(Arc::new(Mutex::new(desc))))
}

/// # Safety
/// As [`value`].
unsafe fn set_desc(vendor: Vendor, desc: u64, attribute: c_int, from: *const c_void, bytes: usize) -> Result<(), i32> {
    let invalid = codes(vendor).invalid;
    let desc = tables().descs.get(desc).map_err(|_| invalid)?;
    let mut desc = lock(&desc);
    let (transpose_a, transpose_b, epilogue, bias, bias_type) = if vendor == Nvidia { (3, 4, 7, 8, 26) } else { (0, 1, 2, 3, 4) };
    let (none, transposed) = if vendor == Nvidia { (0, 1) } else { (111, 112) };
    // SAFETY: the caller's promise.
    unsafe {
        let operation = || match value::<i32>(vendor, from, bytes)? {
            o if o == none => Ok(false),
            o if o == transposed => Ok(true),
            _ => Err(invalid),
        };
        match attribute {
            a if a == transpose_a => desc.transpose_a = operation()?,
            a if a == transpose_b => desc.transpose_b = operation()?,
            a if a == epilogue => match value::<u32>(vendor, from, bytes)? {
                EPILOGUE_DEFAULT => desc.bias = false,
                EPILOGUE_BIAS => desc.bias = true,
                _ => desc.strange = true,
            },
            a if a == bias => desc.bias_at = value(vendor, from, bytes)?,
            a if a == bias_type => desc.bias_type = Some(value(vendor, from, bytes)?),
            _ => desc.strange = true,
        }
    }
    Ok(())
}

fn create_layout(dtype: c_int, rows: u64, cols: u64, ld: i64) -> u64 {
    let layout = Layout { dtype, rows, cols, ld, batch: 1, stride: 0, order: 0 };
    tables().layouts.add(Arc::new(Mutex::new(layout)))
}

/// # Safety
/// As [`value`].
unsafe fn set_layout(vendor: Vendor, layout: u64, attribute: c_int, from: *const c_void, bytes: usize) -> Result<(), i32> {
    let invalid = codes(vendor).invalid;
    let layout = tables().layouts.get(layout).map_err(|_| invalid)?;
    let mut layout = lock(&layout);
    // From HIP's number to CUDA's.
    let attribute = match (vendor, attribute) {
        (Amd, 0..=6) => [5, 6, 0, 1, 2, 3, 4][attribute as usize],
        _ => attribute,
    };
    // SAFETY: the caller's promise.
    unsafe {
        match attribute {
            0 => layout.dtype = value(vendor, from, bytes)?,
            1 => layout.order = value(vendor, from, bytes)?,
            2 => layout.rows = value(vendor, from, bytes)?,
            3 => layout.cols = value(vendor, from, bytes)?,
            4 => layout.ld = value(vendor, from, bytes)?,
            5 => layout.batch = value(vendor, from, bytes)?,
            6 => layout.stride = value(vendor, from, bytes)?,
            _ => return Err(invalid),
        }
    }
    Ok(())
}

/// # Safety
/// As [`value`].
unsafe fn set_preference(vendor: Vendor, preference: u64, attribute: c_int, from: *const c_void, bytes: usize) -> Result<(), i32> {
    let preference = tables().preferences.get(preference).map_err(|_| codes(vendor).invalid)?;
    // The most bytes of workspace; others change nothing here.
    if attribute == 1 {
        // SAFETY: the caller's promise.
        *lock(&preference) = unsafe { value(vendor, from, bytes) }?;
    }
    Ok(())
}

fn layouts(vendor: Vendor, desc: u64, all: [u64; 4]) -> Result<(Desc, [Layout; 4]), i32> {
    let invalid = |_| codes(vendor).invalid;
    let desc = *lock(&*tables().descs.get(desc).map_err(invalid)?);
    let mut found = [Layout { dtype: 0, rows: 0, cols: 0, ld: 0, batch: 1, stride: 0, order: 0 }; 4];
    for (to, handle) in found.iter_mut().zip(all) {
        *to = *lock(&*tables().layouts.get(handle).map_err(invalid)?);
    }
    let [a, b, c, d] = &found;
    if fits(&desc, a, b, c, d) { Ok((desc, found)) } else { Err(codes(vendor).unsupported) }
}

/// One algorithm, which needs no workspace: its opaque bytes, then 0 bytes, success, one wave.
///
/// # Safety
/// `results` has room for `wanted` results.
unsafe fn heuristic(
    vendor: Vendor,
    desc: u64,
    all: [u64; 4],
    preference: u64,
    wanted: c_int,
    results: *mut u8,
    found: *mut c_int,
) -> Result<(), i32> {
    tables().preferences.get(preference).map_err(|_| codes(vendor).invalid)?;
    if wanted < 1 || results.is_null() {
        return Err(codes(vendor).invalid);
    }
    let (algorithm, whole) = if vendor == Nvidia { (64, 96) } else { (24, 56) };
    // SAFETY: the caller's.
    unsafe { put(found, 0) }?;
    layouts(vendor, desc, all)?;
    // SAFETY: room for at least one result, whose fields are at these bytes.
    unsafe {
        results.write_bytes(0, whole);
        results.write(ALGORITHM);
        put(results.add(algorithm + 12).cast(), 1f32)?;
        put(found, 1)
    }
}

/// First byte of the opaque description of an algorithm.
const ALGORITHM: u8 = 0x5a;

/// The arguments of a product, but for the operands.
struct With {
    handle: u64,
    desc: u64,
    alpha: *const f32,
    beta: *const f32,
    algorithm: *const u8,
    stream: u64,
}

/// # Safety
/// The arguments of cublasLtMatmul.
unsafe fn matmul(vendor: Vendor, with: With, at: [u64; 4], all: [u64; 4]) -> Result<(), i32> {
    let Codes { invalid, failed, .. } = codes(vendor);
    tables().handles.get(with.handle).map_err(|_| 1)?;
    // SAFETY: the caller's; an algorithm came from the heuristic.
    let (alpha, beta, algorithm) = unsafe { (with.alpha.as_ref(), with.beta.as_ref(), with.algorithm.as_ref()) };
    let (Some(&alpha), Some(&beta)) = (alpha, beta) else { return Err(invalid) };
    if algorithm.is_some_and(|a| *a != ALGORITHM) {
        return Err(invalid);
    }
    let (desc, [a, b, c, d]) = layouts(vendor, with.desc, all)?;
    let stream = api::stream(vendor, with.stream).map_err(|_| failed)?;
    Product { desc, alpha, beta, a: (at[0], a), b: (at[1], b), c: (at[2], c), d: (at[3], d) }.enqueue(&stream);
    Ok(())
}

/// Exports one library's functions, by its prefix's names.
macro_rules! library {
    ($vendor:expr, $create:ident, $destroy:ident, $desc_create:ident, $desc_destroy:ident, $desc_set:ident, $layout_create:ident,
     $layout_destroy:ident, $layout_set:ident, $pref_create:ident, $pref_destroy:ident, $pref_set:ident, $heuristic:ident, $matmul:ident) => {
        export! {
            fn $create(out: *mut u64) {
                put(out, create($vendor)?)
            }
            fn $destroy(handle: u64) {
                tables().handles.remove(handle).map(|_| ()).map_err(|_| codes($vendor).invalid)
            }
            fn $desc_create(out: *mut u64, compute: c_int, scale: c_int) {
                put(out, create_desc($vendor, compute, scale)?)
            }
            fn $desc_destroy(desc: u64) {
                tables().descs.remove(desc).map(|_| ()).map_err(|_| codes($vendor).invalid)
            }
            fn $desc_set(desc: u64, attribute: c_int, from: *const c_void, bytes: usize) {
                set_desc($vendor, desc, attribute, from, bytes)
            }
            fn $layout_create(out: *mut u64, dtype: c_int, rows: u64, cols: u64, ld: i64) {
                put(out, create_layout(dtype, rows, cols, ld))
            }
            fn $layout_destroy(layout: u64) {
                tables().layouts.remove(layout).map(|_| ()).map_err(|_| codes($vendor).invalid)
            }
            fn $layout_set(layout: u64, attribute: c_int, from: *const c_void, bytes: usize) {
                set_layout($vendor, layout, attribute, from, bytes)
            }
            fn $pref_create(out: *mut u64) {
                put(out, tables().preferences.add(Arc::default()))
            }
            fn $pref_destroy(preference: u64) {
                tables().preferences.remove(preference).map(|_| ()).map_err(|_| codes($vendor).invalid)
            }
            fn $pref_set(preference: u64, attribute: c_int, from: *const c_void, bytes: usize) {
                set_preference($vendor, preference, attribute, from, bytes)
            }
            fn $heuristic(
                _handle: u64, desc: u64, a: u64, b: u64, c: u64, d: u64, preference: u64, wanted: c_int, results: *mut u8, found: *mut c_int,
            ) {
                heuristic($vendor, desc, [a, b, c, d], preference, wanted, results, found)
            }
            fn $matmul(
                handle: u64, desc: u64, alpha: *const f32, a: u64, a_layout: u64, b: u64, b_layout: u64, beta: *const f32, c: u64,
                c_layout: u64, d: u64, d_layout: u64, algorithm: *const u8, _workspace: u64, _workspace_bytes: usize, stream: u64,
            ) {
                let with = With { handle, desc, alpha, beta, algorithm, stream };
                matmul($vendor, with, [a, b, c, d], [a_layout, b_layout, c_layout, d_layout])
            }
        }
    };
}

library!(
    Nvidia,
    cublasLtCreate,
    cublasLtDestroy,
    cublasLtMatmulDescCreate,
    cublasLtMatmulDescDestroy,
    cublasLtMatmulDescSetAttribute,
    cublasLtMatrixLayoutCreate,
    cublasLtMatrixLayoutDestroy,
    cublasLtMatrixLayoutSetAttribute,
    cublasLtMatmulPreferenceCreate,
    cublasLtMatmulPreferenceDestroy,
    cublasLtMatmulPreferenceSetAttribute,
    cublasLtMatmulAlgoGetHeuristic,
    cublasLtMatmul
);
library!(
    Amd,
    hipblasLtCreate,
    hipblasLtDestroy,
    hipblasLtMatmulDescCreate,
    hipblasLtMatmulDescDestroy,
    hipblasLtMatmulDescSetAttribute,
    hipblasLtMatrixLayoutCreate,
    hipblasLtMatrixLayoutDestroy,
    hipblasLtMatrixLayoutSetAttribute,
    hipblasLtMatmulPreferenceCreate,
    hipblasLtMatmulPreferenceDestroy,
    hipblasLtMatmulPreferenceSetAttribute,
    hipblasLtMatmulAlgoGetHeuristic,
    hipblasLtMatmul
);

export! {
    fn hipblasLtGetVersion(_handle: u64, version: *mut c_int) {
        put(version, 100_200)
    }
}

/// cuBLASLt returns its version.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    120_900
}
