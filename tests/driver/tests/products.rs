//! Are matrix products of the emulated cuBLASLt and hipBLASLt those of the definition?

mod common;

use common::{Gpu, inside};
use half::bf16;
use std::ffi::{c_int, c_void};

const F32: c_int = 0;
const BF16: c_int = 14;
type I = c_int;

/// Attributes' numbers: those of the vendor.
struct Numbers {
    transposed: [i32; 2],
    transpose: [i32; 2],
    epilogue: i32,
    bias: i32,
    compute: i32,
    result_bytes: usize,
}

fn numbers(amd: bool) -> Numbers {
    if amd {
        Numbers { transposed: [111, 112], transpose: [0, 1], epilogue: 2, bias: 3, compute: 2, result_bytes: 56 }
    } else {
        Numbers { transposed: [0, 1], transpose: [3, 4], epilogue: 7, bias: 8, compute: 68, result_bytes: 96 }
    }
}

struct Case {
    m: usize,
    n: usize,
    k: usize,
    transpose: [bool; 2],
    out: c_int,
    beta: f32,
    bias: bool,
}

fn value(seed: usize, i: usize) -> bf16 {
    bf16::from_f32(((i * 37 + seed * 101) % 64) as f32 / 32.0 - 1.0)
}

fn layout(gpu: &Gpu, dtype: c_int, rows: usize, cols: usize) -> u64 {
    let mut out = 0u64;
    let (rows, cols) = (rows as u64, cols as u64);
    let args = (&mut out, dtype, rows, cols, rows as i64);
    let code = call!(
        gpu,
        "cublasLtMatrixLayoutCreate",
        "hipblasLtMatrixLayoutCreate",
        (*mut u64, I, u64, u64, i64),
        (args.0, args.1, args.2, args.3, args.4)
    );
    assert_eq!(code, 0);
    out
}

fn check(gpu: &Gpu, case: &Case) {
    let Case { m, n, k, transpose, out, beta, bias } = *case;
    let numbers = numbers(gpu.amd);
    let s = gpu.stream();
    let shape = |rows: usize, cols: usize, t: bool| if t { (cols, rows) } else { (rows, cols) };
    let (a_shape, b_shape) = (shape(m, k, transpose[0]), shape(k, n, transpose[1]));
    let a: Vec<bf16> = (0..m * k).map(|i| value(1, i)).collect();
    let b: Vec<bf16> = (0..k * n).map(|i| value(2, i)).collect();
    let c: Vec<f32> = (0..m * n).map(|i| value(3, i).to_f32()).collect();
    let biases: Vec<bf16> = (0..m).map(|i| value(4, i)).collect();
    let (pa, pb, pbias) = (gpu.put(&a, s), gpu.put(&b, s), gpu.put(&biases, s));
    let narrow: Vec<bf16> = c.iter().map(|v| bf16::from_f32(*v)).collect();
    let pd = if out == F32 { gpu.put(&c, s) } else { gpu.put(&narrow, s) };

    let mut handle = 0u64;
    assert_eq!(call!(gpu, "cublasLtCreate", "hipblasLtCreate", (*mut u64), (&mut handle)), 0);
    let mut desc = 0u64;
    let made = call!(gpu, "cublasLtMatmulDescCreate", "hipblasLtMatmulDescCreate", (*mut u64, I, I), (&mut desc, numbers.compute, F32));
    assert_eq!(made, 0);
    let set = |attribute: i32, from: *const c_void, bytes: usize| {
        let code = call!(
            gpu,
            "cublasLtMatmulDescSetAttribute",
            "hipblasLtMatmulDescSetAttribute",
            (u64, I, *const c_void, usize),
            (desc, attribute, from, bytes)
        );
        assert_eq!(code, 0);
    };
    for (attribute, t) in numbers.transpose.iter().zip(transpose) {
        set(*attribute, std::ptr::from_ref(&numbers.transposed[usize::from(t)]).cast(), 4);
    }
    // The bias needs the type of D.
    if bias {
        set(numbers.epilogue, std::ptr::from_ref(&4u32).cast(), 4);
        set(numbers.bias, std::ptr::from_ref(&pbias).cast(), 8);
    }
    let layouts = [layout(gpu, BF16, a_shape.0, a_shape.1), layout(gpu, BF16, b_shape.0, b_shape.1), layout(gpu, out, m, n)];
    let mut preference = 0u64;
    let made = call!(gpu, "cublasLtMatmulPreferenceCreate", "hipblasLtMatmulPreferenceCreate", (*mut u64), (&mut preference));
    assert_eq!(made, 0);
    let mut result = [0xffu8; 128];
    let mut found = 0;
    let [la, lb, ld] = layouts;
    let code = call!(
        gpu,
        "cublasLtMatmulAlgoGetHeuristic",
        "hipblasLtMatmulAlgoGetHeuristic",
        (u64, u64, u64, u64, u64, u64, u64, I, *mut u8, *mut I),
        (handle, desc, la, lb, ld, ld, preference, 1, result.as_mut_ptr(), &mut found)
    );
    assert_eq!((code, found, result[numbers.result_bytes]), (0, 1, 0xff));
    let alpha = 0.5f32;
    let code = call!(
        gpu,
        "cublasLtMatmul",
        "hipblasLtMatmul",
        (u64, u64, *const f32, u64, u64, u64, u64, *const f32, u64, u64, u64, u64, *const u8, u64, usize, u64),
        (handle, desc, &alpha, pa, la, pb, lb, &beta, pd, ld, pd, ld, result.as_ptr(), 0, 0, s)
    );
    assert_eq!(code, 0);
    let got: Vec<f32> = if out == F32 {
        gpu.take(pd, m * n, s)
    } else {
        gpu.take::<u16>(pd, m * n, s).into_iter().map(|b| bf16::from_bits(b).to_f32()).collect()
    };
    let at = |x: &[bf16], shape: (usize, usize), t: bool, i: usize, j: usize| {
        let (row, col) = if t { (j, i) } else { (i, j) };
        f64::from(x[col * shape.0 + row].to_f32())
    };
    for j in 0..n {
        for i in 0..m {
            let sum: f64 = (0..k).map(|x| at(&a, a_shape, transpose[0], i, x) * at(&b, b_shape, transpose[1], x, j)).sum();
            let extra = if bias { f64::from(biases[i].to_f32()) } else { 0.0 };
            let expected = 0.5 * sum + f64::from(beta) * f64::from(c[j * m + i]) + extra;
            // Products of multiples of 1/32 and short sums are exact in f32; only the result's type rounds.
            let expected = if out == F32 { expected as f32 } else { bf16::from_f64(expected).to_f32() };
            assert_eq!(got[j * m + i], expected, "({i}, {j}) of {m} x {n} x {k} {transpose:?}");
        }
    }
}

#[test]
fn products_are_those_of_the_definition() {
    if !inside("products_are_those_of_the_definition", "") {
        return;
    }
    for amd in [false, true] {
        let gpu = Gpu::open(amd);
        for transpose in [[false, false], [true, false], [false, true], [true, true]] {
            for (out, beta, bias) in [(F32, 0.0, false), (F32, 1.0, false), (BF16, 0.0, true), (BF16, 1.0, false)] {
                check(&gpu, &Case { m: 7, n: 5, k: 35, transpose, out, beta, bias });
            }
        }
        let mut desc = 0u64;
        let strange = call!(gpu, "cublasLtMatmulDescCreate", "hipblasLtMatmulDescCreate", (*mut u64, I, I), (&mut desc, 12_345, F32));
        assert_eq!(strange, 0, "refused only where it is used");
    }
}
