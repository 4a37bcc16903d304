//! The tests: every row in a process of its own, since llama.cpp ends the process where it does not
//! like a model, and the tables of docs/models.md made from what was found.

use super::architectures::ARCHITECTURES;
use super::check::{self, Checks, Outcome};
use super::make;
use super::rows::Row;
use super::variants::{FILES, NO_GENERATORS, NOT_RUN, SHAPES, TYPES};
use crate::support::run;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The rows of [`NOT_RUN`], as a child names them.
const NOT_RUN_TABLE: &str = "not-run";

/// Which row a child checks: a table and an index.
const ROW: &str = "HOTPIN_TEST_ROW";
/// Set to have the tables of docs/models.md written anew.
const WRITE: &str = "HOTPIN_WRITE_TABLES";
/// What a child's result begins with.
const RESULT: &str = "ROW RESULT ";

/// The tables, as docs/models.md marks them.
const TABLES: [(&str, &[Row]); 4] = [
    ("architectures", ARCHITECTURES),
    ("types", TYPES),
    ("shapes", SHAPES),
    ("files", FILES),
];

/// Columns of what is shown.
const COLUMNS: [&str; 7] = [
    "loads",
    "routing",
    "slices",
    "mapped: decode",
    "mapped: prompt",
    "direct: decode",
    "direct: prompt",
];

fn rows(table: &str) -> &'static [Row] {
    let found = TABLES.iter().find(|(name, _)| *name == table);
    found.expect("a table").1
}

/// Checks one row; what it finds is printed.
#[test]
#[ignore = "the tests of the tables run it for each row"]
fn one_row() {
    let Ok(row) = std::env::var(ROW) else {
        return;
    };
    let (table, index) = row.split_once(' ').expect("a table and an index");
    let index: usize = index.parse().expect("an index");
    let row = if table == NOT_RUN_TABLE {
        &NOT_RUN[index].0
    } else {
        &rows(table)[index]
    };
    let folder = tempfile::tempdir().expect("folder");
    let found = make::model(row, folder.path())
        .ok_or_else(|| "llama.cpp makes no model of it".to_owned())
        .and_then(|made| check::run(&made));
    let line = format!("{RESULT}{}\n", found_json(found));
    std::io::stdout()
        .write_all(line.as_bytes())
        .expect("the parent listens");
}

fn found_json(found: Result<Checks, String>) -> Value {
    let cell = |outcome: Outcome| outcome.map_or_else(Value::from, |()| Value::Bool(true));
    match found {
        Err(why) => json!({ "stock": why }),
        Ok(checks) => {
            let [mapped_decode, mapped_prompt] = checks.mapped;
            let [direct_decode, direct_prompt] = checks.direct;
            let outcomes = [
                checks.loads,
                checks.routed,
                checks.slices,
                mapped_decode,
                mapped_prompt,
                direct_decode,
                direct_prompt,
            ];
            json!({ "cells": outcomes.map(cell), "split_layers": checks.split_layers })
        }
    }
}

/// Runs a row's child. What it said is part of what was found when llama.cpp did not run the model.
fn check_apart(table: &str, index: usize) -> Value {
    let program = std::env::current_exe().expect("own path");
    let output = Command::new(program)
        .args(["--exact", "zoo::table::one_row", "--ignored", "--nocapture"])
        .env(ROW, format!("{table} {index}"))
        .stdin(Stdio::null())
        .output()
        .expect("start");
    let stdout = String::from_utf8_lossy(&output.stdout);
    if let Some((_, result)) = stdout.split_once(RESULT) {
        let line = result.lines().next().expect("a line");
        let found: Value = serde_json::from_str(line).expect("JSON");
        if found.get("cells").is_some() {
            return found;
        }
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let causes = ["error", "failed", "ASSERT"];
    let said = stderr
        .lines()
        .filter(|line| causes.iter().any(|c| line.contains(c)));
    let said: Vec<&str> = said.collect();
    json!({ "stock": format!("{}: {}", output.status, said.join("; ")) })
}

/// What was found of every row of a table, in its order. Two processes at a time.
fn check_all(table: &str) -> Vec<Value> {
    let rows = rows(table);
    let next = AtomicUsize::new(0);
    let found = Mutex::new(vec![Value::Null; rows.len()]);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Relaxed);
                    if index >= rows.len() {
                        break;
                    }
                    let value = check_apart(table, index);
                    found.lock().expect("found")[index] = value;
                }
            });
        }
    });
    found.into_inner().expect("found")
}

