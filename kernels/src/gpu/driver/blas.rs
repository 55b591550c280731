//! Dense products by the vendor's library, cuBLASLt or hipBLASLt, loaded at run time. The two have the same calls in the same order;
//! only the numbers of attributes and operations differ, so there is one table of functions and two of numbers.
//!
//! What the library suggests for a shape is kept: descriptors, layouts and algorithm are made once. Rows here are columns there: a
//! row-major `c [m, n]` is the library's column-major `[n, m]`, so operands change places.
#![allow(unsafe_code)]

use super::library::Symbols;
use super::table::Handle;
use super::{RawStream, Vendor, cuda, hip_sys as sys};
use crate::gpu::launch::{Dense, Form};
use crate::{DType, Error, Result};
use cudarc::cublaslt::sys as lt;
use lt::cublasLtMatmulDescAttributes_t as Attribute;
use lt::cublasLtMatmulPreferenceAttributes_t as Wish;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Device memory that the library may use for one product.
pub const WORKSPACE_BYTES: usize = 32 << 20;
/// Operands and rows begin at multiples of this; others are left to our own kernel.
const ALIGN_BYTES: u64 = 16;
/// Bytes of the library's answer, an algorithm first, with room for later versions.
const ANSWER_WORDS: usize = 64;

type Make = unsafe extern "C" fn(*mut Handle) -> c_int;
type Unmake = unsafe extern "C" fn(Handle) -> c_int;
type Set = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int;
type Suggest = unsafe extern "C" fn(Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut u64, *mut c_int) -> c_int;
type Matmul = unsafe extern "C" fn(
    Handle,
    Handle,
    *const f32,
    u64,
    Handle,
    u64,
    Handle,
    *const f32,
    u64,
    Handle,
    u64,
    Handle,
    *const u64,
    u64,
    usize,
    Handle,
) -> c_int;

struct Functions {
    destroy: Unmake,
    make_product: unsafe extern "C" fn(*mut Handle, c_int, c_int) -> c_int,
    set_product: Set,
    make_layout: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> c_int,
    make_wishes: Make,
    set_wishes: Set,
    suggest: Suggest,
    matmul: Matmul,
}

/// Numbers that the vendors' headers give to the same things.
struct Numbers {
    compute_f32: c_int,
    transposed: [i32; 2],
    transpose_a: c_int,
    transpose_b: c_int,
    epilogue: c_int,
    bias: c_int,
    /// Least alignments of a, b, c and d: only NVIDIA asks.
    alignments: &'static [c_int],
}

const NVIDIA: Numbers = Numbers {
    compute_f32: lt::cublasComputeType_t::CUBLAS_COMPUTE_32F as c_int,
    // cublasOperation_t is in a header of cuBLAS that cudarc does not bind here.
    transposed: [0, 1],
    transpose_a: Attribute::CUBLASLT_MATMUL_DESC_TRANSA as c_int,
    transpose_b: Attribute::CUBLASLT_MATMUL_DESC_TRANSB as c_int,
    epilogue: Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE as c_int,
    bias: Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER as c_int,
    alignments: &[
        Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES as c_int,
        Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES as c_int,
        Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES as c_int,
        Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES as c_int,
    ],
};
const AMD: Numbers = Numbers {
    compute_f32: sys::HIPBLAS_COMPUTE_32F as c_int,
    transposed: [sys::HIPBLAS_OP_N as i32, sys::HIPBLAS_OP_T as i32],
    transpose_a: sys::HIPBLASLT_MATMUL_DESC_TRANSA as c_int,
    transpose_b: sys::HIPBLASLT_MATMUL_DESC_TRANSB as c_int,
    epilogue: sys::HIPBLASLT_MATMUL_DESC_EPILOGUE as c_int,
    bias: sys::HIPBLASLT_MATMUL_DESC_BIAS_POINTER as c_int,
    alignments: &[],
};

/// The same with both.
mod same {
    use super::sys;
    pub const F32: i32 = sys::HIP_R_32F as i32;
    pub const BF16: i32 = sys::HIP_R_16BF as i32;
    pub const EPILOGUE_BIAS: u32 = sys::HIPBLASLT_EPILOGUE_BIAS;
    pub const MOST_WORKSPACE: i32 = sys::HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as i32;
}

/// A function's name: cuBLASLt's, hipBLASLt's.
type Names = [&'static str; 2];

macro_rules! name {
    ($name:literal) => {
        [concat!("cublasLt", $name), concat!("hipblasLt", $name)]
    };
}

/// What a plan depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    form: Form,
    dtype: DType,
    c_dtype: DType,
    bias: bool,
    sizes: [usize; 6],
}

/// How the library does a product: a, b and c are its own, which are our b, a and c.
struct Plan {
    product: usize,
    a: usize,
    b: usize,
    c: usize,
    algorithm: Box<[u64; ANSWER_WORDS]>,
}

