//! Right calls pass, and each wrong operand is named. Buffers are address ranges: checks never look at bytes.

use super::*;
use crate::{Buffer, Place, cpu::heap::AddressRange};

fn make(dtype: DType, elems: usize) -> ViewMut {
    Buffer::from_mapping("t", Place::Device, Box::new(AddressRange(elems * dtype.bytes()))).all(dtype).unwrap()
}
fn f(elems: usize) -> ViewMut {
    make(DType::F32, elems)
}

#[test]
fn names_operand_expected_and_got() {
    let (y, rstd, x, w) = (f(12), f(3), f(12), f(4));
    assert_eq!(rmsnorm(&y, &rstd, &x, &w, 1e-5, 3, 4), Ok(()));
    assert_eq!(rmsnorm(&y, &rstd, &x, &w, 1e-5, 4, 3), Err(Error::Length { op: "rmsnorm", operand: "rstd", expected: 4, got: 3 }));
    let half = make(DType::BF16, 12);
    let e = rmsnorm(&half, &rstd, &x, &w, 1e-5, 3, 4);
    assert_eq!(e, Err(Error::Type { op: "rmsnorm", operand: "y", expected: "f32", got: DType::BF16 }));
}

#[test]
fn in_place_only_where_documented() {
    let (y, rstd, w) = (f(12), f(3), f(4));
    assert_eq!(rmsnorm(&y, &rstd, &y, &w, 1e-5, 3, 4), Ok(()));
    let big = f(16);
    let shifted = (big.slice(0, 12).unwrap(), big.slice(4, 12).unwrap());
    assert!(matches!(rmsnorm(&shifted.0, &rstd, &shifted.1, &w, 1e-5, 3, 4), Err(Error::Shape { .. })));
    assert!(matches!(add_into(&y, &y), Err(Error::Shape { .. })));
    let (ws, dy) = (make(DType::U8, 0), f(12));
    let call = |write| rmsnorm_backward(Some((&dy, write)), None, &dy, &y, &rstd, &w, 3, 4, &ws, 0);
    assert_eq!(call(Write::Set), Ok(()));
    assert!(call(Write::Add).is_err());
}

#[test]
fn numbers_that_overflow_are_errors() {
    let (y, x) = (f(1), f(1));
    let w = Weight::from(f(1).view());
    let e = linear(&y, &x, &w, None, usize::MAX, 2, 1).unwrap_err();
    assert!(e.to_string().contains("can be addressed"), "{e}");
    assert!(attention(&y, &y, &x, &x, &x, &x, 1, usize::MAX, geometry_of(1), &x, 0).is_err());
}

fn geometry_of(heads: usize) -> Attention {
    Attention { heads, kv_heads: 1, head_dim: 2, window: None, scale: 1.0 }
}

#[test]
fn workspace_must_be_long_enough_and_raw() {
    let (nodes, x) = (f(SUM_SQUARES_NODES), f(5000));
    assert_eq!(sum_squares(&nodes, &x, 7, &make(DType::U8, 20), 20), Ok(()));
    let e = sum_squares(&nodes, &x, 7, &make(DType::U8, 19), 20);
    assert_eq!(e, Err(Error::Length { op: "sum_squares", operand: "workspace", expected: 20, got: 19 }));
    assert!(matches!(sum_squares(&nodes, &x, 7, &f(20), 20), Err(Error::Type { .. })));
}

#[test]
fn adapters_must_not_share_gradients() {
    let (n, i, o, r) = (3, 4, 5, 2);
    let ad = |da: &ViewMut| LoraBackward {
        da: da.clone(),
        db: f(o * r),
        write: Write::Add,
        dy: f(n * o).view(),
        t: f(n * r).view(),
        a: f(r * i).view(),
        b: f(o * r).view(),
        scale: 2.0,
        outputs: o,
        rank: r,
        site: 0,
    };
    let (x, ws, da) = (f(n * i), make(DType::U8, 8), f(r * i));
    assert_eq!(lora_backward(None, &[ad(&da), ad(&f(r * i))], &x, None, n, i, &ws, 8), Ok(()));
    assert!(lora_backward(None, &[ad(&da), ad(&da)], &x, None, n, i, &ws, 8).is_err());
    let p1 = Dropout { p: 1.0, seed: 0, step: 0, micro_batch: 0 };
    assert!(lora_backward(None, &[ad(&da)], &x, Some(p1), n, i, &ws, 8).is_err());
}

