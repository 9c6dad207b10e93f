//! Tables of text and numbers.

use core::fmt;

/// A table in Markdown, so that it can be pasted. The first column holds text and the others hold numbers.
#[derive(Clone, Debug, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these column headings.
    pub fn new(heads: &[&str]) -> Self {
        Self { rows: vec![heads.iter().map(ToString::to_string).collect()] }
    }

    /// Adds a row; missing cells stay empty.
    pub fn add_row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut row: Vec<String> = cells.into_iter().collect();
        row.resize(self.rows[0].len(), String::new());
        self.rows.push(row);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows[0].len();
        let width = |c: usize| self.rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (number, row) in self.rows.iter().enumerate() {
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                if column == 0 {
                    write!(f, "| {cell:<width$} |")?;
                } else {
                    write!(f, " {cell:>width$} |")?;
                }
            }
            writeln!(f)?;
            if number == 0 {
                for (column, width) in widths.iter().enumerate() {
                    let dashes = "-".repeat(width + 1);
                    write!(
                        f,
                        "{}{dashes}{}",
                        if column == 0 { "|" } else { "" },
                        if column == 0 { "-|" } else { ":|" }
                    )?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}

impl Table {
    /// Formats the table without rules, for a narrow terminal.
    pub fn plain(&self) -> String {
        let width =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.rows[0].len()).map(width).collect();
        let line = |row: &Vec<String>| {
            let first = format!("{:<1$}", row[0], widths[0]);
            let others = row.iter().zip(&widths).skip(1).map(|(cell, width)| format!("  {cell:>width$}"));
            core::iter::once(first).chain(others).collect::<String>() + "\n"
        };
        self.rows.iter().map(line).collect()
    }
}

/// Formats a number with thousands separators: `1,234,567`.
pub fn with_thousands_separators(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{Table, with_thousands_separators};

    #[test]
    fn a_table_is_aligned_markdown() {
        let mut table = Table::new(&["what", "a", "bb"]);
        table.add_row(["rate".into(), "1".into(), "22222".into()]);
        table.add_row(["x".into(), "333".into()]);
        let expected = "\
| what |   a |    bb |
|------|----:|------:|
| rate |   1 | 22222 |
| x    | 333 |       |
";
        assert_eq!(table.to_string(), expected);
        assert_eq!(table.plain(), "what    a     bb\nrate    1  22222\nx     333       \n");
    }

    #[test]
    fn thousands_are_separated() {
        let shown: Vec<String> = [0, 999, 1000, 1_234_567].map(with_thousands_separators).into();
        assert_eq!(shown, ["0", "999", "1,000", "1,234,567"]);
    }
}
