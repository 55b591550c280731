//! Both ways against the naive function in f64, its differences, and themselves.

use super::*;
#[cfg(target_arch = "x86_64")]
use crate::cpu::matmul::pairs::{amx::Tiles, dots::Dots};
use crate::cpu::reference::{self, Values};

struct Case {
    documents: Vec<usize>,
    shape: Attention,
}

impl Case {
    fn new(documents: &[usize], heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> Case {
        let scale = 1.0 / (head_dim as f32).sqrt();
        Case { documents: documents.to_vec(), shape: Attention { heads, kv_heads, head_dim, window, scale } }
    }

    fn tokens(&self) -> usize {
        self.documents.iter().sum()
    }

    fn bounds(&self) -> Vec<i32> {
        let mut bounds = vec![0];
        bounds.extend(self.documents.iter().scan(0, |at, n| {
            *at += *n as i32;
            Some(*at)
        }));
        // What lies behind the last boundary is ignored.
        bounds.resize(self.tokens() + 1, -7);
        bounds
    }
}

/// Inputs q, k, v, dout of a case in one storage type, as stored.
struct Inputs {
    q: Values,
    k: Values,
    v: Values,
    dout: Values,
}

fn inputs(case: &Case, bf16: bool, seed: u32) -> Inputs {
    let n = case.tokens() * case.shape.head_dim;
    let make = |heads: usize, seed| Values::random(n * heads, bf16, seed);
    let (h, k) = (case.shape.heads, case.shape.kv_heads);
    Inputs { q: make(h, seed), k: make(k, seed + 1), v: make(k, seed + 2), dout: make(h, seed + 3) }
}

/// How attention is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// As the pool's instruction set says.
    Chosen,
    /// On tiles of AMX, by the processor or emulated; vectors are the pool's.
    Amx,
    /// On tiles of the pool's vectors.
    Dots,
}

/// The ways that this machine can go for a storage type.
fn ways(bf16: bool) -> Vec<Way> {
    let mut ways = vec![Way::Chosen];
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    if bf16 {
        crate::cpu::matmul::pairs::emulate::install();
        ways.extend([Way::Amx, Way::Dots]);
    }
    let _ = bf16;
    ways
}

