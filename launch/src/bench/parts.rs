//! The parts of a step by themselves: products, the optimizer, loading.

use super::table::{Cell, Table};
use super::{Layers, Type};
use crate::fault::Fault;
use std::time::Duration;
use zrt_collectives::bench::{Size, measure_on_threads};
use zrt_kernels::DType;
use zrt_kernels::rate::Bench;

/// (name, inputs, outputs) of a block's layers and the head: the query has the shape of the output projection.
fn shapes(layers: Layers) -> Vec<(&'static str, usize, usize)> {
    let (hidden, kv, mlp, vocab) = match layers {
        Layers::SmolLm2 => (576, 192, 1536, 49_152),
        Layers::Llama8b => (4096, 1024, 14_336, 128_256),
        Layers::Llama70b => (8192, 1024, 28_672, 128_256),
    };
    vec![("q, o", hidden, hidden), ("k, v", hidden, kv), ("gate, up", hidden, mlp), ("down", mlp, hidden), ("head", hidden, vocab)]
}

pub fn matmul(layers: Layers, tokens: usize, dtype: Option<Type>, threads: usize, budget_ms: u64) -> Result<Table, Fault> {
    let bench = Bench::new(threads)?;
    let title = format!("products of {tokens} rows, {}, {threads} threads", bench.processor());
    let columns = [
        "layer",
        "type",
        "inputs",
        "outputs",
        "forward GFLOP/s",
        "of limit %",
        "dgrad GFLOP/s",
        "of limit %",
        "wgrad GFLOP/s",
        "of limit %",
    ];
    let mut table = Table::new(title, &columns);
    for dtype in dtype.map_or(vec![DType::F32, DType::BF16], |t| vec![t.into()]) {
        // The clock varies: the best of what is seen before and after.
        let before = bench.peak_flops(dtype);
        let mut measured = Vec::new();
        for (name, inputs, outputs) in shapes(layers) {
            measured.push((name, inputs, outputs, bench.products(dtype, tokens, inputs, outputs, Duration::from_millis(budget_ms))?));
        }
        let limit = before.max(bench.peak_flops(dtype));
        table.notes.push(format!("limit for {dtype}: {:.1} GFLOP/s of multiply-adds in registers on all threads", limit / 1e9));
        for (name, inputs, outputs, secs) in measured {
            let flops = 2.0 * tokens as f64 * inputs as f64 * outputs as f64;
            let mut row: Vec<Cell> = vec![name.into(), dtype.name().into(), inputs.into(), outputs.into()];
            for secs in [secs.forward, secs.dgrad, secs.wgrad] {
                row.extend([Cell::Number(flops / secs / 1e9, 1), Cell::Number(100.0 * flops / secs / limit, 0)]);
            }
            table.row(row);
        }
    }
    Ok(table)
}

pub fn adam(params: usize, threads: usize, rounds: usize) -> Result<Table, Fault> {
    let bench = Bench::new(threads)?;
    let u = bench.updates(params, rounds)?;
    let title = format!("AdamW over {params} parameters, {}, {threads} threads", bench.processor());
    let mut table = Table::new(title, &["update", "bytes a parameter", "M parameters/s", "GB/s", "limit M parameters/s", "of limit %"]);
    for (name, bytes, secs, limit) in [("f32", 28, u.plain, u.plain_limit), ("f32 and bf16 copy", 30, u.copy, u.copy_limit)] {
        let rate = |secs: f64| params as f64 / secs / 1e6;
        table.row(vec![
            name.into(),
            bytes.into(),
            Cell::Number(rate(secs), 0),
            Cell::Number(bytes as f64 * rate(secs) / 1e3, 1),
            Cell::Number(rate(limit), 0),
            Cell::Number(100.0 * limit / secs, 1),
        ]);
    }
    table.notes.push("limit: a loop that only reads and writes the same streams in place, in turns with the update; medians".into());
    Ok(table)
}

pub fn collectives(ranks: usize, bytes: &[usize], dtype: Type) -> Result<Table, Fault> {
    let unit = ranks * DType::from(dtype).bytes();
    if let Some(odd) = bytes.iter().find(|b| !b.is_multiple_of(unit)) {
        return Err(Fault::user(format!("--bytes {odd} is not a multiple of {unit}: {ranks} ranks times the bytes of an element")));
    }
    // Of other lengths as many calls as take about as long as one of 64 MiB, within reason.
    let size = |&bytes: &usize| Size { bytes, samples: ((64 << 20) / bytes).clamp(15, 200), burst: ((4 << 20) / bytes).clamp(1, 100) };
    let sizes: Vec<Size> = if bytes.is_empty() { Size::USUAL.to_vec() } else { bytes.iter().map(size).collect() };
    let rates = measure_on_threads(ranks, dtype.into(), &sizes).map_err(Fault::other)?;
    let title = format!("collectives of {} over {ranks} ranks (threads) of this host", DType::from(dtype));
    let columns = ["operation", "bytes", "us", "GB/s", "limit us", "times limit", "through a stream us"];
    let mut table = Table::new(title, &columns);
    for r in rates {
        table.row(vec![
            r.op.into(),
            r.bytes.into(),
            Cell::Number(r.transport_us, 2),
            Cell::Number(r.gb_per_s(), 2),
            Cell::Number(r.copy_us, 2),
            Cell::Number(r.transport_us / r.copy_us, 2),
            Cell::Number(r.stream_us, 2),
        ]);
    }
    table
        .notes
        .push("limit: all ranks at once copy as many bytes as the collective leaves in their memory, from memory of their own".into());
    Ok(table)
}

pub fn load(model: &str, ranks: usize, dtype: Type, share_pages: bool, rounds: usize) -> Result<Table, Fault> {
    let folder = zrt::hf::folder::resolve(model, None).map_err(Fault::user)?;
    let r = zrt::rate::load(&folder, ranks, dtype.into(), share_pages, rounds)?;
    let pages = if share_pages { "shared pages" } else { "own memory" };
    let title =
        format!("loading {:.0} MB as {} on {ranks} ranks into {pages}, median of {rounds}", r.bytes as f64 / 1e6, DType::from(dtype));
    let mut table = Table::new(title, &["files", "load ms", "GB/s", "limit", "limit ms", "times limit"]);
    let rows = [
        ("cold", r.cold, "cat FILES > /dev/null", r.cat_cold),
        ("warm", r.warm, "memcpy into new memory", r.memcpy_new),
        ("warm", r.warm, "memcpy into memory in use", r.memcpy_used),
        ("warm", r.warm, "cat FILES > /dev/null", r.cat_warm),
    ];
    for (files, secs, name, limit) in rows {
        let row = [Cell::Number(secs * 1e3, 1), Cell::Number(r.bytes as f64 / secs / 1e9, 2)];
        let mut cells: Vec<Cell> = vec![files.into()];
        cells.extend(row);
        cells.extend([name.into(), Cell::Number(limit * 1e3, 1), Cell::Number(secs / limit, 2)]);
        table.row(cells);
    }
    table.notes.push("cold: the kernel was told to drop the files from its cache; the disk may have one of its own".into());
    table.notes.push("memcpy: the same bytes from memory, by as many threads as ranks, into memory of the kind that holds weights".into());
    Ok(table)
}
