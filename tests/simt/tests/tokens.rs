//! Operations on rows by token on emulated GPUs: rotary embedding against `f64`, embedding and its gradient with the CPU's bits,
//! and ids and positions that are out of range, which must fail the stream with the CPU's words.

use zrt_kernels::{DType, OpShape, Write};
use zrt_simt::testing::{assert_bits, assert_close, can_run, normal, on, rounding, wide};

const TWO: [&str; 2] = ["sm_90", "gfx942"];
const TYPES: [DType; 2] = [DType::F32, DType::BF16];

#[test]
fn rope_rotates_and_rotates_the_gradient_back() {
    if !can_run() {
        return;
    }
    const ROWS: usize = 40;
    for dtype in TYPES {
        for (tokens, heads, d, skew) in [(21, 3, 64, 0), (5, 1, 18, 0), (9, 2, 520, 0), (300, 1, 16, 0), (7, 4, 128, 1)] {
            let positions: Vec<i32> = (0..tokens as i32).map(|n| n * 13 % ROWS as i32).collect();
            let (x, dy) = (normal(tokens * heads * d, dtype, 1), normal(tokens * heads * d, dtype, 2));
            let table = normal(ROWS * d, DType::F32, 9);
            let (_, gpus) = on(&TWO, |rig| {
                let rig = rig.skewed(skew);
                let (y, dx) = (rig.tensor(&x, dtype), rig.tensor(&dy, dtype));
                let (t, p) = (rig.tensor(&table, DType::F32), rig.ints(&positions));
                rig.ops().rope(&y, &t, &p, heads, d, rig.stream()).unwrap();
                rig.ops().rope_backward(&dx, &t, &p, heads, d, rig.stream()).unwrap();
                vec![rig.read(&y), rig.read(&dx)]
            });
            let naive = |x: &[f64], sign: f64| {
                let mut y = x.to_vec();
                for (n, p) in positions.iter().enumerate() {
                    for at in (0..heads).flat_map(|h| (0..d / 2).map(move |i| (n * heads + h) * d + i)) {
                        let row = *p as usize * d + at % d;
                        let (cos, sin) = (f64::from(table[row]), sign * f64::from(table[row + d / 2]));
                        let (a, b) = (x[at], x[at + d / 2]);
                        (y[at], y[at + d / 2]) = (a * cos - b * sin, b * cos + a * sin);
                    }
                }
                y
            };
            for gpu in gpus {
                let what = format!("{tokens} x {heads} x {d} {dtype} on {}", gpu.arch);
                assert_close(&format!("y {what}"), &gpu.outputs[0], &naive(&wide(&x), 1.0), rounding(dtype));
                assert_close(&format!("dx {what}"), &gpu.outputs[1], &naive(&wide(&dy), -1.0), rounding(dtype));
            }
        }
    }
}

#[test]
fn embedding_rows_come_and_their_gradients_go_back_in_token_order() {
    if !can_run() {
        return;
    }
    for dtype in TYPES {
        // More tokens than a chunk of links, ids that repeat within and across chunks, one that fills a quarter, and none at all.
        for (tokens, vocab, hidden, skew) in [(53, 11, 130, 0), (2500, 700, 8, 0), (1025, 3, 9, 1), (64, 50_000, 16, 0), (0, 5, 4, 0)] {
            let ids: Vec<i32> = (0..tokens).map(|n| if n % 4 == 1 { 2 } else { (n * n * 7 % vocab) as i32 }).collect();
            let (table, dy) = (normal(vocab * hidden, dtype, 1), normal(tokens * hidden, dtype, 2));
            let before = normal(vocab * hidden, DType::F32, 3);
            let (cpu, gpus) = on(&TWO, |rig| {
                let rig = rig.skewed(skew);
                let (ops, s) = (rig.ops(), rig.stream());
                let (t, i, d) = (rig.tensor(&table, dtype), rig.ints(&ids), rig.tensor(&dy, dtype));
                let y = rig.empty(tokens * hidden, dtype);
                ops.embedding(&y, &t, &i, hidden, s).unwrap();
                let work = rig.workspace(OpShape::EmbeddingBackward { tokens, hidden, vocab });
                let (set, added) = (rig.empty(vocab * hidden, DType::F32), rig.tensor(&before, DType::F32));
                ops.embedding_backward(&set, Write::Set, &d, &i, hidden, &work, s).unwrap();
                ops.embedding_backward(&added, Write::Add, &d, &i, hidden, &work, s).unwrap();
                [&y, &set, &added].map(|v| rig.read(v)).to_vec()
            });
            for gpu in gpus {
                for (name, got, want) in ["y", "set", "added"].iter().zip(&gpu.outputs).zip(&cpu).map(|((n, g), w)| (n, g, w)) {
                    assert_bits(&format!("{name} of {tokens} x {hidden} {dtype} on {}", gpu.arch), got, want);
                }
            }
        }
    }
}

#[test]
fn bad_ids_and_positions_fail_the_stream_and_are_named() {
    if !can_run() {
        return;
    }
    let mut messages = vec![];
    for arch in TWO.iter().copied().map(Some).chain([None]) {
        let rig = || match arch {
            Some(arch) => {
                let options = zrt_simt::SimtOptions { arch, exact: true, order: zrt_simt::Order::Reverse, ..Default::default() };
                zrt_simt::testing::Rig::new(zrt_simt::SimtDevice::new(options).unwrap())
            }
            None => zrt_simt::testing::Rig::cpu(),
        };
        for bad in [9, -2] {
            let mut ids = vec![1; 1500];
            (ids[3], ids[700], ids[1400]) = (bad, -7, 4);
            let check = |f: &dyn Fn(&zrt_simt::testing::Rig)| {
                let rig = rig();
                // Made first: afterwards the stream may have failed.
                let probe = rig.tensor(&[0.0], DType::F32);
                f(&rig);
                rig.try_read(&probe).map(|_| String::new()).unwrap_or_else(|e| e.to_string())
            };
            messages.push((
                bad,
                check(&|rig| {
                    let table = rig.tensor(&[0.0; 8], DType::F32);
                    rig.ops().embedding(&rig.empty(3000, DType::F32), &table, &rig.ints(&ids), 2, rig.stream()).unwrap();
                }),
                check(&|rig| {
                    let work = rig.workspace(OpShape::EmbeddingBackward { tokens: 1500, hidden: 2, vocab: 4 });
                    let (dt, dy) = (rig.empty(8, DType::F32), rig.tensor(&[1.0; 3000], DType::BF16));
                    rig.ops().embedding_backward(&dt, Write::Set, &dy, &rig.ints(&ids), 2, &work, rig.stream()).unwrap();
                }),
                check(&|rig| {
                    let table = rig.tensor(&[0.5; 8], DType::F32);
                    rig.ops().rope(&rig.tensor(&[1.0; 3000], DType::F32), &table, &rig.ints(&ids), 1, 2, rig.stream()).unwrap();
                }),
            ));
        }
    }
    for m in &messages {
        let part = format!("{} at row 3 is out of 0..4", m.0);
        assert!(m.1.contains(&part) && m.2.contains(&part) && m.3.contains(&part), "{m:?}");
    }
    assert_eq!(messages[0], messages[4], "as the CPU tells it");
}