/// Results as stored, converted to f32: o, lse, dq, dk, dv.
fn run(pool: &Pool, case: &Case, way: Way, x: &mut Inputs) -> Vec<Vec<f32>> {
    let (tokens, shape) = (case.tokens(), case.shape);
    let (mut o, mut dq, mut dk, mut dv) = (x.q.like(), x.q.like(), x.k.like(), x.k.like());
    let mut lse = vec![f32::NAN; tokens * shape.heads];
    let mut work = vec![f32::NAN; workspace_elems(tokens, shape)];
    let bounds = case.bounds();
    let (q, k, v) = (x.q.operand(), x.k.operand(), x.v.operand());
    let fw = Forward { o: o.operand(), lse: Raw::new(&mut lse), q, k, v };
    let bw = Backward {
        dq: dq.operand(),
        dk: dk.operand(),
        dv: dv.operand(),
        dout: x.dout.operand(),
        q,
        k,
        v,
        o: fw.o,
        lse: fw.lse,
        work: Raw::new(&mut work),
    };
    match way {
        Way::Chosen => {
            forward(pool, fw, &bounds, case.documents.len(), tokens, shape).unwrap();
            backward(pool, bw, &bounds, case.documents.len(), tokens, shape).unwrap();
        }
        #[cfg(target_arch = "x86_64")]
        Way::Amx | Way::Dots => {
            let groups = groups(boundaries("test", &bounds, case.documents.len(), tokens).unwrap(), shape);
            assert!(tiles::serve(&[q, k, v, bw.dout], shape));
            // SAFETY: the unit is there or emulated since `ways`.
            unsafe {
                if way == Way::Amx {
                    tiles::forward::<Tiles>(pool, fw, &groups);
                    tiles::backward::<Tiles>(pool, bw, tokens, &groups);
                } else {
                    tiles::forward::<Dots>(pool, fw, &groups);
                    tiles::backward::<Dots>(pool, bw, tokens, &groups);
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Way::Amx | Way::Dots => unreachable!(),
    }
    vec![o.f32s(), lse, dq.f32s(), dk.f32s(), dv.f32s()]
}

/// Naive attention in f64, document by document, row by row: o, lse.
fn naive(case: &Case, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let Attention { heads, kv_heads, head_dim: d, window, scale } = case.shape;
    let (mut o, mut lse) = (vec![0.0; q.len()], vec![0.0; case.tokens() * heads]);
    let mut start = 0;
    for n in &case.documents {
        for i in 0..*n {
            for h in 0..heads {
                let row = ((start + i) * heads + h) * d;
                let key = |j: usize| ((start + j) * kv_heads + h / (heads / kv_heads)) * d;
                let low = window.map_or(0, |w| (i + 1).saturating_sub(w));
                let s: Vec<f64> = (low..=i).map(|j| f64::from(scale) * (0..d).map(|c| q[row + c] * k[key(j) + c]).sum::<f64>()).collect();
                let top = s.iter().fold(f64::MIN, |a, b| a.max(*b));
                let total: f64 = s.iter().map(|s| (s - top).exp()).sum();
                lse[(start + i) * heads + h] = top + total.ln();
                for (j, s) in (low..=i).zip(&s) {
                    for c in 0..d {
                        o[row + c] += (s - top).exp() / total * v[key(j) + c];
                    }
                }
            }
        }
        start += n;
    }
    (o, lse)
}

/// Against the naive function and its differences.
fn check(case: &Case, bf16: bool) {
    ways(bf16).into_iter().for_each(|way| check_way(case, bf16, way));
}

fn check_way(case: &Case, bf16: bool, way: Way) {
    let mut x = inputs(case, bf16, 7);
    let (q, k, v, dout) = (x.q.f64s(), x.k.f64s(), x.v.f64s(), x.dout.f64s());
    let (o, lse) = naive(case, &q, &k, &v);
    let mut first: Option<Vec<Vec<f32>>> = None;
    for got in reference::on_every_pool(|pool| run(pool, case, way, &mut x)) {
        let [got_o, got_lse, dq, dk, dv] = &got[..] else { unreachable!() };
        // f32: sums of up to 200 products in f32. bf16: one rounding of the output, 2^-9.
        let close = if bf16 { 4e-3 } else { 2e-6 };
        reference::assert_close("o", got_o, &o, close);
        // lse is f32 whatever the storage.
        reference::assert_close("lse", got_lse, &lse, 2e-6);
        // Differences of the slow function once; the other instruction sets are compared with the first.
        let Some(first) = &first else {
            // In bf16 the forward output, from which backward starts, is rounded too.
            let tolerance = if bf16 { 3e-2 } else { 2e-5 };
            for (name, grad, which) in [("dq", dq, 0), ("dk", dk, 1), ("dv", dv, 2)] {
                reference::assert_gradient(name, grad, [&q, &k, &v][which], tolerance, |moved| {
                    let mut at: [&[f64]; 3] = [&q, &k, &v];
                    at[which] = moved;
                    naive(case, at[0], at[1], at[2]).0.iter().zip(&dout).map(|(o, g)| o * g).sum()
                });
            }
            first = Some(got);
            continue;
        };
        for (name, i) in [("dq", 2), ("dk", 3), ("dv", 4)] {
            // As the outputs, with one more level of sums; noise of gradients that vanish is of the order of 1e-6.
            let want: Vec<f64> = first[i].iter().map(|x| f64::from(*x)).collect();
            let largest = want.iter().fold(1f64, |m, x| m.max(x.abs()));
            for (got, want) in got[i].iter().zip(&want) {
                assert!((f64::from(*got) - want).abs() <= if bf16 { 2e-2 } else { 1e-5 } * largest, "{name} by another instruction set");
            }
        }
    }
}

#[test]
fn matches_the_naive_function_and_its_differences() {
    for bf16 in [false, true] {
        check(&Case::new(&[1], 2, 1, 16, None), bf16);
        check(&Case::new(&[33, 1, 70], 3, 1, 18, None), bf16);
        check(&Case::new(&[130, 5], 3, 1, 64, None), bf16);
        check(&Case::new(&[90, 41], 4, 4, 32, Some(17)), bf16);
        check(&Case::new(&[80], 2, 1, 20, Some(1)), bf16);
        check(&Case::new(&[75], 4, 2, 130, Some(64)), bf16);
    }
}

/// Several chunks of keys, several items of queries, windows across both, documents that end inside a tile.
#[test]
fn tiles_match_the_naive_function_at_their_borders() {
    check(&Case::new(&[300, 1, 33], 2, 1, 64, None), true);
    check(&Case::new(&[290, 64], 3, 1, 32, Some(150)), true);
    check(&Case::new(&[260], 1, 1, 40, Some(31)), true);
    // Four panels of queries are an item.
    check(&Case::new(&[70, 10], 6, 1, 512, None), true);
}

/// Items, blocks and chunks are cut by the number of heads; a head's results do not depend on it.
#[test]
fn heads_do_not_know_of_each_other() {
    let pool = Pool::new(2).unwrap();
    for way in ways(true).into_iter().filter(|way| *way != Way::Chosen) {
        for window in [None, Some(100)] {
            let case = Case::new(&[200, 150], 6, 1, 64, window);
            let mut x = inputs(&case, true, 9);
            let together = run(&pool, &case, way, &mut x);
            let alone = Case { documents: case.documents.clone(), shape: Attention { heads: 1, ..case.shape } };
            let head = |v: &Values| {
                let all = v.f32s();
                Values::new(all.chunks(6 * 64).flat_map(|row| row[4 * 64..5 * 64].to_vec()).collect(), true)
            };
            let mut y = Inputs { q: head(&x.q), k: x.k.clone(), v: x.v.clone(), dout: head(&x.dout) };
            let apart = run(&pool, &alone, way, &mut y);
            for (what, width) in [(0, 64), (1, 1), (2, 64)] {
                let of_head: Vec<f32> = together[what].chunks(6 * width).flat_map(|row| row[4 * width..5 * width].to_vec()).collect();
                assert!(of_head.iter().zip(&apart[what]).all(|(a, b)| a.to_bits() == b.to_bits()), "result {what}");
            }
        }
    }
}

#[test]
fn documents_do_not_know_of_each_other() {
    ways(true).into_iter().for_each(documents_are_apart);
}

fn documents_are_apart(way: Way) {
    let pool = Pool::new(2).unwrap();
    let case = Case::new(&[37, 140, 3], 6, 3, 64, None);
    let mut x = inputs(&case, true, 3);
    let together = run(&pool, &case, way, &mut x);
    let mut start = 0;
    for n in &case.documents {
        let alone = Case { documents: vec![*n], shape: case.shape };
        let cut = |v: &Values, heads: usize| v.cut(start * heads * 64, n * heads * 64);
        let mut y = Inputs { q: cut(&x.q, 6), k: cut(&x.k, 3), v: cut(&x.v, 3), dout: cut(&x.dout, 6) };
        let apart = run(&pool, &alone, way, &mut y);
        for ((a, b), width) in together.iter().zip(&apart).zip([6 * 64, 6, 6 * 64, 3 * 64, 3 * 64]) {
            assert!(a[start * width..(start + n) * width].iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
        start += n;
    }
    // Another first document, even one that is not a number, changes no bit of the second.
    for v in [&mut x.q, &mut x.k, &mut x.v, &mut x.dout] {
        v.poison(0, 37 * 3 * 64);
    }
    let poisoned = run(&pool, &case, way, &mut x);
    for ((a, b), width) in together.iter().zip(&poisoned).zip([6 * 64, 6, 6 * 64, 3 * 64, 3 * 64]) {
        assert!(b[..width].iter().all(|x| x.is_nan()));
        assert!(a[37 * width..].iter().zip(&b[37 * width..]).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn a_later_token_changes_no_earlier_output() {
    let all = [false, true].map(|bf16| ways(bf16).into_iter().map(move |way| (bf16, way)));
    for (bf16, way) in all.into_iter().flatten() {
        let pool = Pool::new(1).unwrap();
        let case = Case::new(&[100], 3, 1, 32, None);
        let mut x = inputs(&case, bf16, 5);
        let before = run(&pool, &case, way, &mut x);
        x.k.set(60 * 32, 1e3);
        x.v.set(60 * 32, -1e3);
        let after = run(&pool, &case, way, &mut x);
        let same = |n: usize| before[0][..n].iter().zip(&after[0]).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same(60 * 3 * 32) && !same(61 * 3 * 32));
    }
}

#[test]
fn wrong_boundaries_are_named() {
    assert!(boundaries("attention", &[0, 3, 5], 2, 5).is_ok());
    assert!(boundaries("attention", &[0, 5, -1], 1, 5).is_ok());
    for (bounds, part) in [(vec![1, 5], "[0] is 1"), (vec![0, 4], "[1] is 4, expected 5"), (vec![0, 6, 5], "[2] is 5, expected at least 6")]
    {
        let error = boundaries("attention", &bounds, bounds.len() - 1, 5).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}