/// The table in Markdown.
fn markdown(table: &str, found: &[Value]) -> String {
    let mut text = format!("| model | architecture | {} |\n", COLUMNS.join(" | "));
    text.push_str(&"|---".repeat(2 + COLUMNS.len()));
    text.push_str("|\n");
    for (row, found) in rows(table).iter().zip(found) {
        let cells = found["cells"].as_array().expect("cells");
        let cells = cells.iter().map(|cell| match cell {
            Value::Bool(true) => "yes",
            _ => "NO",
        });
        let cells: Vec<&str> = cells.collect();
        let _ = writeln!(
            text,
            "| {} | {} | {} |",
            row.name,
            row.architecture,
            cells.join(" | ")
        );
    }
    text
}

/// Checks a table's rows, and that docs/models.md has the table that they make.
fn check_table(table: &str) {
    let found = check_all(table);
    let wrong: Vec<String> = rows(table)
        .iter()
        .zip(&found)
        .filter(|(_, found)| {
            let cells = found["cells"].as_array();
            !cells.is_some_and(|cells| cells.iter().all(|cell| cell == &Value::Bool(true)))
        })
        .map(|(row, found)| format!("{} ({}): {found}", row.name, row.architecture))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/models.md");
    let page = std::fs::read_to_string(&path).expect("docs/models.md");
    let (begin, end) = (
        format!("<!-- table {table} -->\n"),
        format!("<!-- end {table} -->"),
    );
    let (before, rest) = page.split_once(&begin).expect("the table's begin");
    let (written, after) = rest.split_once(&end).expect("the table's end");
    let made = format!("\n{}\n", markdown(table, &found));
    if std::env::var_os(WRITE).is_some() {
        let page = format!("{before}{begin}{made}{end}{after}");
        std::fs::write(&path, page).expect("write");
        return;
    }
    assert_eq!(
        written, made,
        "docs/models.md is out of date; run this test with {WRITE}=1 to write its table"
    );
}

#[test]
fn every_architecture_computes_stock_bits_from_the_smallest_capacity() {
    check_table("architectures");
}

#[test]
fn every_type_of_weights_computes_stock_bits_from_the_smallest_capacity() {
    check_table("types");
}

#[test]
fn every_lie_of_files_computes_stock_bits_from_the_smallest_capacity() {
    check_table("files");
}

#[test]
fn every_odd_shape_computes_stock_bits_from_the_smallest_capacity() {
    check_table("shapes");
}

#[test]
fn what_llama_cpp_itself_does_not_run_is_known() {
    for (index, (row, words)) in NOT_RUN.iter().enumerate() {
        let found = check_apart(NOT_RUN_TABLE, index);
        let said = found["stock"].as_str().unwrap_or_default();
        assert!(said.contains(words), "{}: {found}", row.name);
    }
}

#[test]
fn models_that_do_not_generate_are_refused() {
    for row in NO_GENERATORS {
        let folder = tempfile::tempdir().expect("folder");
        let made = make::model(row, folder.path()).expect("a model");
        let path = made.path.to_str().expect("UTF-8");
        for policy in ["off", "adaptive"] {
            let arguments = ["run", path, "-p", "a", "-n", "1", "--policy", policy];
            run(arguments).failure(1, &["embed", path]);
        }
    }
}
