//! Is this call of an operation well-formed? One function per method of [`crate::Ops`], used by every device before it
//! enqueues anything, so that a wrong length, type, number or overlap is an error of the call, with operand, expected and
//! got, and the simulated device refuses exactly what the real one refuses.
//!
//! A check takes the operands of its method in the same order, without those it cannot judge. Where the method has a
//! workspace, the check takes it with the bytes that the device's `workspace_bytes` asks for. Nothing here allocates,
//! unless there is an error to tell.

use crate::ops::{SUM_SQUARES_CHUNK, SUM_SQUARES_NODES};
use crate::{AdamW, AdaptedLinear, Attention, DType, Dropout, Error, LoraBackward, LoraForward, Result, View, ViewMut, Weight, Write};

/// A gradient that may be left out, and how it is written.
type Gradient<'a> = Option<(&'a ViewMut, Write)>;
/// An operand with its name.
type Named<'a> = (&'static str, Option<&'a View>);

const FLOAT: &str = "f32 or bf16";

fn shape(op: &'static str, what: impl Into<String>) -> Error {
    Error::Shape { op, what: what.into() }
}

/// Product of shape numbers, or an error where it leaves the address space.
fn product(op: &'static str, numbers: &[usize]) -> Result<usize> {
    // The bytes of f32 elements must be countable too.
    let elems = numbers
        .iter()
        .try_fold(1usize, |acc, &n| acc.checked_mul(n))
        .filter(|n| n.checked_mul(4).is_some_and(|b| b <= isize::MAX as usize));
    elems.ok_or_else(|| shape(op, format!("{numbers:?} multiply to more bytes than can be addressed")))
}

fn length(op: &'static str, operand: &'static str, view: &View, expected: usize) -> Result<()> {
    if view.elems() == expected { Ok(()) } else { Err(Error::Length { op, operand, expected, got: view.elems() }) }
}

fn typed(op: &'static str, operand: &'static str, view: &View, dtype: DType) -> Result<()> {
    if view.dtype() == dtype { Ok(()) } else { Err(Error::Type { op, operand, expected: dtype.name(), got: view.dtype() }) }
}

fn want(op: &'static str, operand: &'static str, view: &View, dtype: DType, elems: usize) -> Result<()> {
    typed(op, operand, view, dtype)?;
    length(op, operand, view, elems)
}

/// As [`want`], where an f32 sum that is not yet rounded to `dtype` will do too.
fn sum_or(op: &'static str, operand: &'static str, v: &View, dtype: DType, elems: usize) -> Result<()> {
    want(op, operand, v, if v.dtype() == DType::F32 { DType::F32 } else { dtype }, elems)
}

/// The storage type of a call: that of `view`, which must be a float.
fn float(op: &'static str, operand: &'static str, view: &View) -> Result<DType> {
    match view.dtype() {
        t @ (DType::F32 | DType::BF16) => Ok(t),
        got => Err(Error::Type { op, operand, expected: FLOAT, got }),
    }
}

fn positive(op: &'static str, name: &str, n: usize) -> Result<()> {
    if n > 0 { Ok(()) } else { Err(shape(op, format!("{name} is 0, expected at least 1"))) }
}

fn finite(op: &'static str, name: &str, x: f32) -> Result<()> {
    if x.is_finite() { Ok(()) } else { Err(shape(op, format!("{name} is {x}, expected a finite number"))) }
}

fn scratch(op: &'static str, workspace: &View, needed_bytes: usize) -> Result<()> {
    typed(op, "workspace", workspace, DType::U8)?;
    if workspace.elems() >= needed_bytes {
        Ok(())
    } else {
        Err(Error::Length { op, operand: "workspace", expected: needed_bytes, got: workspace.elems() })
    }
}

fn overlap(a: &View, b: &View) -> bool {
    let ((ida, a0, a1), (idb, b0, b1)) = (a.span(), b.span());
    ida == idb && a0 < b1 && b0 < a1
}

