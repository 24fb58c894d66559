//! Pages that list what the code has are compared with the code.

#![allow(clippy::unwrap_used, reason = "helpers of tests are outside test functions")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tenure_model::ErrorCode;

fn root() -> PathBuf {
    // Tests run in the folder of their package; one that was compiled in may be another checkout's.
    Path::new("..").canonicalize().unwrap()
}

fn page(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap()
}

#[test]
fn every_error_code_has_a_section_and_no_section_lacks_a_code() {
    let page = page("docs/errors.md");
    let sections: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let codes: BTreeSet<&str> = ErrorCode::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(sections, codes);
}

#[test]
fn every_setting_of_a_node_is_in_the_table_with_its_default() {
    let page = page("docs/operations.md");
    let defaults = toml_table(&tenure_coordinator::NodeSettings::default());
    for (name, default) in defaults {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        let row = row.unwrap_or_else(|| panic!("docs/operations.md has no row for `{name}`"));
        assert!(
            row.contains(&format!("| {default} |")),
            "`{name}` has the default {default}: {row}"
        );
    }
}

/// Names and defaults of all settings, tables as `table.name`.
fn toml_table(settings: &tenure_coordinator::NodeSettings) -> Vec<(String, String)> {
    let value = serde_json::to_value(settings).unwrap();
    let mut rows = Vec::new();
    for (name, value) in value.as_object().unwrap() {
        if let Some(table) = value.as_object() {
            rows.extend(
                table.iter().map(|(key, value)| (format!("{name}.{key}"), value.to_string())),
            );
        } else if value.is_null() {
            rows.push((name.clone(), "none".to_owned()));
        } else {
            rows.push((name.clone(), value.to_string().replace('"', "")));
        }
    }
    rows
}

#[test]
fn every_metric_of_consumers_is_in_the_table_with_its_kind_and_no_row_lacks_a_metric() {
    let page = page("docs/metrics.md");
    let rows: BTreeSet<String> = page
        .lines()
        .filter(|line| line.starts_with("| `tenure_consumer_"))
        .map(|line| line.split('|').skip(1).take(2).map(str::trim).collect::<Vec<_>>().join(" "))
        .collect();
    let metrics: BTreeSet<String> = tenure_sdk::metrics::all()
        .iter()
        .map(|metric| format!("`{}` {}", metric.name, format!("{:?}", metric.kind).to_lowercase()))
        .collect();
    assert_eq!(rows, metrics);
}

#[test]
fn pages_link_to_files_that_exist() {
    let mut pages = vec![root().join("README.md")];
    for folder in ["docs", "docs/decisions", "docs/sinks"] {
        let files = std::fs::read_dir(root().join(folder)).unwrap();
        pages.extend(
            files
                .map(|file| file.unwrap().path())
                .filter(|p| p.extension().is_some_and(|e| e == "md")),
        );
    }
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.starts_with("http") || link.starts_with('#') {
                continue;
            }
            let target = page.parent().unwrap().join(link.split('#').next().unwrap());
            assert!(target.exists(), "{}: {link} leads nowhere", page.display());
        }
    }
}

#[test]
fn every_test_that_a_case_names_exists() {
    let page = page("docs/cases.md");
    let rows = page.lines().filter(|line| line.starts_with('|'));
    let named: BTreeSet<&str> = rows
        .flat_map(|row| row.split('`').skip(1).step_by(2))
        .filter(|name| name.contains('_'))
        .collect();
    let mut functions = BTreeSet::new();
    for folder in ["cli", "consumer-sdk", "coordinator", "proto", "tests"] {
        collect_functions(&root().join(folder), &mut functions);
    }
    let absent: Vec<&&str> = named.iter().filter(|name| !functions.contains(**name)).collect();
    assert!(absent.is_empty(), "docs/cases.md names tests that are not there: {absent:?}");
    assert!(named.len() > 100, "the page names {} tests only: is it still a table?", named.len());
}

/// Names of all functions in the Rust files below `folder`.
fn collect_functions(folder: &Path, functions: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect_functions(&path, functions);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let names = text.split("fn ").skip(1).filter_map(|rest| rest.split(['(', '<']).next());
            functions.extend(names.map(|name| name.trim().to_owned()));
            // Tests that a macro makes of a table: `name: Row,`.
            let rows = text.lines().filter_map(|line| line.trim().split_once(": "));
            functions.extend(rows.map(|(name, _)| name.to_owned()));
        }
    }
}
