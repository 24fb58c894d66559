//! What a check found.

use serde_json::{Value, json};

use crate::args::Output;
use crate::output::{Table, json_line, or_dash};
use crate::{Failure, exit};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Ok,
    Warn,
    Fail,
    Skipped,
}

impl Verdict {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
            Self::Skipped => "skipped",
        }
    }
}

#[derive(Debug)]
struct Finding {
    check: &'static str,
    verdict: Verdict,
    found: String,
    next: String,
}

/// Findings in the order in which they were made.
#[derive(Debug)]
pub(super) struct Report {
    sink: &'static str,
    findings: Vec<Finding>,
}

impl Report {
    pub(super) const fn new(sink: &'static str) -> Self {
        Self { sink, findings: Vec::new() }
    }

    /// As it should be.
    pub(super) fn ok(&mut self, check: &'static str, found: impl Into<String>) {
        self.add(check, Verdict::Ok, found, "");
    }

    /// Works, with a risk that `next` names.
    pub(super) fn warn(
        &mut self,
        check: &'static str,
        found: impl Into<String>,
        next: impl Into<String>,
    ) {
        self.add(check, Verdict::Warn, found, next);
    }

    /// Does not work until `next` is done.
    pub(super) fn fail(
        &mut self,
        check: &'static str,
        found: impl Into<String>,
        next: impl Into<String>,
    ) {
        self.add(check, Verdict::Fail, found, next);
    }

    /// Could not be looked at.
    pub(super) fn skip(&mut self, check: &'static str, why: impl Into<String>) {
        self.add(check, Verdict::Skipped, why, "");
    }

    /// `Ok` or `Fail` by a condition.
    pub(super) fn hold(
        &mut self,
        check: &'static str,
        holds: bool,
        found: impl Into<String>,
        next: &str,
    ) {
        if holds {
            self.ok(check, found);
        } else {
            self.fail(check, found, next);
        }
    }

    fn add(
        &mut self,
        check: &'static str,
        verdict: Verdict,
        found: impl Into<String>,
        next: impl Into<String>,
    ) {
        self.findings.push(Finding { check, verdict, found: found.into(), next: next.into() });
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.findings.iter().filter(|finding| finding.verdict == verdict).count()
    }

    /// Whether anything failed so far.
    pub(super) fn has_failed(&self) -> bool {
        self.count(Verdict::Fail) > 0
    }

    fn json(&self) -> Value {
        let checks: Vec<Value> = self
            .findings
            .iter()
            .map(|finding| {
                json!({
                    "check": finding.check,
                    "verdict": finding.verdict.as_str(),
                    "found": finding.found,
                    "next": (!finding.next.is_empty()).then_some(&finding.next),
                })
            })
            .collect();
        json!({
            "sink": self.sink,
            "usable": !self.has_failed(),
            "failed": self.count(Verdict::Fail),
            "warnings": self.count(Verdict::Warn),
            "checks": checks,
        })
    }

    /// Prints all and answers with the failure that the process ends with, if any check failed.
    pub(super) fn print(&self, output: Output) -> Result<(), Failure> {
        match output {
            Output::Json => json_line(&self.json()),
            Output::Table => {
                let mut table = Table::new(&["CHECK", "VERDICT", "FOUND", "NEXT"]);
                for finding in &self.findings {
                    table.row(vec![
                        finding.check.to_owned(),
                        finding.verdict.as_str().to_owned(),
                        finding.found.clone(),
                        or_dash(&finding.next),
                    ]);
                }
                table.print();
            }
        }
        match self.count(Verdict::Fail) {
            0 => Ok(()),
            failed => Err(Failure {
                message: format!(
                    "{failed} of {} checks failed: not usable as a fenced sink as it is",
                    self.findings.len()
                ),
                exit: exit::FAILED,
            }),
        }
    }
}