/// No written operand may share bytes with another one, except pairs in `same`, which may be the very same bytes.
fn disjoint(op: &'static str, writes: &[Named<'_>], reads: &[Named<'_>], same: &[(&str, &str)]) -> Result<()> {
    for (i, &(name, write)) in writes.iter().enumerate() {
        let Some(write) = write else { continue };
        for &(other_name, other) in writes[i + 1..].iter().chain(reads) {
            let Some(other) = other else { continue };
            if overlap(write, other) && !(same.contains(&(name, other_name)) && write.span() == other.span()) {
                return Err(shape(op, format!("{name} {write:?} overlaps {other_name} {other:?}; expected separate memory")));
            }
        }
    }
    Ok(())
}

fn grad<'a>(g: &Gradient<'a>) -> Option<&'a View> {
    g.as_ref().map(|(v, _)| &***v)
}

/// Check of [`crate::Ops::embedding`].
pub fn embedding(y: &View, table: &View, ids: &View, hidden: usize) -> Result<()> {
    const OP: &str = "embedding";
    positive(OP, "hidden", hidden)?;
    let t = float(OP, "table", table)?;
    vocab_rows(OP, "table", table, hidden)?;
    typed(OP, "ids", ids, DType::I32)?;
    want(OP, "y", y, t, product(OP, &[ids.elems(), hidden])?)?;
    disjoint(OP, &[("y", Some(y))], &[("table", Some(table)), ("ids", Some(ids))], &[])
}

/// A table must be whole rows of `hidden`, and its rows must be countable by i32 ids.
fn vocab_rows(op: &'static str, operand: &'static str, table: &View, hidden: usize) -> Result<()> {
    let rows = table.elems() / hidden;
    if !table.elems().is_multiple_of(hidden) {
        return Err(Error::Length { op, operand, expected: (rows + 1).saturating_mul(hidden), got: table.elems() });
    }
    if rows > i32::MAX as usize {
        return Err(shape(op, format!("{operand} has {rows} rows, ids are i32")));
    }
    Ok(())
}

/// Check of [`crate::Ops::embedding_backward`].
pub fn embedding_backward(dtable: &View, dy: &View, ids: &View, hidden: usize, workspace: &View, needed_bytes: usize) -> Result<()> {
    const OP: &str = "embedding_backward";
    positive(OP, "hidden", hidden)?;
    typed(OP, "dtable", dtable, DType::F32)?;
    vocab_rows(OP, "dtable", dtable, hidden)?;
    float(OP, "dy", dy)?;
    typed(OP, "ids", ids, DType::I32)?;
    length(OP, "dy", dy, product(OP, &[ids.elems(), hidden])?)?;
    scratch(OP, workspace, needed_bytes)?;
    disjoint(OP, &[("dtable", Some(dtable)), ("workspace", Some(workspace))], &[("dy", Some(dy)), ("ids", Some(ids))], &[])
}

/// Check of [`crate::Ops::rmsnorm`].
pub fn rmsnorm(y: &View, rstd: &View, x: &View, weight: &View, eps: f32, rows: usize, cols: usize) -> Result<()> {
    const OP: &str = "rmsnorm";
    positive(OP, "cols", cols)?;
    if !(eps.is_finite() && eps >= 0.0) {
        return Err(shape(OP, format!("eps is {eps}, expected a finite number of at least 0")));
    }
    let elems = product(OP, &[rows, cols])?;
    let t = float(OP, "x", x)?;
    length(OP, "x", x, elems)?;
    want(OP, "y", y, t, elems)?;
    want(OP, "rstd", rstd, DType::F32, rows)?;
    want(OP, "weight", weight, t, cols)?;
    disjoint(OP, &[("y", Some(y)), ("rstd", Some(rstd))], &[("x", Some(x)), ("weight", Some(weight))], &[("y", "x")])
}

