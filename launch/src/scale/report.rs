//! A study as files: `study.csv` for programs, `report.html` for people, which needs nothing beside itself, not even scripts.

use super::study::{Found, Row, Scaling, Study};
use crate::chart::{STYLE, escape, short};
use std::fmt::Write;

/// Columns of `study.csv` before those of the sweeps.
const FIRST: [&str; 4] = ["nodes", "devices", "scaling", "global_batch_size"];

/// Columns after them.
const REST: [&str; 20] = [
    "feasible",
    "secs_low",
    "secs",
    "secs_high",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "share_of_peak",
    "exposed_secs",
    "device_bytes",
    "device_capacity_bytes",
    "host_bytes",
    "usd_per_mtoken",
    "hours",
    "bound",
    "plan",
    "measured_secs",
    "measured_device_bytes",
    "secs_error_percent",
    "measured_failure",
    "reason",
];

/// A field as RFC 4180 wants it.
fn field(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_string() }
}

fn number(value: f64) -> String {
    if value.is_finite() { format!("{value}") } else { String::new() }
}

/// How far the prediction of a row is from its real run, in percent of the real one.
pub fn error_percent(row: &Row) -> Option<f64> {
    let (Ok(p), Some(Ok(m))) = (&row.predicted, &row.measured) else { return None };
    Some(100.0 * (p.secs[1] / m.secs[1] - 1.0))
}

/// `study.csv`: one line a row, those that cannot run too.
pub fn csv(study: &Study) -> String {
    let keys: Vec<&str> = study.rows.first().map_or(Vec::new(), |r| r.choice.iter().map(|c| c.0.as_str()).collect());
    let head: Vec<String> = FIRST.iter().chain(&keys).chain(&REST).map(|c| field(c)).collect();
    let mut out = head.join(",") + "\n";
    for row in &study.rows {
        let mut cells = vec![row.nodes.to_string(), row.devices.to_string(), row.scaling.name().into(), row.global_batch.to_string()];
        cells.extend(row.choice.iter().map(|c| field(&c.1)));
        match &row.predicted {
            Ok(f) => {
                let per_device = f.tokens_per_s() / row.devices as f64;
                let rates = [f.secs[0], f.secs[1], f.secs[2], f.tokens_per_s(), per_device, f.share_of_peak, f.exposed_secs];
                cells.push("yes".into());
                cells.extend(rates.map(number));
                cells.extend([f.device_bytes, f.device_capacity, f.host_bytes].map(number));
                cells.extend([f.usd_per_mtoken, f.hours].map(|v| v.map_or(String::new(), number)));
                cells.extend([field(&f.bound), field(&f.plan)]);
            }
            Err(_) => {
                cells.push("no".into());
                cells.extend(vec![String::new(); 14]);
            }
        }
        let run = |f: fn(&Found) -> f64| match &row.measured {
            Some(Ok(m)) => number(f(m)),
            _ => String::new(),
        };
        cells.extend([run(|m| m.secs[1]), run(|m| m.device_bytes), error_percent(row).map_or(String::new(), |e| format!("{e:.2}"))]);
        cells.push(row.measured.as_ref().and_then(|m| m.as_ref().err()).map_or(String::new(), |e| field(e)));
        cells.push(row.predicted.as_ref().err().map_or(String::new(), |e| field(e)));
        out += &(cells.join(",") + "\n");
    }
    out
}