/// The library.
pub struct Blas {
    vendor: Vendor,
    functions: Functions,
    numbers: &'static Numbers,
    handle: usize,
    /// `None`: the library knows no way; our own kernel does it.
    plans: Mutex<HashMap<Key, Option<Plan>>>,
    // Behind the functions that it owns.
    library: Symbols,
}

impl Blas {
    /// The library of this vendor at `path`, else as it is installed; `None`: it is not.
    ///
    /// # Errors
    /// What is at `path` cannot be loaded, a function is missing, or the library does not start.
    pub fn open(vendor: Vendor, path: Option<&Path>) -> Result<Option<Blas>> {
        let library = match vendor {
            Vendor::Nvidia => cuda::open_blas(path)?,
            Vendor::Amd => Symbols::open(path, &["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"])?,
        };
        let Some(library) = library else { return Ok(None) };
        let (prefix, numbers) = if vendor == Vendor::Nvidia { ("cublasLt", &NVIDIA) } else { ("hipblasLt", &AMD) };
        fn symbol<T: Copy>(library: &Symbols, prefix: &str, name: &str) -> Result<T> {
            // SAFETY: `T` is the function's type in the vendor's header, given by the field that it is stored in.
            unsafe { library.get(&format!("{prefix}{name}")) }
        }
        let create: Make = symbol(&library, prefix, "Create")?;
        let functions = Functions {
            destroy: symbol(&library, prefix, "Destroy")?,
            make_product: symbol(&library, prefix, "MatmulDescCreate")?,
            set_product: symbol(&library, prefix, "MatmulDescSetAttribute")?,
            make_layout: symbol(&library, prefix, "MatrixLayoutCreate")?,
            make_wishes: symbol(&library, prefix, "MatmulPreferenceCreate")?,
            set_wishes: symbol(&library, prefix, "MatmulPreferenceSetAttribute")?,
            suggest: symbol(&library, prefix, "MatmulAlgoGetHeuristic")?,
            matmul: symbol(&library, prefix, "Matmul")?,
        };
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: a place to write to; a device is current.
        let code = unsafe { create(&mut handle) };
        let blas = Blas { vendor, functions, numbers, handle: handle as usize, plans: Mutex::default(), library };
        blas.check("starting", name!("Create"), code)?;
        Ok(Some(blas))
    }

    /// Its name or path.
    pub fn name(&self) -> &str {
        self.library.name()
    }

    /// Its version: `12.9.1`, `0.12.1`.
    pub fn version(&self) -> String {
        let (number, major) = match self.vendor {
            Vendor::Nvidia => {
                // SAFETY: the signature that the vendor documents under this name.
                let number = unsafe { self.library.get::<unsafe extern "C" fn() -> usize>("cublasLtGetVersion").map(|f| f()) };
                (number.ok(), 10_000)
            }
            Vendor::Amd => {
                let mut number = 0;
                // SAFETY: as above; the handle is of this library, and there is a place to write to.
                let ask = unsafe { self.library.get::<unsafe extern "C" fn(Handle, *mut c_int) -> c_int>("hipblasLtGetVersion") };
                // SAFETY: as above.
                let known = ask.is_ok_and(|f| unsafe { f(self.handle as Handle, &mut number) } == 0);
                (known.then_some(number as usize), 100_000)
            }
        };
        number.map_or_else(|| "unknown version".into(), |n| format!("{}.{}.{}", n / major, n % major / 100, n % 100))
    }

    fn check(&self, what: &str, call: Names, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let call = call[usize::from(self.vendor == Vendor::Amd)];
        Err(Error::Driver { what: format!("{}, {what}", self.library.name()), call, code, text: "see the library's status codes".into() })
    }