/// Check of [`crate::Ops::rmsnorm_backward`].
#[allow(clippy::too_many_arguments)]
pub fn rmsnorm_backward(
    dx: Gradient<'_>,
    dweight: Gradient<'_>,
    dy: &View,
    x: &View,
    rstd: &View,
    weight: &View,
    rows: usize,
    cols: usize,
    workspace: &View,
    needed_bytes: usize,
) -> Result<()> {
    const OP: &str = "rmsnorm_backward";
    positive(OP, "cols", cols)?;
    let elems = product(OP, &[rows, cols])?;
    let t = float(OP, "x", x)?;
    length(OP, "x", x, elems)?;
    want(OP, "dy", dy, t, elems)?;
    want(OP, "rstd", rstd, DType::F32, rows)?;
    want(OP, "weight", weight, t, cols)?;
    if let Some(dx) = grad(&dx) {
        want(OP, "dx", dx, t, elems)?;
    }
    if let Some(dweight) = grad(&dweight) {
        want(OP, "dweight", dweight, DType::F32, cols)?;
    }
    scratch(OP, workspace, needed_bytes)?;
    let set = dx.is_some_and(|(_, w)| w == Write::Set);
    disjoint(
        OP,
        &[("dx", grad(&dx)), ("dweight", grad(&dweight)), ("workspace", Some(workspace))],
        &[("dy", Some(dy)), ("x", Some(x)), ("rstd", Some(rstd)), ("weight", Some(weight))],
        if set { &[("dx", "dy")] } else { &[] },
    )
}

/// Check of [`crate::Ops::linear`].
pub fn linear(y: &View, x: &View, w: &Weight, bias: Option<&View>, tokens: usize, inputs: usize, outputs: usize) -> Result<()> {
    const OP: &str = "linear";
    let t = float(OP, "x", x)?;
    length(OP, "x", x, product(OP, &[tokens, inputs])?)?;
    want(OP, "w", &w.view, t, product(OP, &[outputs, inputs])?)?;
    if let Some(bias) = bias {
        want(OP, "bias", bias, t, outputs)?;
    }
    sum_or(OP, "y", y, t, product(OP, &[tokens, outputs])?)?;
    disjoint(OP, &[("y", Some(y))], &[("x", Some(x)), ("w", Some(&w.view)), ("bias", bias)], &[])
}

/// Check of [`crate::Ops::linear_backward`].
#[allow(clippy::too_many_arguments)]
pub fn linear_backward(
    dx: Gradient<'_>,
    dw: Gradient<'_>,
    dbias: Gradient<'_>,
    dy: &View,
    x: Option<&View>,
    w: &Weight,
    tokens: usize,
    inputs: usize,
    outputs: usize,
    workspace: &View,
    needed_bytes: usize,
) -> Result<()> {
    const OP: &str = "linear_backward";
    let t = float(OP, "dy", dy)?;
    length(OP, "dy", dy, product(OP, &[tokens, outputs])?)?;
    let (in_elems, w_elems) = (product(OP, &[tokens, inputs])?, product(OP, &[outputs, inputs])?);
    want(OP, "w", &w.view, t, w_elems)?;
    match x {
        Some(x) => want(OP, "x", x, t, in_elems)?,
        None if dw.is_some() => return Err(shape(OP, "x is None, expected the input, since dw is asked for")),
        None => {}
    }
    if let Some(dx) = grad(&dx) {
        want(OP, "dx", dx, t, in_elems)?;
    }
    if let Some(dw) = grad(&dw) {
        want(OP, "dw", dw, DType::F32, w_elems)?;
    }
    if let Some(dbias) = grad(&dbias) {
        want(OP, "dbias", dbias, DType::F32, outputs)?;
    }
    scratch(OP, workspace, needed_bytes)?;
    disjoint(
        OP,
        &[("dx", grad(&dx)), ("dw", grad(&dw)), ("dbias", grad(&dbias)), ("workspace", Some(workspace))],
        &[("dy", Some(dy)), ("x", x), ("w", Some(&w.view))],
        &[],
    )
}

