//! Lists on the command line: sizes with `...`, and what a sweep changes.

/// `1,2,4,...,128` as numbers: `...` doubles the number before it until the one behind it.
///
/// # Errors
/// A text for people: no number, zero, not ascending, or dots without a number on either side.
pub fn expand(text: &str) -> Result<Vec<usize>, String> {
    let wrong = |what: String| format!("{text}: {what}; expected numbers such as 1,2,4 or 1,2,...,128");
    let mut out: Vec<usize> = Vec::new();
    let mut doubling = false;
    for piece in text.split(',').map(str::trim) {
        if matches!(piece, "..." | "\u{2026}" | "..") {
            if out.is_empty() || doubling {
                return Err(wrong("dots stand between two numbers".into()));
            }
            doubling = true;
            continue;
        }
        let n: usize = piece.parse().map_err(|_| wrong(format!("{piece:?} is not a number")))?;
        let last = out.last().copied().unwrap_or(0);
        if n <= last {
            return Err(wrong(format!("{n} is not above {last}")));
        }
        if doubling {
            let mut between = last.saturating_mul(2);
            while between < n {
                out.push(between);
                between = between.saturating_mul(2);
            }
            doubling = false;
        }
        out.push(n);
    }
    if doubling { Err(wrong("dots stand between two numbers".into())) } else { Ok(out) }
}

/// One `--sweep`: a key and the values it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// `section.key`
    pub key: String,
    /// As `--set` takes them.
    pub values: Vec<String>,
}

impl Sweep {
    /// Reads `zero.stage=0,3`.
    ///
    /// # Errors
    /// A text for people.
    pub fn parse(text: &str) -> Result<Sweep, String> {
        let Some((key, values)) = text.split_once('=') else {
            return Err(format!("--sweep {text}: expected key=value,value such as zero.stage=0,3"));
        };
        let values: Vec<String> = values.split(',').map(|v| v.trim().to_string()).collect();
        if key.trim().is_empty() || values.iter().any(String::is_empty) {
            return Err(format!("--sweep {text}: a key or a value is empty"));
        }
        Ok(Sweep { key: key.trim().to_string(), values })
    }
}

/// Every choice of one value for each sweep, the last sweep fastest: `[[("zero.stage", "0"), ...], ...]`. One empty choice without sweeps.
pub fn choices(sweeps: &[Sweep]) -> Vec<Vec<(String, String)>> {
    let mut all = vec![Vec::new()];
    for sweep in sweeps {
        let longer = |choice: &Vec<(String, String)>| {
            let with = |value: &String| choice.iter().cloned().chain([(sweep.key.clone(), value.clone())]).collect();
            sweep.values.iter().map(with).collect::<Vec<_>>()
        };
        all = all.iter().flat_map(longer).collect();
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dots_double() {
        assert_eq!(expand("1,2,4,...,128").unwrap(), [1, 2, 4, 8, 16, 32, 64, 128]);
        assert_eq!(expand("3,...,20").unwrap(), [3, 6, 12, 20]);
        assert_eq!(expand(" 5 ").unwrap(), [5]);
        for wrong in ["", "0", "2,1", "...,4", "1,...", "1,...,...,4", "1,x", "1,1"] {
            assert!(expand(wrong).unwrap_err().contains("expected numbers"), "{wrong}");
        }
    }

    #[test]
    fn sweeps_are_multiplied() {
        let sweeps = ["zero.stage=0,3", "training.micro_batch_size=1,2,4"].map(|s| Sweep::parse(s).unwrap());
        let all = choices(&sweeps);
        assert_eq!(all.len(), 6);
        let pair = |k: &str, v: &str| (k.to_string(), v.to_string());
        assert_eq!(all[4], [pair("zero.stage", "3"), pair("training.micro_batch_size", "2")]);
        assert_eq!(choices(&[]), [vec![]]);
        assert!(Sweep::parse("zero.stage").is_err() && Sweep::parse("a=1,,2").is_err() && Sweep::parse("=1").is_err());
    }
}
