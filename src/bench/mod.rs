//! Benchmarks: a parent that runs policies in turn, each in a fresh child process, and the child
//! that measures one of them.

pub mod measure;
pub mod protocol;