fn dropout_range(op: &'static str, dropout: Option<Dropout>) -> Result<()> {
    match dropout {
        Some(d) if !(0.0..1.0).contains(&d.p) => Err(shape(op, format!("dropout p is {}, expected 0 <= p < 1", d.p))),
        _ => Ok(()),
    }
}

/// Check of [`crate::Ops::lora`].
pub fn lora(
    adapters: &[LoraForward],
    x: &View,
    dropout: Option<Dropout>,
    tokens: usize,
    inputs: usize,
    workspace: &View,
    needed_bytes: usize,
) -> Result<()> {
    const OP: &str = "lora";
    let t = float(OP, "x", x)?;
    length(OP, "x", x, product(OP, &[tokens, inputs])?)?;
    dropout_range(OP, dropout)?;
    scratch(OP, workspace, needed_bytes)?;
    for (i, ad) in adapters.iter().enumerate() {
        positive(OP, "rank", ad.rank)?;
        finite(OP, "scale", ad.scale)?;
        sum_or(OP, "y", &ad.y, t, product(OP, &[tokens, ad.outputs])?)?;
        want(OP, "t", &ad.t, DType::F32, product(OP, &[tokens, ad.rank])?)?;
        want(OP, "a", &ad.a, DType::F32, product(OP, &[ad.rank, inputs])?)?;
        want(OP, "b", &ad.b, DType::F32, product(OP, &[ad.outputs, ad.rank])?)?;
        let writes = [("y", Some(&*ad.y)), ("t", Some(&*ad.t)), ("workspace", Some(workspace))];
        disjoint(OP, &writes, &[("x", Some(x)), ("a", Some(&ad.a)), ("b", Some(&ad.b))], &[])?;
        for other in &adapters[i + 1..] {
            let rest = [("y", &*other.y), ("t", &*other.t), ("a", &other.a), ("b", &other.b)].map(|(n, v)| (n, Some(v)));
            disjoint(OP, &writes[..2], &rest, &[])?;
            disjoint(OP, &[rest[0], rest[1]], &[("a", Some(&ad.a)), ("b", Some(&ad.b))], &[])?;
        }
    }
    Ok(())
}

/// Check of [`crate::Ops::adapted_linear`], where layer and adapter are one sum that needs no place of its own.
pub fn adapted_linear(
    layers: &[AdaptedLinear],
    x: &View,
    dropout: Option<Dropout>,
    tokens: usize,
    inputs: usize,
    workspace: &View,
    needed_bytes: usize,
) -> Result<()> {
    for l in layers {
        linear(&l.y, x, &l.w, l.bias.as_ref(), tokens, inputs, l.lora.outputs)?;
    }
    let direct = |l: &AdaptedLinear| LoraForward { y: l.y.clone(), ..l.lora.clone() };
    lora(&layers.iter().map(direct).collect::<Vec<_>>(), x, dropout, tokens, inputs, workspace, needed_bytes)
}

