//! x
mod bench_parent;