const PAGE_STYLE: &str = "\
:root{color-scheme:light dark;--text:#1b1b1b;--back:#fdfdfc;--grid:#dcdcdc;--soft:#5a5a5a}
@media(prefers-color-scheme:dark){:root{--text:#e6e6e6;--back:#17191c;--grid:#3a3e44;--soft:#a8a8a8}}
body{margin:2rem auto;max-width:76rem;padding:0 1rem;color:var(--text);background:var(--back);font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}p.soft{color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1.5rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px}th,td{padding:.2rem .6rem;text-align:right;border-bottom:1px solid var(--grid)}
th{text-align:right;white-space:nowrap}td.word,th.word{text-align:left}td.word{min-width:9rem}
";

fn table(out: &mut String, head: &[(&str, bool)], rows: impl Iterator<Item = Vec<String>>) {
    out.push_str("<div class=\"scroll\"><table><thead><tr>");
    let class = |word: bool| if word { " class=\"word\"" } else { "" };
    for (name, word) in head {
        let _ = write!(out, "<th{}>{}</th>", class(*word), escape(name));
    }
    out.push_str("</tr></thead><tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        for (cell, (_, word)) in row.iter().zip(head) {
            let _ = write!(out, "<td{}>{}</td>", class(*word), escape(cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table></div>\n");
}

fn cells(row: &Row, f: &Found) -> Vec<String> {
    vec![
        row.devices.to_string(),
        row.scaling.name().into(),
        row.global_batch.to_string(),
        row.choice_name(),
        f.plan.clone(),
        format!("{} ({} - {})", short(f.secs[1]), short(f.secs[0]), short(f.secs[2])),
        short(f.tokens_per_s()),
        short(f.tokens_per_s() / row.devices as f64),
        format!("{:.1}", 100.0 * f.share_of_peak),
        short(f.exposed_secs),
        format!("{:.1}", f.device_bytes / 1e9),
        format!("{:.1}", f.host_bytes / 1e9),
        f.usd_per_mtoken.map_or(String::new(), |c| format!("{c:.3}")),
        f.hours.map_or(String::new(), short),
        f.bound.clone(),
    ]
}

const HEAD: [(&str, bool); 15] = [
    ("devices", false),
    ("scaling", true),
    ("batch", false),
    ("choice", true),
    ("plan", true),
    ("s/step (low - high)", false),
    ("tokens/s", false),
    ("per device", false),
    ("% of peak", false),
    ("exposed s", false),
    ("device GB", false),
    ("host GB", false),
    ("US$/Mtoken", false),
    ("hours", false),
    ("bound by", true),
];

/// `report.html`.
pub fn html(study: &Study) -> String {
    let title = format!("{} on {}", study.file, study.machine);
    let feasible = || study.rows.iter().filter_map(|r| r.predicted.as_ref().ok().map(|f| (r, f)));
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{0}</title><style>\n{PAGE_STYLE}{STYLE}</style></head><body>\n<h1>{0}</h1>\n",
        escape(&title)
    );
    let _ = writeln!(
        out,
        "<p class=\"soft\">{} configurations, {} of which can run. Predictions by the trainer's own code on a simulated device; each is a \
         low, an expected and a high figure. {}</p>",
        study.rows.len(),
        feasible().count(),
        escape(&if study.price.is_empty() { "No price is known.".into() } else { format!("Price of {}.", study.price) })
    );
    let fastest = |devices: usize| {
        let of_size = feasible().filter(|(r, _)| r.devices == devices && r.scaling != Scaling::Strong);
        of_size.max_by(|a, b| a.1.tokens_per_s().total_cmp(&b.1.tokens_per_s()))
    };
    let mut sizes: Vec<usize> = study.rows.iter().map(|r| r.devices).collect();
    sizes.sort_unstable();
    sizes.dedup();
    out.push_str("<h2>The fastest of each size</h2>\n");
    table(&mut out, &HEAD, sizes.into_iter().filter_map(fastest).map(|(r, f)| cells(r, f)));
    out.push_str("<h2>Charts</h2>\n<div class=\"charts\">\n");
    study.charts().iter().for_each(|c| out.push_str(&c.svg()));
    out.push_str("</div>\n");
    if study.left_out() > 0 {
        let _ = writeln!(out, "<p class=\"soft\">{} slower choices are in the table only.</p>", study.left_out());
    }
    if study.rows.iter().any(|r| r.measured.is_some()) {
        out.push_str("<h2>Real runs on this machine</h2>\n");
        let head = [
            ("ranks", false),
            ("choice", true),
            ("measured s/step", false),
            ("predicted", false),
            ("error %", false),
            ("measured MB", false),
            ("predicted", false),
            ("failure", true),
        ];
        let rows = study.rows.iter().filter_map(|r| Some((r, r.measured.as_ref()?))).map(|(r, m)| {
            let of = |f: Result<&Found, ()>, get: fn(&Found) -> f64| f.map_or(String::new(), |f| format!("{:.3}", get(f)));
            let (m_ok, p_ok) = (m.as_ref().map_err(|_| ()), r.predicted.as_ref().map_err(|_| ()));
            vec![
                r.devices.to_string(),
                r.choice_name(),
                of(m_ok, |f| f.secs[1]),
                of(p_ok, |f| f.secs[1]),
                error_percent(r).map_or(String::new(), |e| format!("{e:+.1}")),
                of(m_ok, |f| f.device_bytes / 1e6),
                of(p_ok, |f| f.device_bytes / 1e6),
                m.as_ref().err().cloned().unwrap_or_default(),
            ]
        });
        table(&mut out, &head, rows);
    }
    out.push_str("<h2>All that can run</h2>\n");
    table(&mut out, &HEAD, feasible().map(|(r, f)| cells(r, f)));
    let cannot: Vec<&Row> = study.rows.iter().filter(|r| r.predicted.is_err()).collect();
    let _ = writeln!(out, "<h2>What cannot run, and why ({})</h2>", cannot.len());
    let head = [("devices", false), ("scaling", true), ("batch", false), ("choice", true), ("reason", true)];
    let rows = cannot.into_iter().map(|r| {
        let reason = r.predicted.as_ref().err().cloned().unwrap_or_default();
        vec![r.devices.to_string(), r.scaling.name().into(), r.global_batch.to_string(), r.choice_name(), reason]
    });
    table(&mut out, &head, rows);
    out.push_str("</body></html>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::super::study::tests::study;
    use super::*;

    #[test]
    fn every_line_has_every_column() {
        let mut study = study();
        let run = Found { secs: [1.9, 2.0, 2.1], device_bytes: 41e9, ..Found::default() };
        study.rows[0].measured = Some(Ok(run));
        study.rows[1].measured = Some(Err("rank 1 was lost".into()));
        let text = csv(&study);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 7);
        assert!(lines[0].starts_with("nodes,devices,scaling,global_batch_size,zero.stage,feasible,secs_low,"));
        // Quoted commas aside.
        let columns = |l: &str| l.split('"').step_by(2).map(|p| p.matches(',').count()).sum::<usize>();
        assert!(lines.iter().all(|l| columns(l) == columns(lines[0])), "{text}");
        assert!(lines[1].contains(",2,41000000000,-50.00,,"), "{}", lines[1]);
        assert!(lines[2].contains("rank 1 was lost"));
        assert!(lines[4].ends_with("\"1,000 bytes over, \"\"too\"\" much\""), "{}", lines[4]);
    }

    #[test]
    fn the_page_needs_nothing_beside_itself() {
        let page = html(&study());
        for outside in ["<script", "http-equiv", "<link", "<img", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert_eq!(page.matches("<svg").count(), 6);
        assert!(page.contains("prefers-color-scheme:dark") && page.contains("1,000 bytes over, &quot;too&quot; much"));
    }
}
