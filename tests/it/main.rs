//! Integration tests: one binary that runs the real library and the real program.

mod bench_parent;
mod client;
mod config;
mod demo_model;
mod generated;
mod gguf_writer;
mod learn;
mod live_batch;
mod live_chat;
mod live_cli;
mod live_direct;
mod live_engine;
mod live_store;
mod model_map;
mod scale;
mod sensors;
mod server;
mod server_config;
mod server_control;
mod server_crowd;
mod server_ended;
mod server_safety;
mod server_top;
mod support;
mod zoo;
