//! Integration tests: one binary that runs the real library and the real program.

mod bench_parent;
mod gguf_writer;
mod model_map;
mod sensors;
