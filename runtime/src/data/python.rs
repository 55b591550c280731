//! Python's text conversions, as chat templates see them under Jinja2: `str`, `repr`, `json.dumps`, `str.strip`, `strftime`.
//! Jinja2 prints values as Python does (`None`, `True`, `1e-05`), minijinja as Rust does; models were trained on the former.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write;

/// `str(value)`; undefined is empty.
pub(crate) fn str_of(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut out = String::new();
            repr(value, &mut out);
            out
        }
    }
}

fn repr(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(value, out),
        ValueKind::String => repr_str(value.as_str().unwrap_or(""), out),
        ValueKind::Seq => items(value, out, ["[", "]"], |item, out| repr(&item, out)),
        ValueKind::Map => items(value, out, ["{", "}"], |key, out| {
            repr(&key, out);
            out.push_str(": ");
            repr(&value.get_item(&key).unwrap_or_default(), out);
        }),
        _ => out.push_str(&value.to_string()),
    }
}

fn items(value: &Value, out: &mut String, [open, close]: [&str; 2], mut each: impl FnMut(Value, &mut String)) {
    out.push_str(open);
    for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        each(item, out);
    }
    out.push_str(close);
}

fn repr_str(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || (0x7f..=0xa0).contains(&(c as u32)) || c == '\u{ad}' => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

fn number(value: &Value, out: &mut String) {
    if value.is_integer() {
        out.push_str(&value.to_string());
    } else {
        out.push_str(&float_repr(f64::try_from(value.clone()).unwrap_or(f64::NAN)));
    }
}

/// `repr(float)`: shortest digits, an exponent below 1e-4 and from 1e16.
fn float_repr(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "nan"
        } else if x > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or(0) {
        e if (-4..16).contains(&e) => format!("{x:?}"),
        e => format!("{mantissa}e{}{:02}", if e < 0 { '-' } else { '+' }, e.abs()),
    }
}

/// Separators and layout of `json.dumps`.
struct Dump {
    ensure_ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

/// transformers' `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(crate) fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let pick = |positional: Option<Value>, name: &str| -> Result<Option<Value>, Error> {
        let value = match positional {
            Some(value) => Some(value),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|v| !v.is_none() && !v.is_undefined()))
    };
    let ensure_ascii = pick(ensure_ascii, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let sort_keys = pick(None, "sort_keys")?.is_some_and(|v| v.is_true());
    let indent = match pick(indent, "indent")? {
        None => None,
        Some(v) => Some(match v.as_str() {
            Some(text) => text.to_owned(),
            None if v.kind() == ValueKind::Bool => " ".repeat(usize::from(v.is_true())),
            None => " ".repeat(i64::try_from(v)?.clamp(0, 64) as usize),
        }),
    };
    let (item, key) = match pick(separators, "separators")? {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(v) => (str_of(&v.get_item_by_index(0)?), str_of(&v.get_item_by_index(1)?)),
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    Dump { ensure_ascii, indent, item, key, sort_keys }.write(value, &mut out, 0)?;
    Ok(out)
}

impl Dump {
    fn write(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        if depth > 200 {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested deeper than 200"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match f64::try_from(value.clone()) {
                Ok(x) if !value.is_integer() && x.is_nan() => out.push_str("NaN"),
                Ok(x) if !value.is_integer() && x.is_infinite() => out.push_str(if x > 0.0 { "Infinity" } else { "-Infinity" }),
                _ => number(value, out),
            },
            ValueKind::String => self.string(value.as_str().unwrap_or(""), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.group(out, depth, ['[', ']'], &items, |item, out| self.write(item, out, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.group(out, depth, ['{', '}'], &keys, |key, out| {
                    match key.kind() {
                        ValueKind::String => self.string(key.as_str().unwrap_or(""), out),
                        _ => {
                            let mut text = String::new();
                            self.write(key, &mut text, depth + 1)?;
                            self.string(&text, out);
                        }
                    }
                    out.push_str(&self.key);
                    self.write(&value.get_item(key)?, out, depth + 1)
                })?;
            }
            kind => return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: {kind} is not JSON serializable"))),
        }
        Ok(())
    }

    fn group(
        &self,
        out: &mut String,
        depth: usize,
        [open, close]: [char; 2],
        items: &[Value],
        each: impl Fn(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let newline = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item);
            }
            newline(out, depth + 1);
            each(item, out)?;
        }
        if !items.is_empty() {
            newline(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if (c as u32) < 0x20 || (self.ensure_ascii && !(' '..='~').contains(&c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// What `str.strip()` strips: Unicode white space and the four separators that Python counts too.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `datetime.strftime` of `secs` since 1970, in UTC.
pub(crate) fn strftime(secs: i64, format: &str) -> Result<String, Error> {
    const MONTHS: [&str; 12] =
        ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, second) = (secs.div_euclid(86_400), secs.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let year_day = days - days_before(year) + 1;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let (month_name, day_name) = (MONTHS[(month - 1) as usize], DAYS[days.rem_euclid(7) as usize]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let plain = directive == Some('-');
        if plain {
            directive = chars.next();
        }
        let mut padded = |value: i64, width: usize| {
            let width = if plain { 0 } else { width };
            let _ = write!(out, "{value:0width$}");
        };
        match directive {
            Some('Y') => padded(year, 4),
            Some('m') => padded(month, 2),
            Some('d') => padded(day, 2),
            Some('H') => padded(hour, 2),
            Some('I') => padded((hour + 11) % 12 + 1, 2),
            Some('M') => padded(minute, 2),
            Some('S') => padded(second, 2),
            Some('j') => padded(year_day, 3),
            Some('y') => padded(year % 100, 2),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('%') => out.push('%'),
            other => {
                let what = other.map_or_else(|| "% at the end".into(), |c| format!("%{c}"));
                return Err(Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {what} is not supported")));
            }
        }
    }
    Ok(out)
}

fn days_before(year: i64) -> i64 {
    let y = year - 1;
    y * 365 + y.div_euclid(4) - y.div_euclid(100) + y.div_euclid(400) - 719_162
}

/// Year, month and day of a day number since 1970 (proleptic Gregorian).
fn civil(days: i64) -> (i64, i64, i64) {
    let mut year = 1970 + days.div_euclid(366);
    while days_before(year + 1) <= days {
        year += 1;
    }
    let leap = days_before(year + 1) - days_before(year) == 366;
    let mut rest = days - days_before(year);
    for (i, length) in [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31].into_iter().enumerate() {
        if rest < length {
            return (year, i as i64 + 1, rest + 1);
        }
        rest -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_prints_them() {
        for (x, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e16, "1e+16"),
            (123456789012345.0, "123456789012345.0"),
            (1e22, "1e+22"),
            (0.0001, "0.0001"),
            (-2.5, "-2.5"),
        ] {
            assert_eq!(float_repr(x), text);
        }
    }

    #[test]
    fn dates() {
        assert_eq!(strftime(0, "%a %d %b %Y %H:%M:%S %j").unwrap(), "Thu 01 Jan 1970 00:00:00 001");
        assert_eq!(strftime(1_709_210_096, "%A, %-d %B %y").unwrap(), "Thursday, 29 February 24");
        assert_eq!(strftime(1_735_689_599, "%Y-%m-%d %j").unwrap(), "2024-12-31 366");
        assert!(strftime(0, "%Q").is_err());
    }
}