/// Check of [`crate::Ops::lora_backward`].
#[allow(clippy::too_many_arguments)]
pub fn lora_backward(
    dx: Option<&ViewMut>,
    adapters: &[LoraBackward],
    x: &View,
    dropout: Option<Dropout>,
    tokens: usize,
    inputs: usize,
    workspace: &View,
    needed_bytes: usize,
) -> Result<()> {
    const OP: &str = "lora_backward";
    let t = float(OP, "x", x)?;
    let in_elems = product(OP, &[tokens, inputs])?;
    length(OP, "x", x, in_elems)?;
    let dx = dx.map(|v| &**v);
    if let Some(dx) = dx {
        want(OP, "dx", dx, t, in_elems)?;
    }
    dropout_range(OP, dropout)?;
    scratch(OP, workspace, needed_bytes)?;
    for (i, ad) in adapters.iter().enumerate() {
        positive(OP, "rank", ad.rank)?;
        finite(OP, "scale", ad.scale)?;
        let (a, b) = (product(OP, &[ad.rank, inputs])?, product(OP, &[ad.outputs, ad.rank])?);
        want(OP, "da", &ad.da, DType::F32, a)?;
        want(OP, "db", &ad.db, DType::F32, b)?;
        want(OP, "dy", &ad.dy, t, product(OP, &[tokens, ad.outputs])?)?;
        want(OP, "t", &ad.t, DType::F32, product(OP, &[tokens, ad.rank])?)?;
        want(OP, "a", &ad.a, DType::F32, a)?;
        want(OP, "b", &ad.b, DType::F32, b)?;
        let writes = [("da", Some(&*ad.da)), ("db", Some(&*ad.db)), ("dx", dx), ("workspace", Some(workspace))];
        let reads = [("dy", &ad.dy), ("t", &ad.t), ("a", &ad.a), ("b", &ad.b), ("x", x)].map(|(n, v)| (n, Some(v)));
        disjoint(OP, &writes, &reads, &[])?;
        for other in &adapters[i + 1..] {
            let theirs = [("da", Some(&*other.da)), ("db", Some(&*other.db))];
            disjoint(OP, &writes[..2], &theirs, &[])?;
            disjoint(OP, &theirs, &reads[..4], &[])?;
            let read = [("dy", &other.dy), ("t", &other.t), ("a", &other.a), ("b", &other.b)].map(|(n, v)| (n, Some(v)));
            disjoint(OP, &writes[..2], &read, &[])?;
        }
    }
    Ok(())
}

fn rotary(op: &'static str, x: &View, table: &View, positions: &View, heads: usize, head_dim: usize) -> Result<()> {
    even(op, head_dim)?;
    float(op, "x", x)?;
    typed(op, "positions", positions, DType::I32)?;
    length(op, "x", x, product(op, &[positions.elems(), heads, head_dim])?)?;
    typed(op, "table", table, DType::F32)?;
    vocab_rows(op, "table", table, head_dim)?;
    disjoint(op, &[("x", Some(x))], &[("table", Some(table)), ("positions", Some(positions))], &[])
}

fn even(op: &'static str, head_dim: usize) -> Result<()> {
    if head_dim > 0 && head_dim.is_multiple_of(2) {
        Ok(())
    } else {
        Err(shape(op, format!("head_dim is {head_dim}, expected an even number > 0")))
    }
}

/// Check of [`crate::Ops::rope`].
pub fn rope(x: &View, table: &View, positions: &View, heads: usize, head_dim: usize) -> Result<()> {
    rotary("rope", x, table, positions, heads, head_dim)
}

/// Check of [`crate::Ops::rope_backward`].
pub fn rope_backward(dx: &View, table: &View, positions: &View, heads: usize, head_dim: usize) -> Result<()> {
    rotary("rope_backward", dx, table, positions, heads, head_dim)
}

/// Geometry of attention; returns elements of q, of k, and of lse.
fn geometry(op: &'static str, cu_seqlens: &View, documents: usize, tokens: usize, g: Attention) -> Result<(usize, usize, usize)> {
    even(op, g.head_dim)?;
    if g.kv_heads == 0 || g.heads == 0 || !g.heads.is_multiple_of(g.kv_heads) {
        return Err(shape(op, format!("{} heads over {} kv heads, expected a positive multiple", g.heads, g.kv_heads)));
    }
    if g.window == Some(0) {
        return Err(shape(op, "window is 0, expected at least 1 (a query sees itself) or None"));
    }
    finite(op, "scale", g.scale)?;
    if documents > tokens || (documents == 0 && tokens > 0) || tokens > i32::MAX as usize {
        return Err(shape(op, format!("{documents} documents in {tokens} tokens, expected 1 to {tokens}")));
    }
    want(op, "cu_seqlens", cu_seqlens, DType::I32, tokens + 1)?;
    Ok((product(op, &[tokens, g.heads, g.head_dim])?, product(op, &[tokens, g.kv_heads, g.head_dim])?, tokens * g.heads))
}

