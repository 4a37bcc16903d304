//! Integration tests: one binary that runs the real library and the real program.

mod gguf_writer;
mod model_map;
