//! x

mod gguf_writer;
mod model_map;