/// Check of [`crate::Ops::attention`].
#[allow(clippy::too_many_arguments)]
pub fn attention(
    o: &View,
    lse: &View,
    q: &View,
    k: &View,
    v: &View,
    cu_seqlens: &View,
    documents: usize,
    tokens: usize,
    shape: Attention,
    workspace: &View,
    needed_bytes: usize,
) -> Result<()> {
    const OP: &str = "attention";
    let (q_elems, kv_elems, stats) = geometry(OP, cu_seqlens, documents, tokens, shape)?;
    let t = float(OP, "q", q)?;
    length(OP, "q", q, q_elems)?;
    want(OP, "k", k, t, kv_elems)?;
    want(OP, "v", v, t, kv_elems)?;
    want(OP, "o", o, t, q_elems)?;
    want(OP, "lse", lse, DType::F32, stats)?;
    scratch(OP, workspace, needed_bytes)?;
    disjoint(
        OP,
        &[("o", Some(o)), ("lse", Some(lse)), ("workspace", Some(workspace))],
        &[("q", Some(q)), ("k", Some(k)), ("v", Some(v)), ("cu_seqlens", Some(cu_seqlens))],
        &[],
    )
}

/// Check of [`crate::Ops::attention_backward`].
#[allow(clippy::too_many_arguments)]
pub fn attention_backward(
    dq: &View,
    dk: &View,
    dv: &View,
    dout: &View,
    q: &View,
    k: &View,
    v: &View,
    o: &View,
    lse: &View,
    cu_seqlens: &View,
    documents: usize,
    tokens: usize,
    shape: Attention,
    workspace: &View,
    needed_bytes: usize,
) -> Result<()> {
    const OP: &str = "attention_backward";
    let (q_elems, kv_elems, stats) = geometry(OP, cu_seqlens, documents, tokens, shape)?;
    let t = float(OP, "q", q)?;
    for (name, view, elems) in [
        ("dq", dq, q_elems),
        ("dk", dk, kv_elems),
        ("dv", dv, kv_elems),
        ("dout", dout, q_elems),
        ("q", q, q_elems),
        ("k", k, kv_elems),
        ("v", v, kv_elems),
        ("o", o, q_elems),
    ] {
        want(OP, name, view, t, elems)?;
    }
    want(OP, "lse", lse, DType::F32, stats)?;
    scratch(OP, workspace, needed_bytes)?;
    disjoint(
        OP,
        &[("dq", Some(dq)), ("dk", Some(dk)), ("dv", Some(dv)), ("workspace", Some(workspace))],
        &[
            ("dout", Some(dout)),
            ("q", Some(q)),
            ("k", Some(k)),
            ("v", Some(v)),
            ("o", Some(o)),
            ("lse", Some(lse)),
            ("cu_seqlens", Some(cu_seqlens)),
        ],
        &[],
    )
}

/// Check of [`crate::Ops::swiglu`].
pub fn swiglu(h: &View, gate: &View, up: &View) -> Result<()> {
    const OP: &str = "swiglu";
    let t = float(OP, "gate", gate)?;
    want(OP, "up", up, t, gate.elems())?;
    want(OP, "h", h, t, gate.elems())?;
    disjoint(OP, &[("h", Some(h))], &[("gate", Some(gate)), ("up", Some(up))], &[("h", "gate")])
}

/// Check of [`crate::Ops::swiglu_backward`].
pub fn swiglu_backward(dgate: &View, dup: &View, dh: &View, gate: &View, up: &View) -> Result<()> {
    const OP: &str = "swiglu_backward";
    let t = float(OP, "gate", gate)?;
    for (name, view) in [("dgate", dgate), ("dup", dup), ("dh", dh), ("up", up)] {
        want(OP, name, view, t, gate.elems())?;
    }
    disjoint(
        OP,
        &[("dgate", Some(dgate)), ("dup", Some(dup))],
        &[("dh", Some(dh)), ("gate", Some(gate)), ("up", Some(up))],
        &[("dgate", "gate"), ("dup", "up"), ("dgate", "dh"), ("dup", "dh")],
    )
}

