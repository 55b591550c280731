//! One measurement as a table for people, or as a line of JSON for programs: the same rows and names.

use serde_json::{Map, Value, json};

/// A cell: words, or a number with the decimals that people see.
pub enum Cell {
    Word(String),
    Number(f64, usize),
}

impl From<&str> for Cell {
    fn from(word: &str) -> Cell {
        Cell::Word(word.into())
    }
}

impl From<usize> for Cell {
    fn from(n: usize) -> Cell {
        Cell::Number(n as f64, 0)
    }
}

/// Rows under named columns; a column's name carries its unit.
pub struct Table {
    /// What was measured, and on what.
    pub title: String,
    pub columns: Vec<&'static str>,
    pub rows: Vec<Vec<Cell>>,
    /// Sentences below: what the limit is, what was found.
    pub notes: Vec<String>,
}

impl Table {
    pub fn new(title: String, columns: &[&'static str]) -> Table {
        Table { title, columns: columns.to_vec(), rows: Vec::new(), notes: Vec::new() }
    }

    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    pub fn json(&self) -> Value {
        let row = |cells: &Vec<Cell>| {
            let value = |c: &Cell| match c {
                Cell::Word(w) => json!(w),
                Cell::Number(n, 0) => json!(*n as i64),
                Cell::Number(n, _) => json!(n),
            };
            Value::Object(self.columns.iter().map(|c| c.to_string()).zip(cells.iter().map(value)).collect::<Map<_, _>>())
        };
        json!({ "title": self.title, "rows": self.rows.iter().map(row).collect::<Vec<_>>(), "notes": self.notes })
    }

    pub fn text(&self) -> String {
        let word = |c: &Cell| match c {
            Cell::Word(w) => w.clone(),
            Cell::Number(n, decimals) => format!("{n:.decimals$}"),
        };
        let rows: Vec<Vec<String>> = self.rows.iter().map(|r| r.iter().map(word).collect()).collect();
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|i| rows.iter().map(|r| r.get(i).map_or(0, String::len)).chain([self.columns[i].len()]).max().unwrap_or(0))
            .collect();
        // Words to the left, numbers to the right, as their first row shows.
        let left = |i: usize| self.rows.first().is_some_and(|r| matches!(r.get(i), Some(Cell::Word(_))));
        let line = |cells: Vec<String>| {
            let pad = |(i, c): (usize, &String)| if left(i) { format!("{c:<0$}", widths[i]) } else { format!("{c:>0$}", widths[i]) };
            cells.iter().enumerate().map(pad).collect::<Vec<_>>().join("  ").trim_end().to_string()
        };
        let mut out = vec![self.title.clone(), line(self.columns.iter().map(|c| c.to_string()).collect())];
        out.extend(rows.into_iter().map(line));
        out.extend(self.notes.iter().cloned());
        out.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_and_programs_see_the_same() {
        let mut t = Table::new("title".into(), &["what", "us", "calls"]);
        t.row(vec!["a long name".into(), Cell::Number(1.25, 1), 7.into()]);
        t.row(vec!["b".into(), Cell::Number(10.0, 1), 12.into()]);
        t.notes.push("note".into());
        assert_eq!(t.text(), "title\nwhat           us  calls\na long name   1.2      7\nb            10.0     12\nnote");
        assert_eq!(t.json()["rows"][0], json!({ "what": "a long name", "us": 1.25, "calls": 7 }));
    }
}
