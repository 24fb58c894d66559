//! What a SQLSTATE means, whichever driver carries it.

/// Meaning of an error before COMMIT was sent: nothing was written.
///
/// | SQLSTATE | Meaning |
/// |---|---|
/// | 40001, 40P01, 55P03, 57014, 25P03, 53xxx, 57P0x, 58xxx, 08xxx | `Transient` |
/// | 22xxx, 23xxx, 25P02, P0001 (raised by a function of the database) | `Rejected` |
/// | everything else: 42P01 (no such table), 25006 (a replica), 28xxx, 3D000, TN001, TN002 | `Misconfigured` |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// May be tried again.
    Transient,
    /// The data is at fault.
    Rejected,
    /// Someone has to look.
    Misconfigured,
}

impl Meaning {
    /// Meaning of a SQLSTATE, five characters.
    #[must_use]
    pub fn of(code: &str) -> Self {
        match (code, code.get(..2).unwrap_or_default()) {
            ("40001" | "40P01" | "55P03" | "57014" | "25P03", _)
            | (_, "08" | "53" | "57" | "58") => Self::Transient,
            ("25P02" | "P0001", _) | (_, "22" | "23") => Self::Rejected,
            _ => Self::Misconfigured,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sqlstate_tells_what_may_be_tried_again_and_what_is_the_datas_fault() {
        for (code, meaning) in [
            ("40001", Meaning::Transient),
            ("57P01", Meaning::Transient),
            ("08006", Meaning::Transient),
            ("23505", Meaning::Rejected),
            ("25P02", Meaning::Rejected),
            ("25006", Meaning::Misconfigured),
            ("TN002", Meaning::Misconfigured),
            ("", Meaning::Misconfigured),
        ] {
            assert_eq!(Meaning::of(code), meaning, "{code}");
        }
    }
}