/// Check of [`crate::Ops::linear_cross_entropy`].
#[allow(clippy::too_many_arguments)]
pub fn linear_cross_entropy(
    loss: &View,
    dx: Option<&ViewMut>,
    dw: Gradient<'_>,
    x: &View,
    w: &Weight,
    labels: &View,
    tokens: usize,
    hidden: usize,
    vocab: usize,
    workspace: &View,
    needed_bytes: usize,
) -> Result<()> {
    const OP: &str = "linear_cross_entropy";
    positive(OP, "vocab", vocab)?;
    if vocab > i32::MAX as usize {
        return Err(shape(OP, format!("vocab is {vocab}, labels are i32")));
    }
    let (x_elems, w_elems) = (product(OP, &[tokens, hidden])?, product(OP, &[vocab, hidden])?);
    let t = float(OP, "x", x)?;
    length(OP, "x", x, x_elems)?;
    want(OP, "w", &w.view, t, w_elems)?;
    want(OP, "labels", labels, DType::I32, tokens)?;
    want(OP, "loss", loss, DType::F32, tokens)?;
    let dx = dx.map(|v| &**v);
    if let Some(dx) = dx {
        want(OP, "dx", dx, t, x_elems)?;
    }
    if let Some(dw) = grad(&dw) {
        want(OP, "dw", dw, DType::F32, w_elems)?;
    }
    scratch(OP, workspace, needed_bytes)?;
    disjoint(
        OP,
        &[("loss", Some(loss)), ("dx", dx), ("dw", grad(&dw)), ("workspace", Some(workspace))],
        &[("x", Some(x)), ("w", Some(&w.view)), ("labels", Some(labels))],
        &[("dx", "x")],
    )
}

/// Check of [`crate::Ops::sum`].
pub fn sum(out: &View, x: &View) -> Result<()> {
    const OP: &str = "sum";
    want(OP, "out", out, DType::F32, 1)?;
    typed(OP, "x", x, DType::F32)?;
    disjoint(OP, &[("out", Some(out))], &[("x", Some(x))], &[])
}

/// Check of [`crate::Ops::add`].
pub fn add(out: &View, a: &View, b: &View) -> Result<()> {
    const OP: &str = "add";
    typed(OP, "a", a, DType::F32)?;
    want(OP, "b", b, DType::F32, a.elems())?;
    want(OP, "out", out, DType::F32, a.elems())?;
    disjoint(OP, &[("out", Some(out))], &[("a", Some(a)), ("b", Some(b))], &[("out", "a"), ("out", "b")])
}

/// Check of [`crate::Ops::add_into`].
pub fn add_into(y: &View, x: &View) -> Result<()> {
    const OP: &str = "add_into";
    let t = float(OP, "y", y)?;
    sum_or(OP, "x", x, t, y.elems())?;
    disjoint(OP, &[("y", Some(y))], &[("x", Some(x))], &[])
}

/// Check of [`crate::Ops::scale`].
pub fn scale(x: &View) -> Result<()> {
    float("scale", "x", x).map(|_| ())
}

/// Check of [`crate::Ops::cast`].
pub fn cast(dst: &View, src: &View) -> Result<()> {
    const OP: &str = "cast";
    float(OP, "src", src)?;
    float(OP, "dst", dst)?;
    length(OP, "dst", dst, src.elems())?;
    disjoint(OP, &[("dst", Some(dst))], &[("src", Some(src))], &[])
}

/// Check of [`crate::Ops::count_nonfinite`].
pub fn count_nonfinite(out: &View, x: &View) -> Result<()> {
    const OP: &str = "count_nonfinite";
    float(OP, "x", x)?;
    want(OP, "out", out, DType::F32, 1)?;
    disjoint(OP, &[("out", Some(out))], &[("x", Some(x))], &[])
}