/// `call` takes operands of `spec` and must refuse one of another type, and (unless its length is free) a shorter one.
fn sweep(spec: &[(DType, usize, bool)], call: impl Fn(&[ViewMut]) -> Result<()>) {
    let views = |change: Option<(usize, DType, usize)>| -> Vec<ViewMut> {
        let of = |(i, &(t, n, _)): (usize, &(DType, usize, bool))| change.filter(|c| c.0 == i).map_or((t, n), |c| (c.1, c.2));
        spec.iter().enumerate().map(of).map(|(t, n)| make(t, n)).collect()
    };
    assert_eq!(call(&views(None)), Ok(()));
    for (i, &(dtype, elems, free)) in spec.iter().enumerate() {
        let other = if dtype == DType::I32 { DType::F32 } else { DType::I32 };
        let e = call(&views(Some((i, other, elems))));
        assert!(matches!(e, Err(Error::Type { .. })), "operand {i} of {spec:?}: {e:?}");
        if !free {
            let e = call(&views(Some((i, dtype, elems - 1))));
            assert!(matches!(e, Err(Error::Length { .. })), "operand {i} of {spec:?}: {e:?}");
        }
    }
}

#[test]
fn every_operand_of_every_operation_is_checked() {
    use DType::{BF16, F32, I32, U8};
    let s = Write::Set;
    let (n, c, i, o, vocab, r) = (6, 8, 8, 10, 12, 2);
    let x = |t| (t, n * c, false);
    let f32s = |elems| (F32, elems, false);
    let ids = (I32, n, false);
    let ws = (U8, 9, false);
    for t in [F32, BF16] {
        sweep(&[x(t), (t, vocab * c, false), ids], |v| embedding(&v[0], &v[1], &v[2], c));
        sweep(&[f32s(vocab * c), x(t), ids, ws], |v| embedding_backward(&v[0], &v[1], &v[2], c, &v[3], 9));
        sweep(&[x(t), f32s(n), x(t), (t, c, false)], |v| rmsnorm(&v[0], &v[1], &v[2], &v[3], 1e-5, n, c));
        sweep(&[x(t), f32s(c), x(t), x(t), f32s(n), (t, c, false), ws], |v| {
            rmsnorm_backward(Some((&v[0], s)), Some((&v[1], s)), &v[2], &v[3], &v[4], &v[5], n, c, &v[6], 9)
        });
        let (y, w) = ((t, n * o, false), (t, o * i, false));
        sweep(&[y, x(t), w, (t, o, false)], |v| linear(&v[0], &v[1], &v[2].view().into(), Some(&v[3]), n, i, o));
        sweep(&[x(t), f32s(o * i), f32s(o), y, x(t), w, ws], |v| {
            let (dx, dw, dbias) = (Some((&v[0], s)), Some((&v[1], s)), Some((&v[2], s)));
            linear_backward(dx, dw, dbias, &v[3], Some(&v[4]), &v[5].view().into(), n, i, o, &v[6], 9)
        });
        sweep(&[y, f32s(n * r), f32s(r * i), f32s(o * r), x(t), ws], |v| {
            let (y, t, a, b) = (v[0].clone(), v[1].clone(), v[2].view(), v[3].view());
            lora(&[LoraForward { y, t, a, b, scale: 1.0, outputs: o, rank: r, site: 0 }], &v[4], None, n, i, &v[5], 9)
        });
        sweep(&[f32s(r * i), f32s(o * r), y, f32s(n * r), f32s(r * i), f32s(o * r), x(t), x(t), ws], |v| {
            let (da, db, dy, t, a, b) = (v[0].clone(), v[1].clone(), v[2].view(), v[3].view(), v[4].view(), v[5].view());
            let ad = LoraBackward { da, db, write: s, dy, t, a, b, scale: 1.0, outputs: o, rank: r, site: 0 };
            lora_backward(Some(&v[6]), &[ad], &v[7], None, n, i, &v[8], 9)
        });
        // 2 heads of 4 dimensions over 1 kv head.
        let (kv, seqlens) = ((t, n * 4, false), (I32, n + 1, false));
        let g = Attention { heads: 2, kv_heads: 1, head_dim: 4, window: None, scale: 0.5 };
        for check in [rope, rope_backward] {
            sweep(&[x(t), f32s(5 * 4), ids], |v| check(&v[0], &v[1], &v[2], 2, 4));
        }
        sweep(&[x(t), f32s(n * 2), x(t), kv, kv, seqlens, ws], |v| attention(&v[0], &v[1], &v[2], &v[3], &v[4], &v[5], 2, n, g, &v[6], 9));
        sweep(&[x(t), kv, kv, x(t), x(t), kv, kv, x(t), f32s(n * 2), seqlens, ws], |v| {
            let [dq, dk, dv, dout, q, k, vv, o, lse, cu, ws] = v else { unreachable!() };
            attention_backward(dq, dk, dv, dout, q, k, vv, o, lse, cu, 2, n, g, ws, 9)
        });
        sweep(&[x(t), x(t), x(t)], |v| swiglu(&v[0], &v[1], &v[2]));
        sweep(&[x(t), x(t), x(t), x(t), x(t)], |v| swiglu_backward(&v[0], &v[1], &v[2], &v[3], &v[4]));
        sweep(&[f32s(n), x(t), f32s(vocab * c), x(t), (t, vocab * c, false), ids, ws], |v| {
            let (dx, dw, w) = (Some(&v[1]), Some((&v[2], s)), v[4].view().into());
            linear_cross_entropy(&v[0], dx, dw, &v[3], &w, &v[5], n, c, vocab, &v[6], 9)
        });
        sweep(&[x(t), x(t)], |v| add_into(&v[0], &v[1]));
        sweep(&[(t, n, true)], |v| scale(&v[0]));
        sweep(&[x(t), x(BF16)], |v| cast(&v[0], &v[1]));
        sweep(&[f32s(1), (t, n, true)], |v| count_nonfinite(&v[0], &v[1]));
        let hp = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, step: 1 };
        sweep(&[f32s(n), f32s(n), f32s(n), (t, n, false), f32s(n), f32s(1)], |v| adamw(&v[0], &v[1], &v[2], Some(&v[3]), &v[4], &v[5], hp));
        let none = [make(F32, n), make(F32, 1)];
        let step0 = AdamW { step: 0, ..hp };
        assert!(adamw(&f(n), &f(n), &f(n), None, &none[0], &none[1], step0).is_err());
    }
    sweep(&[f32s(1), (F32, n, true)], |v| sum(&v[0], &v[1]));
    sweep(&[x(F32), x(F32), x(F32)], |v| add(&v[0], &v[1], &v[2]));
    sweep(&[f32s(SUM_SQUARES_NODES), (F32, n, true), ws], |v| sum_squares(&v[0], &v[1], 3, &v[2], 9));
    let ranges = [(0, 3), (3, 2)];
    sweep(&[f32s(1), f32s(1), f32s(2 * SUM_SQUARES_NODES)], |v| clip_scale(&v[0], &v[1], &v[2], &ranges, 2, 1, Some(1.0)));
    assert!(clip_scale(&f(1), &f(1), &f(2 * SUM_SQUARES_NODES), &ranges[..1], 2, 1, None).is_err());
}
