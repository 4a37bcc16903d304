//! `store::pages`, `store::slice` and `store::boundary` as they are.
#![allow(dead_code, reason = "the rest of the store calls it")]

#[path = "../../../src/store/boundary.rs"]
mod boundary;
#[path = "../../../src/store/pages.rs"]
mod pages;
#[path = "../../../src/store/slice.rs"]
mod slice;