/// First chunks and chunks must fit the levels that a nodes array has.
fn chunk_range(op: &'static str, first: u64, chunks: u64) -> Result<()> {
    let limit = 1u64 << (SUM_SQUARES_NODES / 2 - 1);
    match first.checked_add(chunks) {
        Some(end) if end <= limit => Ok(()),
        _ => Err(shape(op, format!("{chunks} chunks from chunk {first} on, expected to end at most at {limit}"))),
    }
}

/// Check of [`crate::Ops::sum_squares`].
pub fn sum_squares(nodes: &View, x: &View, first_chunk: usize, workspace: &View, needed_bytes: usize) -> Result<()> {
    const OP: &str = "sum_squares";
    want(OP, "nodes", nodes, DType::F32, SUM_SQUARES_NODES)?;
    typed(OP, "x", x, DType::F32)?;
    chunk_range(OP, first_chunk as u64, x.elems().div_ceil(SUM_SQUARES_CHUNK) as u64)?;
    scratch(OP, workspace, needed_bytes)?;
    disjoint(OP, &[("nodes", Some(nodes)), ("workspace", Some(workspace))], &[("x", Some(x))], &[])
}

/// Check of [`crate::Ops::clip_scale`].
pub fn clip_scale(
    norm: &View,
    scale: &View,
    nodes: &View,
    ranges: &[(u64, u64)],
    ranks: usize,
    segments: usize,
    max_norm: Option<f32>,
) -> Result<()> {
    const OP: &str = "clip_scale";
    want(OP, "norm", norm, DType::F32, 1)?;
    want(OP, "scale", scale, DType::F32, 1)?;
    want(OP, "nodes", nodes, DType::F32, product(OP, &[ranks, segments, SUM_SQUARES_NODES])?)?;
    if ranges.len() != ranks * segments {
        return Err(Error::Length { op: OP, operand: "ranges", expected: ranks * segments, got: ranges.len() });
    }
    ranges.iter().try_for_each(|&(first, chunks)| chunk_range(OP, first, chunks))?;
    if let Some(max) = max_norm.filter(|m| m.is_nan() || *m <= 0.0) {
        return Err(shape(OP, format!("max_norm is {max}, expected a number > 0 or None")));
    }
    disjoint(OP, &[("norm", Some(norm)), ("scale", Some(scale))], &[("nodes", Some(nodes))], &[])
}

/// Check of [`crate::Ops::adamw`].
#[allow(clippy::too_many_arguments)]
pub fn adamw(param: &View, m: &View, v: &View, copy_out: Option<&ViewMut>, g: &View, scale: &View, hp: AdamW) -> Result<()> {
    const OP: &str = "adamw";
    typed(OP, "param", param, DType::F32)?;
    for (name, view) in [("m", m), ("v", v), ("g", g)] {
        want(OP, name, view, DType::F32, param.elems())?;
    }
    want(OP, "scale", scale, DType::F32, 1)?;
    let copy = copy_out.map(|c| &**c);
    if let Some(copy) = copy {
        float(OP, "copy_out", copy)?;
        length(OP, "copy_out", copy, param.elems())?;
    }
    if hp.step == 0 {
        return Err(shape(OP, "step is 0, expected the number of this update, from 1 on"));
    }
    for (name, beta) in [("beta1", hp.beta1), ("beta2", hp.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return Err(shape(OP, format!("{name} is {beta}, expected 0 <= {name} < 1")));
        }
    }
    for (name, x) in [("lr", hp.lr), ("eps", hp.eps), ("weight_decay", hp.weight_decay)] {
        finite(OP, name, x)?;
    }
    disjoint(
        OP,
        &[("param", Some(param)), ("m", Some(m)), ("v", Some(v)), ("copy_out", copy)],
        &[("g", Some(g)), ("scale", Some(scale))],
        &[],
    )
}

/// Check of [`crate::Stream::copy`]: same type and count. The views may overlap.
pub fn copy(dst: &View, src: &View) -> Result<()> {
    want("copy", "dst", dst, src.dtype(), src.elems())
}

#[cfg(test)]
mod tests;
