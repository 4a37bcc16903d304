//! llama.cpp and ggml.

pub mod capture;
pub mod gguf_write;
pub mod quantize;