    /// Enqueues a product; false: our own kernel has to do it.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// The operands are valid until the product has run; `workspace` has [`WORKSPACE_BYTES`], which nothing else uses on another stream.
    pub unsafe fn enqueue(&self, s: RawStream, p: &Dense, workspace: u64) -> Result<bool> {
        let (bytes, c_bytes) = (p.dtype.bytes() as u64, p.c_dtype.bytes() as u64);
        let places = [p.a.0, p.b.0, p.c.0, p.lda as u64 * bytes, p.ldb as u64 * bytes, p.ldc as u64 * c_bytes];
        let strange_bias = p.bias.0 != 0 && p.c_dtype != p.dtype;
        if strange_bias || places.iter().any(|n| n % ALIGN_BYTES != 0) {
            return Ok(false);
        }
        let sizes = [p.m, p.n, p.k, p.lda, p.ldb, p.ldc];
        let key = Key { form: p.form, dtype: p.dtype, c_dtype: p.c_dtype, bias: p.bias.0 != 0, sizes };
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.plan(p)?),
        };
        let Some(plan) = plan else { return Ok(false) };
        let product = plan.product as Handle;
        if p.bias.0 != 0 {
            self.set(product, self.functions.set_product, self.numbers.bias, &p.bias.0, name!("MatmulDescSetAttribute"))?;
        }
        let (alpha, beta) = (1f32, if p.add { 1f32 } else { 0f32 });
        let c = plan.c as Handle;
        // SAFETY: descriptors and layouts of this library; operands as promised; the two factors are read before the call returns.
        let code = unsafe {
            (self.functions.matmul)(
                self.handle as Handle,
                product,
                &alpha,
                p.b.0,
                plan.a as Handle,
                p.a.0,
                plan.b as Handle,
                &beta,
                p.c.0,
                c,
                p.c.0,
                c,
                plan.algorithm.as_ptr(),
                workspace,
                WORKSPACE_BYTES,
                s.0 as Handle,
            )
        };
        self.check(&format!("product {} x {} x {}", p.m, p.n, p.k), name!("Matmul"), code)?;
        Ok(true)
    }

    fn set<T>(&self, of: Handle, set: Set, number: c_int, value: &T, call: Names) -> Result<()> {
        // SAFETY: a descriptor of this library, and a value of the size given.
        let code = unsafe { set(of, number, std::ptr::from_ref(value).cast(), size_of::<T>()) };
        self.check(&format!("attribute {number}"), call, code)
    }

    /// Asks the library for a way to do a product of this shape.
    fn plan(&self, p: &Dense) -> Result<Option<Plan>> {
        let (f, n) = (&self.functions, self.numbers);
        let kind = |dtype: DType| if dtype == DType::BF16 { same::BF16 } else { same::F32 };
        let mut product: Handle = std::ptr::null_mut();
        // SAFETY: a place to write to.
        self.check("product", name!("MatmulDescCreate"), unsafe { (f.make_product)(&mut product, n.compute_f32, same::F32) })?;
        // Its a is our b, and is [n, k] there once transposed as needed.
        let (b_turned, a_turned) = (p.form == Form::Nt, p.form == Form::Tn);
        self.set(product, f.set_product, n.transpose_a, &n.transposed[usize::from(b_turned)], name!("MatmulDescSetAttribute"))?;
        self.set(product, f.set_product, n.transpose_b, &n.transposed[usize::from(a_turned)], name!("MatmulDescSetAttribute"))?;
        if p.bias.0 != 0 {
            self.set(product, f.set_product, n.epilogue, &same::EPILOGUE_BIAS, name!("MatmulDescSetAttribute"))?;
            self.set(product, f.set_product, n.bias, &p.bias.0, name!("MatmulDescSetAttribute"))?;
        }
        let layout = |dtype: DType, rows: usize, cols: usize, ld: usize| -> Result<Handle> {
            let mut out: Handle = std::ptr::null_mut();
            // SAFETY: a place to write to.
            let code = unsafe { (f.make_layout)(&mut out, kind(dtype), rows as u64, cols as u64, ld as i64) };
            self.check("layout", name!("MatrixLayoutCreate"), code)?;
            Ok(out)
        };
        let a = if b_turned { layout(p.dtype, p.k, p.n, p.ldb)? } else { layout(p.dtype, p.n, p.k, p.ldb)? };
        let b = if a_turned { layout(p.dtype, p.m, p.k, p.lda)? } else { layout(p.dtype, p.k, p.m, p.lda)? };
        let c = layout(p.c_dtype, p.n, p.m, p.ldc)?;
        let mut wishes: Handle = std::ptr::null_mut();
        // SAFETY: a place to write to.
        self.check("wishes", name!("MatmulPreferenceCreate"), unsafe { (f.make_wishes)(&mut wishes) })?;
        self.set(wishes, f.set_wishes, same::MOST_WORKSPACE, &WORKSPACE_BYTES, name!("MatmulPreferenceSetAttribute"))?;
        for &alignment in n.alignments {
            self.set(wishes, f.set_wishes, alignment, &(ALIGN_BYTES as u32), name!("MatmulPreferenceSetAttribute"))?;
        }
        let mut algorithm = Box::new([0u64; ANSWER_WORDS]);
        let mut found: c_int = 0;
        // SAFETY: descriptors of this library, and room for one answer.
        let code = unsafe { (f.suggest)(self.handle as Handle, product, a, b, c, c, wishes, 1, algorithm.as_mut_ptr(), &mut found) };
        // "Not supported" and an empty answer mean the same.
        if code != 0 || found == 0 {
            return Ok(None);
        }
        Ok(Some(Plan { product: product as usize, a: a as usize, b: b as usize, c: c as usize, algorithm }))
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // Descriptors are few and go with the process; the handle holds device memory.
        // SAFETY: made by this library, used by nobody else.
        let _ = unsafe { (self.functions.destroy)(self.handle as Handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_the_same_with_both_is() {
        assert_eq!(same::F32, lt::cudaDataType_t::CUDA_R_32F as i32);
        assert_eq!(same::BF16, lt::cudaDataType_t::CUDA_R_16BF as i32);
        assert_eq!(same::EPILOGUE_BIAS, lt::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32);
        assert_eq!(same::MOST_WORKSPACE, Wish::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as i32);
        // And what is not, is not.
        assert_ne!(NVIDIA.transposed, AMD.transposed);
        assert_ne!(NVIDIA.bias, AMD.bias);
    }
}
